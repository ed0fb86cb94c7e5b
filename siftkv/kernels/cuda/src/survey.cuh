// Where the bar stands that a token has to reach, for each row: `survey` fills a histogram of the row's logits from all keys, `find_thresholds` reads from it
// which bucket holds the row's share of attention. A first look at a part of the keys says where the row's window of buckets has to stand; where it was
// wrong, the window moves and the keys are read once more.
constexpr int PARTS = SELECT_THREADS / ROWS, PART = (BUCKETS + PARTS - 1) / PARTS;

struct Shared {
  u32 histogram[HISTOGRAM_WORDS];  // counters of 16 bits, two rows a word; with the lines later scores, then ranks
  u8 lines[TEAMS][STAGES * STAGE_BYTES];
  u64 full[TEAMS][STAGES], empty[TEAMS][STAGES];
  float total[TEAMS][ROWS], below[TEAMS][ROWS];   // masses: all, those below the windows
  float most[PARTS][ROWS];                        // what a part of a histogram may hold
  float low[ROWS], exponent[ROWS];
  int threshold[ROWS], pooled[ROWS], count[ROWS], moved[ROWS], visible[ROWS], of_query[MOST_QUERIES];
  u32 counts[SELECT_THREADS];
  Head head;
  DEV u32* scratch() { return reinterpret_cast<u32*>(this); }  // SCRATCH_WORDS between passes
};
static_assert(sizeof(Shared) <= SHARED_BYTES && (!BY_SCORE || SCRATCH_WORDS >= 0x7801), "shared memory; scores have 0x7801 values");
constexpr int NEVER_REACHED = 0x7FFF;  // a threshold
constexpr bool COUNTS_ABOVE = REACH > 0 || BY_SCORE;  // else only masses matter there

// A lane's view of the rows that it holds results of.
struct Lane {
  int visible[HELD][2], least;
  bool active;
  DEV void read(const Shared& s, const Head& h, int block, int rank) {
    least = 1 << 30;
    active = block * ROWS + 16 * rank < h.rows;
#pragma unroll
    for (int m = 0; m < HELD; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) least = min_int(least, visible[m][half] = s.visible[row_of(rank, m, half)]);
    for (int o = 4; o < 32; o <<= 1) least = min_int(least, shuffle_xor(least, o));
  }
};
DEV bool is_plain(const Lane& lane, int tile) { return first_of(tile) >= 0 && first_of(tile) + KEYS <= lane.least; }
// Products of the m-th rows of a lane with the log-weights of their tokens, -inf where a row does not see a token.
template <int LATER> DEV void finish_logits(float (&c)[TILES][4], const Head& h, const Lane& lane, const int (&visible)[2], int tile, u32 stage) {
  int first = LANE_KEYS * (threadIdx.x & 3);
  await_products<LATER>(c);
  if constexpr (WEIGHTED) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float more = __uint_as_float(load_shared(stage + WEIGHTS_AT + 4 * (first + 2 * n + e))) * (LOG2_E / LOGIT_SCALE);
        c[n][e] += more, c[n][2 + e] += more;
      }
  }
  if (is_plain(lane, tile)) return;
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = first_of(tile) + first + 2 * n + (i & 1);
      if (token < 0 || token >= visible[i / 2]) c[n][i] = -INF;
    }
}
// `f(m, c[m])` for a lane's rows, as their products come; the tile's stage is free after the last have.
template <class Release, class F>
DEV void each_logits(float (&c)[HELD][TILES][4], const Head& h, const Lane& lane, int tile, u32 stage, Release release, F f) {
#pragma unroll
  for (int m = 0; m < HELD; m++) {
    if (m == HELD - 1) {
      finish_logits<0>(c[m], h, lane, lane.visible[m], tile, stage);
      release();
    } else {
      finish_logits<HELD - 1>(c[m], h, lane, lane.visible[m], tile, stage);
    }
    f(m, c[m]);
  }
}
template <class F> DEV void each_row(int rank, F f) {
#pragma unroll
  for (int m = 0; m < HELD; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) f(m, half, row_of(rank, m, half));
}

