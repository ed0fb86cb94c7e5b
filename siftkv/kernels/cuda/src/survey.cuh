// Where the bar stands that a token has to reach, for each row: `survey` fills a histogram of the row's logits from all keys, `find_thresholds` reads from it
// which bucket holds the row's share of attention. A first look at a part of the keys says where the row's window of buckets has to stand; where it was
// wrong, the window moves and the keys are read once more.
constexpr int PARTS = SELECT_THREADS / ROWS, PART = (BUCKETS + PARTS - 1) / PARTS;

struct Shared {
  u32 histogram[HISTOGRAMS * BUCKETS * WORDS];  // counters of 16 bits, two rows a word; later scores, then ranks
  u8 lines[TEAMS][STAGES * KEYS * PITCH];
  u64 full[TEAMS][STAGES], empty[TEAMS][STAGES];
  float total[TEAMS][ROWS], above[TEAMS][ROWS], below[TEAMS][ROWS];  // masses: all, beyond the windows
  float least[PARTS][ROWS], most[PARTS][ROWS];                       // what a part of a histogram holds
  float low[ROWS], exponent[ROWS];
  int threshold[ROWS], pooled[ROWS], count[ROWS], moved[ROWS], visible[ROWS], of_query[MOST_QUERIES];
  u32 counts[SELECT_THREADS];
  Head head;
};
static_assert(sizeof(Shared) <= SHARED_BYTES && (!BY_SCORE || sizeof(Shared::histogram) > 4 * 0x7801), "shared memory; scores have 0x7801 values");
constexpr int NEVER_REACHED = 0x7FFF;  // a threshold
constexpr bool COUNTS_ABOVE = REACH > 0 || BY_SCORE;  // else only masses matter there

// A lane's view of the rows that it holds results of.
struct Lane {
  int visible[HELD][2], least;
  bool active;
  DEV void read(const Shared& s, const Head& h, int block, int rank) {
    int g = (threadIdx.x & 31) >> 2;
    least = 1 << 30;
    active = block * ROWS + WARP_ROWS * rank < h.rows;
#pragma unroll
    for (int m = 0; m < HELD; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) least = min_int(least, visible[m][half] = s.visible[WARP_ROWS * rank + 16 * m + 8 * half + g]);
    for (int o = 4; o < 32; o <<= 1) least = min_int(least, shuffle_xor(least, o));
  }
};
DEV bool is_plain(const Lane& lane, int tile) { return first_of(tile) >= 0 && first_of(tile) + KEYS <= lane.least; }
// Products of a tile with the log-weights of its tokens, -inf where a row does not see a token.
DEV void logits_of(float (&c)[HELD][TILES][4], const Select& a, const Head& h, const Lane& lane, const Rows& rows, int tile, u32 keys) {
  int v = first_of(tile) + (threadIdx.x & 31), t = threadIdx.x & 3;
  float weight = 0.f;
  if constexpr (WEIGHTED) weight = v >= 0 && v < h.total ? weight_of(a, h, v) * (LOG2_E / LOGIT_SCALE) : 0.f;
  multiply(c, rows, keys);
  if constexpr (WEIGHTED) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float more = __shfl_sync(ALL, weight, 8 * n + 2 * t + (i & 1));
#pragma unroll
        for (int m = 0; m < HELD; m++) c[m][n][i] += more;
      }
  }
  if (is_plain(lane, tile)) return;
#pragma unroll
  for (int m = 0; m < HELD; m++)
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        int token = first_of(tile) + 8 * n + 2 * t + (i & 1);
        if (token < 0 || token >= lane.visible[m][i / 2]) c[m][n][i] = -INF;
      }
}
template <class F> DEV void each_row(F f) {
#pragma unroll
  for (int m = 0; m < HELD; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) f(m, half, 16 * m + 8 * half + ((threadIdx.x & 31) >> 2));
}

// Of one tile of 16 rows: two rows' buckets a word, and pooled ones.
struct Buckets {
  u32 own[TILES][2], pooled[TILES][2];
  DEV void find(const float (&c)[TILES][4], float slope, const float (&offset)[2], const Near& near, bool plain) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int e = 0; e < 2; e++)
        own[n][e] = __byte_perm(__float_as_uint(bucket_of(c[n][e], slope, offset[0])), __float_as_uint(bucket_of(c[n][2 + e], slope, offset[1])), 0x5410);
    if (near.all) pool_words<false>(pooled, own, near);
    else pool_words<true>(pooled, own, near);
    if (plain) return;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) pooled[n][e] &= (c[n][e] > -INF ? 0xFFFFu : 0u) | (c[n][2 + e] > -INF ? 0xFFFF0000u : 0u);
  }
};
DEV Near near_in(const Select& a, const Head& h, int tile) {
  Near near;
  int v = first_of(tile) + (threadIdx.x & 31);
  bool inside = v >= 0 && v < h.total;
  near.find(inside ? position_of(a, h, v) : 0, inside);
  return near;
}
DEV bool is_inner(int n, int e) {
  int j = 8 * n + 2 * (threadIdx.x & 3) + e;
  return HALO == 0 || (n > 0 && n < TILES - 1) || (j >= HALO && j < KEYS - HALO);
}

