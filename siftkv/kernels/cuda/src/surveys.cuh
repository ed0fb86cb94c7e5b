// Passes that count rows' logits in buckets: two warpgroups a tile, 64 rows each, so that a lane counts in few rows.
// A lane's view of the rows that it counts in.
struct Lane {
  int least;  // tokens that all rows of a warp see
  bool active;
  DEV void read(const Shared& s, const Head& h, int block, int rank) {
    active = block * ROWS + 16 * rank < h.rows;
    least = min_int(s.visible[row_of(rank, 0, 0)], s.visible[row_of(rank, 0, 1)]);
    for (int o = 4; o < 32; o <<= 1) least = min_int(least, shuffle_xor(least, o));
  }
};
DEV bool is_plain(int from, int least) { return from >= 0 && from + KEYS <= least; }
DEV void await_tile(const Head& h, const Pipe& pipe, int n, int from) {
  barrier_wait(pipe.filled(n), pipe.fill_phase(n));
  if (!is_paged(h, from)) async_proxy_fence();
}
DEV void release(const Pipe& pipe, int n, int times) {
  __syncwarp();
  if ((threadIdx.x & 31) < times) barrier_arrive(pipe.emptied(n));
}
// Where a lane counts, and what it adds up.
template <bool FIRST> struct Counts {
  using W = Window<FIRST>;
  float total[2] = {}, below[2] = {}, offset[2], minus[2];
  u32 counters;
  DEV Counts(const Shared& s, int rank) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float low = FIRST ? COARSE_LOW : s.low[row_of(rank, 0, half)];
      minus[half] = -low, offset[half] = W::offset_of(low);
    }
    counters = shared_address(s.histogram) + 4 * (W::copies * (8 * rank + ((threadIdx.x & 31) >> 2)) + (threadIdx.x & 3) % W::copies);
  }
  DEV void add(float z, int half, u32 weight) {
    float bucket = W::bucket_of(z, offset[half]);
    count_in(W::counter_of(counters, __float_as_uint(bucket)), weight << (16 * half));
    if constexpr (FIRST) return;
    float mass = exp2_fast(fmaf(z, LOGIT_SCALE, minus[half]));
    total[half] += mass;
    if (bucket == MAGIC) below[half] += mass;
  }
  DEV void add_pooled(u32 word) {
    u32 pooled = counters + 4 * BUCKETS * W::bucket_words;
    count_in(pooled + (word & 0xFFFFu), 1u), count_in(pooled + (word >> 16), 1u << 16);
  }
  DEV void finish(Shared& s, const Pipe& pipe) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float sums[2] = {total[half], below[half]};
      for (float& x : sums) x += shuffle_xor(x, 1), x += shuffle_xor(x, 2);
      if ((threadIdx.x & 3) == 0) s.total[pipe.team][row_of(pipe.rank, 0, half)] = sums[0], s.below[pipe.team][row_of(pipe.rank, 0, half)] = sums[1];
    }
  }
};
// The products of a warpgroup's 64 rows with a team's tiles in turn; -inf where a row does not see a token. Calls `count(n, products)`.
template <class Tiles, class F> DEV void each_of_rows(const Head& h, const Shared& s, const Pipe& pipe, const Rows& rows, const Lane& lane, const Tiles& tiles, F count) {
  for (int n = pipe.team; n < tiles.count; n += TEAMS) {
    int from = first_of(h, tiles.at(n));
    float c[TILES][4];
    await_tile(h, pipe, n, from);
    start_rows(c, rows, pipe.address(n));
    await_products(c);
    if (REACH == 0) release(pipe, n, 1);
    if (!is_plain(from, lane.least)) {
      int seen[2] = {s.visible[row_of(pipe.rank, 0, 0)], s.visible[row_of(pipe.rank, 0, 1)]};
#pragma unroll
      for (int i = 0; i < 4 * TILES; i++) {
        int token = from + token_of(8 * (i / 4) + 2 * (threadIdx.x & 3) + i % 2);
        if (token < 0 || token >= seen[i / 2 % 2]) c[i / 4][i % 4] = -INF;
      }
    }
    count(n, c);
    if (REACH > 0) release(pipe, n, 1);  // positions stand beside the keys
  }
}
// Counts tokens in the rows' windows; a first look counts them as often as their tile weighs, the other adds up the masses of all and of those below, too.
template <class Tiles, bool FIRST = Tiles::FIRST> DEV void survey(const Head& h, Shared& s, Pipe& pipe, const Rows& rows, const Lane& lane, const Tiles& tiles) {
  Counts<FIRST> counts(s, pipe.rank);
  each_of_rows(h, s, pipe, rows, lane, tiles, [&](int n, const float (&c)[TILES][4]) {
    u32 weight = 1;
    if constexpr (FIRST) weight = tiles.weight(tiles.at(n));
    if (!lane.active) return;
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) counts.add(c[i / 4][i % 4], i / 2 % 2, weight);
  });
  pipe.turn += tiles.count;
  if constexpr (!FIRST) counts.finish(s, pipe);
}
#if REACHES
// Counts a tile and the maxima due at it.
template <bool DENSE> DEV void count_pooled(Counts<false>& counts, Words& words, const float (&c)[TILES][4], u32 positions, const int* visible, int least, int from) {
  bool plain = from >= REACH && from + KEYS <= least;
  int seen[2] = {0, 0};
  if (!DENSE && !plain) seen[0] = visible[0], seen[1] = visible[8];
#pragma unroll
  for (int run = 0; run < KEYS / RUN; run++) {
    int first = RUN * run + 4 * (threadIdx.x & 3);
    u32 due[4], at[12];
    words.next(c[2 * run], c[2 * run + 1], counts.offset);
    if constexpr (DENSE) {
      words.dense(due);
    } else {
      load_words<12, 4>(at, positions + 4 * (BEFORE + first - 8));
      words.sparse(due, at);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int middle = from + first + i - REACH;
      if (!DENSE && !plain) due[i] &= (middle >= 0 && middle < seen[0] ? 0xFFFFu : 0u) | (middle >= 0 && middle < seen[1] ? 0xFFFF0000u : 0u);
      counts.add(c[2 * run + i / 2][i % 2], 0, 1u), counts.add(c[2 * run + i / 2][2 + i % 2], 1, 1u);
      counts.add_pooled(due[i]);
    }
  }
}
// The same with a second histogram, of maxima over neighbours. Every team has a run of tiles, of which the first is there for the next one's sake.
DEV void survey_pooled(const Head& h, Shared& s, Pipe& pipe, const Rows& rows, const Lane& lane, const Every& tiles) {
  Counts<false> counts(s, pipe.rank);
  Words words;
  each_of_rows(h, s, pipe, rows, lane, tiles, [&](int n, const float (&c)[TILES][4]) {
    int from = first_of(h, tiles.at(n));
    u32 positions = pipe.positions_at(n);
    const int* visible = s.visible + row_of(pipe.rank, 0, 0);
    if (n < TEAMS || !lane.active) words.next(c[TILES - 2], c[TILES - 1], counts.offset);
    else if (is_dense(h, positions, from) && from + KEYS <= lane.least) count_pooled<true>(counts, words, c, positions, visible, lane.least, from);
    else count_pooled<false>(counts, words, c, positions, visible, lane.least, from);
  });
  pipe.turn += tiles.count;
  counts.finish(s, pipe);
}
#endif