// Buckets of one tile of 16 rows.
DEV void find_words(Words& words, const float (&c)[TILES][4], const float (&offset)[2]) {
#pragma unroll
  for (int i = 0; i < LANE_KEYS; i++) {
    u32 first = __float_as_uint(Window<false>::bucket_of(c[i / 2][i % 2], offset[0])), second = __float_as_uint(Window<false>::bucket_of(c[i / 2][2 + i % 2], offset[1]));
    words.own[i] = __byte_perm(first, second, 0x5410);
  }
  words.find_neighbours();
}
// Pooled buckets of some of them; 0 for tokens that a row does not see.
DEV void pool_part(u32 (&pooled)[PART_KEYS], const Words& words, const float (&c)[TILES][4], int first, const Near& near, bool plain) {
  words.pool(pooled, first, near);
  if (plain) return;
#pragma unroll
  for (int i = 0; i < PART_KEYS; i++) {
    const float(&pair)[4] = c[(first + i) / 2];
    pooled[i] &= (pair[i % 2] > -INF ? 0xFFFFu : 0u) | (pair[2 + i % 2] > -INF ? 0xFFFF0000u : 0u);
  }
}
DEV bool is_inner(int i) {
  int t = threadIdx.x & 3;
  return HALO == 0 || ((i >= HALO || t != 0) && (i < LANE_KEYS - HALO || t != 3));
}

DEV void clear_counts(Shared& s) {
  for (int i = threadIdx.x; i < HISTOGRAM_WORDS / 4; i += SELECT_THREADS) reinterpret_cast<uint4*>(s.histogram)[i] = uint4{0, 0, 0, 0};
  if (threadIdx.x < ROWS)
    for (int t = 0; t < TEAMS; t++) s.total[t][threadIdx.x] = s.below[t][threadIdx.x] = 0.f;
  __syncthreads();
}
// Counts tokens in the rows' windows; a first look counts them as often as their tile weighs, the other adds up the masses of all and of those below, too.
template <bool FIRST> DEV void read_survey(const Select& a, const Head& h, Shared& s, Pipe& pipe, int block, const Tiles& tiles) {
  using W = Window<FIRST>;
  Rows rows;
  Lane lane;
  rows.load(a, h, block * ROWS, pipe.rank);
  lane.read(s, h, block, pipe.rank);
  float total[HELD][2] = {}, below[HELD][2] = {}, offset[HELD][2], minus[HELD][2], bottom[HELD][2];
  each_row(pipe.rank, [&](int m, int half, int row) {
    float low = FIRST ? COARSE_LOW : s.low[row];
    minus[m][half] = -low, offset[m][half] = W::offset_of(low), bottom[m][half] = W::beneath(offset[m][half]);
  });
  int t = threadIdx.x & 3;
  u32 word = shared_address(s.histogram) + 4 * (W::copies * (8 * pipe.rank + ((threadIdx.x & 31) >> 2)) + t % W::copies);
  take(a, h, pipe, rows, tiles, [&](int tile, u32 stage, float(&products)[HELD][TILES][4], auto release) {
    Near near;
    if constexpr (REACH > 0 && !FIRST) near.find(h, tile, stage);
    u32 weight = FIRST ? tiles.weight(tile) : 1u;
    each_logits(products, h, lane, tile, stage, release, [&](int m, const float(&c)[TILES][4]) {
      if (!lane.active) return;
      u32 counters = word + m * 32 * W::copies * TEAM_WARPS;
      Words words;
      if constexpr (REACH > 0 && !FIRST) find_words(words, c, offset[m]);
#pragma unroll
      for (int first = 0; first < LANE_KEYS; first += PART_KEYS) {
        u32 pooled[PART_KEYS];
        if constexpr (REACH > 0 && !FIRST) pool_part(pooled, words, c, first, near, is_plain(lane, tile));
#pragma unroll
        for (int token = first; token < first + PART_KEYS; token++) {
          // Halos count for nothing; a branch would cost more.
          bool inner = is_inner(token);
          u32 one = inner ? weight : 0u;
#pragma unroll
          for (int half = 0; half < 2; half++) {
            float z = c[token / 2][2 * half + token % 2];
            count_in(W::counter_of(counters, __float_as_uint(W::bucket_of(z, offset[m][half]))), one << (16 * half));
            if constexpr (FIRST) continue;
            float mass = exp2_fast(fmaf(z, LOGIT_SCALE, inner ? minus[m][half] : -INF));
            total[m][half] += mass;
            if (z <= bottom[m][half]) below[m][half] += mass;
            if constexpr (REACH > 0) count_in(W::counter_of(counters + 4 * BUCKETS * W::bucket_words, half ? pooled[token - first] >> 16 : pooled[token - first] & 0xFFFFu), one << (16 * half));
          }
        }
      }
    });
  });
  if constexpr (FIRST) return;
  each_row(pipe.rank, [&](int m, int half, int row) {
    float sums[2] = {total[m][half], below[m][half]};
    for (float& x : sums) x += shuffle_xor(x, 1), x += shuffle_xor(x, 2);
    if (t == 0) s.total[pipe.team][row] = sums[0], s.below[pipe.team][row] = sums[1];
  });
}
template <bool FIRST> DEV void survey(const Select& a, const Head& h, Shared& s, Pipe& pipe, int block, const Tiles& tiles) {
  stream(a, h, pipe, tiles, [&] { read_survey<FIRST>(a, h, s, pipe, block, tiles); });
}