DEV void clear_counts(Shared& s) {
  for (int i = threadIdx.x; i < HISTOGRAMS * BUCKETS * WORDS; i += SELECT_THREADS) s.histogram[i] = 0;
  if (threadIdx.x < ROWS)
    for (int t = 0; t < TEAMS; t++) s.total[t][threadIdx.x] = s.above[t][threadIdx.x] = s.below[t][threadIdx.x] = 0.f;
  __syncthreads();
}
// Counts tokens in the rows' windows, each `weight` times, and adds up the masses of all, of those above and of those below. `fine`: buckets an octave.
DEV void survey(const Select& a, const Head& h, Shared& s, Pipe& pipe, const Rows& rows, const Lane& lane, int from, int to, int step, float fine, u32 weight) {
  float total[HELD][2] = {}, above[HELD][2] = {}, below[HELD][2] = {}, offset[HELD][2], minus[HELD][2], slope = slope_of(fine);
  each_row([&](int m, int half, int row) {
    float low = s.low[WARP_ROWS * pipe.rank + row];
    minus[m][half] = -low, offset[m][half] = offset_of(fine, low);
  });
  u32 histogram = shared_address(s.histogram), one[2] = {weight, weight << 16};
  int word = (8 * HELD * pipe.rank + ((threadIdx.x & 31) >> 2)) * COPIES + threadIdx.x % COPIES;
  stream(a, h, pipe, from, to, step, [&](int tile, u32 keys) {
    if (!lane.active) return;
    float c[HELD][TILES][4];
    Near near;
    if constexpr (REACH > 0) near = near_in(a, h, tile);
    logits_of(c, a, h, lane, rows, tile, keys);
#pragma unroll
    for (int m = 0; m < HELD; m++) {
      Buckets b;
      if constexpr (REACH > 0) b.find(c[m], slope, offset[m], near, is_plain(lane, tile));
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int half = i / 2, e = i & 1;
          // Halos count for nothing; a branch would cost more.
          bool inner = is_inner(n, e);
          float mass = exp2_fast(inner ? fmaf(c[m][n][i], LOGIT_SCALE, minus[m][half]) : -INF);
          u32 own = inner ? one[half] : 0u;
          total[m][half] += mass;
          float x = REACH > 0 ? __uint_as_float(0x4B000000u | (b.own[n][e] >> (16 * half) & 0xFFFFu)) : bucket_of(c[m][n][i], slope, offset[m][half]);
          if (x < MAGIC + 1.f) below[m][half] += mass;
          if (x >= MAGIC + TOP) above[m][half] += mass;
          count_in(histogram, __float_as_uint(x), word + 8 * COPIES * m, own);
          if constexpr (REACH > 0)
            count_in(histogram + 4 * BUCKETS * WORDS, b.pooled[n][e] >> (16 * half) & 0xFFFFu, word + 8 * COPIES * m, own);
        }
    }
  });
  each_row([&](int m, int half, int row) {
    row += WARP_ROWS * pipe.rank;
    float sums[3] = {total[m][half], above[m][half], below[m][half]};
    for (float& x : sums) x += shuffle_xor(x, 1), x += shuffle_xor(x, 2);
    if ((threadIdx.x & 3) == 0) s.total[pipe.team][row] += sums[0], s.above[pipe.team][row] += sums[1], s.below[pipe.team][row] += sums[2];
  });
  __syncthreads();
}

