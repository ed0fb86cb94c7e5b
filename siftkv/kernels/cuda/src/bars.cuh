// Where the bar stands that a token has to reach, for each row: a survey fills a histogram of the row's logits from all keys, `find_thresholds` reads from it
// which bucket holds the row's share of attention. A first look at a part of the keys says where the row's window of buckets has to stand (`place_windows`).
DEV void clear_counts(Shared& s) {
  for (int i = threadIdx.x; i < HISTOGRAM_WORDS / 4; i += SELECT_THREADS) reinterpret_cast<uint4*>(s.histogram)[i] = uint4{0, 0, 0, 0};
  if (threadIdx.x < ROWS)
    for (int t = 0; t < TEAMS; t++) s.total[t][threadIdx.x] = s.below[t][threadIdx.x] = 0.f;
  sync_block();
}
template <bool FIRST = false> DEV int counted(const Shared& s, int histogram, int bucket, int row) {
  using W = Window<FIRST>;
  const u32* at = s.histogram + (histogram * BUCKETS + bucket) * W::bucket_words + word_of(row) * W::copies;
  u32 sum = 0;
  if constexpr (W::copies == 4) {  // by one load
    uint4 x = *reinterpret_cast<const uint4*>(at);
    u32 shift = 16 * half_of(row);
    sum = (x.x >> shift & 0xFFFFu) + (x.y >> shift & 0xFFFFu) + (x.z >> shift & 0xFFFFu) + (x.w >> shift & 0xFFFFu);
    return static_cast<int>(sum);
  }
#pragma unroll
  for (int i = 0; i < W::copies; i++) sum += at[i] >> (16 * half_of(row)) & 0xFFFFu;
  return static_cast<int>(sum);
}
template <int N> DEV float sum_of(const float (&x)[N][ROWS], int row) {
  float sum = 0.f;
  for (int i = 0; i < N; i++) sum += x[i][row];
  return sum;
}
// Windows from a first look: they begin three octaves, of eight, below where the share seems to be reached (with a pool five, of sixteen).
DEV void place_windows(const Select& a, Shared& s) {
  constexpr float fine = Window<true>::fine;
  constexpr int each = 2 * BUCKETS / PARTS;
  int row = threadIdx.x % ROWS, part = threadIdx.x / ROWS, own = 0;
#pragma unroll 8
  for (int b = part * each; b < (part + 1) * each; b++) own = counted<true>(s, 0, b, row) > 0 ? b : own;
  s.most[part][row] = static_cast<float>(own);
  sync_block();
  if (part == 0) {
    int first = 1;
    for (int i = 0; i < PARTS; i++) first = max_int(first, static_cast<int>(s.most[i][row]));
    float all = 0.f, held = 0.f;
#pragma unroll 4
    for (int i = 0; i < 20; i++) all += first > i ? static_cast<float>(counted<true>(s, 0, first - i, row)) * exp2_fast(-i / fine) : 0.f;
    int bucket = first + 1;
    while (bucket > 1 && held < a.p * all) bucket--, held += static_cast<float>(counted<true>(s, 0, bucket, row)) * exp2_fast((bucket - first) / fine);
    s.low[row] = (bucket - 0.5f) / fine + COARSE_LOW - (REACH > 0 ? 5.f : 3.f);
    s.moved[row] = 0;
  }
  sync_block();
}
// The largest bucket below which tokens surely hold no more than the share 1 - p, with the most that buckets can hold: R <= (1 - p) T. 0 or TOP where it
// stands below or above the window.
DEV int find_share(const Select& a, const Shared& s, int row) {
  float rest = sum_of(s.below, row), left = (1.f - a.p) * sum_of(s.total, row);
  if (a.p >= 1.f) return 1;
  if (rest > left) return 0;
  int part = 0;
  while (part < PARTS - 1 && rest + s.most[part][row] <= left) rest += s.most[part++][row];
  for (int bucket = max_int(1, part * PART); bucket < TOP; bucket++) {
    rest += static_cast<float>(counted(s, 0, bucket, row)) * exp2_fast(edge(bucket + 1));
    if (rest > left) return bucket;
  }
  return TOP;
}
// Thresholds of all rows. False where a window did not hold one; it has moved then.
DEV bool find_thresholds(const Select& a, const Head& h, Shared& s, int block) {
  constexpr int overlap = 7;
  constexpr float width = static_cast<float>(TOP - overlap) / FINE;
  int row = threadIdx.x % ROWS, part = threadIdx.x / ROWS;
  float most = 0.f;
  u32 tokens = 0;  // of a part of the row's histogram; of that of maxima, in the upper half
#pragma unroll 4
  for (int b = part * PART; b < min_int(BUCKETS, (part + 1) * PART); b++) {
    u32 own = counted(s, 0, b, row);
    if (b > 0 && b < TOP) most += static_cast<float>(own) * exp2_fast(edge(b + 1));
    if (COUNTS_ABOVE) tokens += own;
    if (REACH > 0) tokens += static_cast<u32>(counted(s, 1, b, row)) << 16;
  }
  s.most[part][row] = most, s.counts[threadIdx.x] = tokens;
  sync_block();
  bool failed = false;
  if (part == 0) {
    bool counts = block * ROWS + row < h.rows && s.visible[row] > 0;
    int bucket = counts ? find_share(a, s, row) : NEVER_REACHED, count = 0, pooled = NEVER_REACHED;
    // Only rounding sends a row back to where it came from: there the edge that it passed is sound.
    if (bucket == 0 && s.moved[row] > 0) bucket = overlap;
    int move = bucket == TOP && s.moved[row] >= 0 ? 1 : bucket == 0 ? -1 : 0;
    if (COUNTS_ABOVE && counts) {
      int next = bucket / PART + 1;
      for (int i = next; i < PARTS; i++) count += static_cast<int>(s.counts[i * ROWS + row] & 0xFFFFu);
#pragma unroll 4
      for (int b = bucket; b < min_int(BUCKETS, next * PART); b++) count += counted(s, 0, b, row);
    }
    if (counts && REACH > 0) {
      int more = 0, last = PARTS - 1;
      for (; last > 0 && more + static_cast<int>(s.counts[last * ROWS + row] >> 16) < count; last--) more += static_cast<int>(s.counts[last * ROWS + row] >> 16);
      for (pooled = min_int(BUCKETS, (last + 1) * PART); pooled > 1 && more < count;) more += counted(s, 1, --pooled, row);
    }
    s.exponent[row] = counts ? s.low[row] + log2_fast(sum_of(s.total, row)) : INF;
    float up = move * width;
    // A pooled threshold above the window: as far up as the row's own threshold lets it go.
    if (REACH > 0 && move == 0 && pooled == TOP && bucket >= 2 * FINE && bucket < TOP) up = static_cast<float>(bucket / FINE - 1);
    failed = up != 0.f;
    s.low[row] += up, s.moved[row] = move;
    s.count[row] = count, s.threshold[row] = bucket, s.pooled[row] = pooled;
  }
  return !any_of_block(failed);
}