template <bool FIRST = false> DEV int counted(const Shared& s, int histogram, int bucket, int row) {
  using W = Window<FIRST>;
  const u32* at = s.histogram + (histogram * BUCKETS + bucket) * W::bucket_words + word_of(row) * W::copies;
  u32 sum = 0;
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
  int row = threadIdx.x;
  if (row < ROWS) {
    int first = Window<true>::top;
    while (first > 1 && counted<true>(s, 0, first, row) == 0) first--;
    float all = 0.f, held = 0.f;
    for (int b = first; b > max_int(0, first - 20); b--) all += counted<true>(s, 0, b, row) * exp2_fast((b - first) / fine);
    int bucket = first + 1;
    while (bucket > 1 && held < a.p * all) bucket--, held += counted<true>(s, 0, bucket, row) * exp2_fast((bucket - first) / fine);
    s.low[row] = (bucket - 0.5f) / fine + COARSE_LOW - (REACH > 0 ? 5.f : 3.f);
    s.moved[row] = 0;
  }
  __syncthreads();
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
#pragma unroll 4
  for (int b = max_int(1, part * PART); b < min_int(TOP, (part + 1) * PART); b++) most += static_cast<float>(counted(s, 0, b, row)) * exp2_fast(edge(b + 1));
  s.most[part][row] = most;
  __syncthreads();
  bool failed = false;
  if (part == 0) {
    bool counts = block * ROWS + row < h.rows && s.visible[row] > 0;
    int bucket = counts ? find_share(a, s, row) : NEVER_REACHED, count = 0, pooled = NEVER_REACHED;
    // Only rounding sends a row back to where it came from: there the edge that it passed is sound.
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
DEV void find_bars(const Select& a, const Head& h, Shared& s, Pipe& pipe, int block) {
  constexpr int sampled = 16;
  int tiles = ceil_div(h.total, STRIDE), last = (h.total - h.ring) / STRIDE, middle = ceil_div(last - sampled / 2, sampled);
  Tiles all = {0, tiles, 0, 0, 0}, some = {0, middle + 1 + tiles - last, middle, sampled, last};
  clear_counts(s);
  survey<true>(a, h, s, pipe, block, last >= 48 ? some : all);
  place_windows(a, s);
  for (int tries = 0; tries < 24; tries++) {
    clear_counts(s);
    survey<false>(a, h, s, pipe, block, all);
    if (find_thresholds(a, h, s, block)) return;
  }
}