DEV int counted(const Shared& s, int histogram, int bucket, int row) {
  const u32* at = s.histogram + (histogram * BUCKETS + bucket) * WORDS + word_of(row) * COPIES;
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < COPIES; i++) sum += at[i] >> (16 * half_of(row)) & 0xFFFFu;
  return static_cast<int>(sum);
}
template <int N> DEV float sum_of(const float (&x)[N][ROWS], int row) {
  float sum = 0.f;
  for (int i = 0; i < N; i++) sum += x[i][row];
  return sum;
}
// Windows from a first look: they begin three octaves, of eight, below where the share seems to be reached (with a pool five, of sixteen).
DEV void place_windows(const Select& a, Shared& s) {
  int row = threadIdx.x;
  if (row < ROWS) {
    int first = TOP;
    while (first > 1 && counted(s, 0, first, row) == 0) first--;
    float all = 0.f, held = 0.f;
    for (int b = first; b > max_int(0, first - 20); b--) all += counted(s, 0, b, row) * exp2_fast((b - first) * (1.f / COARSE));
    int bucket = first + 1;
    while (bucket > 1 && held < a.p * all) bucket--, held += counted(s, 0, bucket, row) * exp2_fast((bucket - first) * (1.f / COARSE));
    s.low[row] = (bucket - 0.5f) * (1.f / COARSE) + COARSE_LOW - (REACH > 0 ? 5.f : 3.f);
    s.moved[row] = 0;
  }
  __syncthreads();
}
// The largest bucket from which on tokens surely hold the share p: S (1 - p) >= p R, with the least that they and the most that the others can hold.
// 0 or TOP where it stands below or above the window.
DEV int find_share(const Select& a, const Shared& s, int row) {
  float held = sum_of(s.above, row), beneath = sum_of(s.below, row);
  auto enough = [&](float more, float rest) { return (held + more) * (1.f - a.p) >= a.p * rest; };
  if (a.p >= 1.f) return 1;
  if (enough(0.f, sum_of(s.most, row) + beneath)) return TOP;
  for (int i = PARTS - 1; i >= 0; i--) {
    float rest = beneath;
    for (int j = 0; j < i; j++) rest += s.most[j][row];
    if (i > 0 && !enough(s.least[i][row], rest)) {
      held += s.least[i][row];
      continue;
    }
    rest += s.most[i][row];
    for (int bucket = min_int(TOP, (i + 1) * PART) - 1; bucket >= max_int(1, i * PART); bucket--) {
      float n = static_cast<float>(counted(s, 0, bucket, row));
      held += n * exp2_fast(edge(bucket)), rest -= n * exp2_fast(edge(bucket + 1));
      if (enough(0.f, rest)) return bucket;
    }
  }
  return beneath > 0.f ? 0 : 1;
}
// Thresholds of all rows. False where a window did not hold one; it has moved then.
DEV bool find_thresholds(const Select& a, const Head& h, Shared& s, int block) {
  constexpr int overlap = 15;
  constexpr float width = static_cast<float>(TOP - overlap) / FINE;
  int row = threadIdx.x % ROWS, part = threadIdx.x / ROWS;
  float least = 0.f, most = 0.f;
#pragma unroll 4
  for (int b = max_int(1, part * PART); b < min_int(TOP, (part + 1) * PART); b++) {
    float n = static_cast<float>(counted(s, 0, b, row));
    least += n * exp2_fast(edge(b)), most += n * exp2_fast(edge(b + 1));
  }
  s.least[part][row] = least, s.most[part][row] = most;
  __syncthreads();
  bool failed = false;
  if (part == 0) {
    bool counts = block * ROWS + row < h.rows && s.visible[row] > 0;
    int bucket = counts ? find_share(a, s, row) : NEVER_REACHED, count = 0, pooled = NEVER_REACHED;
    // What lies beyond the window is known exactly, what lies inside with a margin, so that a row can be sent to and fro: then the edge is sound.
    if (bucket == 0 && s.moved[row] > 0) bucket = overlap;
    int move = bucket == TOP && s.moved[row] >= 0 ? 1 : bucket == 0 ? -1 : 0;
    if (COUNTS_ABOVE) {
#pragma unroll 4
      for (int b = bucket; b < BUCKETS; b++) count += counted(s, 0, b, row);
    }
    if (counts && REACH > 0) {
      int more = 0;
      for (pooled = BUCKETS; pooled > 1 && more < count;) more += counted(s, 1, --pooled, row);
    }
    s.exponent[row] = counts ? s.low[row] + log2_fast(sum_of(s.total, row)) : INF;
    float up = move * width;
    // A pooled threshold above the window: as far up as the row's own threshold lets it go.
    if (REACH > 0 && move == 0 && pooled == TOP && bucket >= 2 * FINE && bucket < TOP) up = static_cast<float>(bucket / FINE - 1);
    failed = up != 0.f;
    s.low[row] += up, s.moved[row] = move;
    s.count[row] = count, s.threshold[row] = bucket, s.pooled[row] = pooled;
  }
  return !__syncthreads_or(failed);
}
// Looks at every 16th tile of the middle and at all of either end, where sinks and recent tokens are, to know where to count.
DEV void find_bars(const Select& a, const Head& h, Shared& s, Pipe& pipe, const Rows& rows, const Lane& lane, int block) {
  constexpr int sampled = 16;
  enum { MIDDLE, FIRST, LAST, EVERYTHING };
  int tiles = ceil_div(h.total, STRIDE), last = (h.total - h.ring) / STRIDE, tries = 0;
  bool samples = last >= 48;
  if (threadIdx.x < ROWS) s.low[threadIdx.x] = COARSE_LOW;
  clear_counts(s);
  for (int phase = samples ? MIDDLE : LAST;; phase++) {
    int from = phase == MIDDLE ? sampled / 2 : phase == LAST && samples ? last : 0, to = phase == MIDDLE ? last : phase == FIRST ? 1 : tiles;
    survey(a, h, s, pipe, rows, lane, from, to, phase == MIDDLE ? sampled : 1, phase == EVERYTHING ? FINE : COARSE, phase == MIDDLE ? sampled : 1);
    if (phase < LAST) continue;
    if (phase == LAST) place_windows(a, s);
    else if (find_thresholds(a, h, s, block) || ++tries == 24) return;
    clear_counts(s);
    phase = LAST;
  }
}
