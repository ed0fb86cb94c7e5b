// The pass over keys that fills the rows' histograms (`bars.cuh`). Where a window did not hold a row's bar, it moves and the keys are read once more.
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
