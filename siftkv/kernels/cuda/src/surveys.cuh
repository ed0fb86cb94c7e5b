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
DEV u32 queries_of(const Shared& s, int rank) { return OWN_STEPS < STEPS ? shared_address(s.own_queries) + rank / 4 * (128 * 64) : 0u; }
DEV void await_tile(const Head& h, const Pipe& pipe, int n, int from) {
  barrier_wait(pipe.filled(n), pipe.phase(n));
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
  u32 first;  // its counter of bucket 0
  DEV Counts(const Shared& s, int rank) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float low = FIRST ? COARSE_LOW : s.low[row_of(rank, 0, half)];
      minus[half] = -low, offset[half] = W::offset_of(low);
    }
    first = shared_address(s.histogram) + 4 * (W::copies * (8 * rank + ((threadIdx.x & 31) >> 2)) + (threadIdx.x & 3) % W::copies);
  }
  // Adds up, and returns the bucket's bits.
  DEV u32 add(float z, int half) {
    float bucket = W::bucket_of(z, offset[half]);
    if constexpr (FIRST) return __float_as_uint(bucket);
    float mass = exp2_fast(fmaf(z, LOGIT_SCALE, minus[half]));
    total[half] += mass;
    if (bucket == MAGIC) below[half] += mass;
    return __float_as_uint(bucket);
  }
  DEV u32 counter_of(u32 bucket) const { return W::counter_of(first, bucket); }
  DEV void find_pooled(u32 (&counters)[8], const u32 (&words)[4]) const {
    u32 pooled = first + 4 * BUCKETS * W::bucket_words;
#pragma unroll
    for (int i = 0; i < 4; i++) counters[2 * i] = pooled + (words[i] & 0xFFFFu), counters[2 * i + 1] = pooled + (words[i] >> 16);
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
// The products of a warpgroup's 64 rows with a team's tiles in turn, from the n-th on; -inf where a row does not see a token. Calls `count(n, products)`.
template <class Tiles, class F>
DEV int each_of_rows(const Head& h, const Shared& s, const Pipe& pipe, const Rows& rows, const Lane& lane, const Tiles& tiles, int n, int end, F count) {
  for (; n < end; n += TEAMS) {
    int from = first_of(h, tiles.at(n));
    float c[TILES][4];
    await_tile(h, pipe, n, from);
    start_rows(c, rows, pipe.address(n), queries_of(s, pipe.rank));
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
  return n;
}
#if STORES
// Counts a tile, and leaves its buckets.
DEV void count_and_store(Counts<false>& counts, const float (&c)[TILES][4], u8* stored, bool active) {
#pragma unroll
  for (int n = 0; n < TILES; n += 2) {
    u32 words[2] = {0, 0}, counters[8];
    if (active) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float(&x)[4] = c[n + e];
        u32 own[4] = {counts.add(x[0], 0), counts.add(x[2], 1), counts.add(x[1], 0), counts.add(x[3], 1)};
        words[e] = word_of(own[0], own[1], own[2], own[3]);
#pragma unroll
        for (int i = 0; i < 4; i++) counters[4 * e + i] = counts.counter_of(own[i]);
      }
      count_in(counters);
    }
    store_words(stored, n / 2, words[0], words[1]);
  }
}
#endif
// Counts tokens in the rows' windows; a first look counts them as often as their tile weighs, the other adds up the masses of all and of those below, too.
template <class Tiles, bool FIRST = Tiles::FIRST> DEV void survey(const Select& a, const Head& h, Shared& s, Pipe& pipe, const Rows& rows, const Lane& lane, const Tiles& tiles) {
  Counts<FIRST> counts(s, pipe.rank);
  each_of_rows(h, s, pipe, rows, lane, tiles, pipe.team, tiles.count, [&](int n, const float (&c)[TILES][4]) {
    u32 weight = 1;
    if constexpr (FIRST) weight = tiles.weight(tiles.at(n));
#if STORES
    if constexpr (!FIRST) return count_and_store(counts, c, words_of_tile(a, s.room, tiles.at(n)), lane.active);
#endif
    if (!lane.active) return;
#pragma unroll
    for (int i = 0; i < 4 * TILES; i++) count_in(counts.counter_of(counts.add(c[i / 4][i % 4], i / 2 % 2)), weight << (16 * (i / 2 % 2)));
  });
  pipe.turn += tiles.count;
  if constexpr (!FIRST) counts.finish(s, pipe);
}
#if REACHES
// Counts a tile and the maxima due at it.
template <bool DENSE> DEV void count_pooled(Counts<false>& counts, Words& words, const float (&c)[TILES][4], u8* stored, u32 positions, const int* visible, int least, int from) {
  bool plain = DENSE || (from >= REACH && from + KEYS <= least);
  u32 pooled[8];  // counters, told when the next ones are known: else a register serves for all their addresses, each of which waits for the one before
  int seen[2] = {0, 0};
  if (!plain) seen[0] = visible[0], seen[1] = visible[8];
#pragma unroll
  for (int run = 0; run < KEYS / RUN; run++) {
    int first = RUN * run + 4 * (threadIdx.x & 3);
    u32 due[4], at[12];
    words.next(c[2 * run], c[2 * run + 1], counts.offset);
#if STORES
    if (DENSE) store_there(stored + 32 * run, words.bytes[0], words.bytes[1]);
    else store_words(stored, run, words.bytes[0], words.bytes[1]);
#endif
    u32 own[8], counters[8];
#pragma unroll
    for (int i = 0; i < 8; i++) own[i] = counts.add(c[2 * run + i / 4][i % 2 * 2 + i / 2 % 2], i % 2), counters[i] = counts.counter_of(own[i]);
    if constexpr (DENSE) {
      words.dense(due);
    } else {
      load_words<12, 4>(at, positions + 4 * (BEFORE + first - 8));
      words.sparse(due, at);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int middle = from + first + i - REACH;
      if (!plain) due[i] &= (middle >= 0 && middle < seen[0] ? 0xFFFFu : 0u) | (middle >= 0 && middle < seen[1] ? 0xFFFF0000u : 0u);
    }
    count_in(counters);
    if (run > 0) count_in(pooled);
    counts.find_pooled(pooled, due);
    if (run == KEYS / RUN - 1) count_in(pooled);
  }
}
// The same for tiles without gaps that all rows see, up to the `end`-th. What a lane would have to keep meanwhile is read from shared memory when it is wanted: what
// the compiler spills comes from the second-level cache, since next to nothing is left of the first.
template <class F> DEV int each_dense_of_rows(Shared& s, const Pipe& whole, const Rows& rows, int n, int end, F count) {
  u32 at = shared_address(s.kept[threadIdx.x / 32]);
  __syncwarp();
  if ((threadIdx.x & 31) == 0) {
    store_words(at, whole.turn, end, static_cast<int>(queries_of(s, whole.rank)), 0);
    store_words(at + 16, static_cast<int>(whole.lines), static_cast<int>(whole.full), static_cast<int>(whole.empty), 0);
  }
  __syncwarp();
  for (bool ready = false;; n += TEAMS) {
    u32 kept[8];
    load_words<8, 4>(kept, at);
    Pipe pipe = {0, 0, kept[4], kept[5], kept[6], 0, static_cast<int>(kept[0])};
    if (!ready) barrier_wait(pipe.filled(n), pipe.phase(n));
    float c[TILES][4];
    start_rows(c, rows, pipe.address(n), kept[2]);
    await_products(c);
    release(pipe, n, 1);
    bool more = n + TEAMS < static_cast<int>(kept[1]);
    ready = more && barrier_test(pipe.filled(n + TEAMS), pipe.phase(n + TEAMS));  // long before it is asked for
    count(c);
    if (!more) return n + TEAMS;
  }
}
// The same with a second histogram, of maxima over neighbours. Every team has a run of tiles, of which the first is there for the next one's sake.
DEV void survey_pooled(const Select& a, const Head& h, Shared& s, Pipe& pipe, const Rows& rows, const Lane& lane, const Every& tiles) {
  Counts<false> counts(s, pipe.rank);
  Words words;
  const int* visible = s.visible + row_of(pipe.rank, 0, 0);
  auto tile_of = [&](int n) {
    u8* stored = nullptr;
#if STORES
    stored = words_of_tile(a, s.room, tiles.at(n));
#endif
    return stored;
  };
  auto clear = [&](int n) {
#if STORES
    for (int run = 0; run < KEYS / RUN; run++) store_words(tile_of(n), run, 0, 0);
#endif
  };
  auto any = [&](int n, const float (&c)[TILES][4]) {
    int from = first_of(h, tiles.at(n));
    u32 positions = pipe.positions_at(n);
    if (n < TEAMS) words.next(c[TILES - 2], c[TILES - 1], counts.offset);
    else if (lane.active) count_pooled<false>(counts, words, c, tile_of(n), positions, visible, lane.least, from);
    else clear(n);
  };
  // Tiles without gaps have a loop of their own, which does not spill.
  Dense dense = dense_tiles(h, s, seen_by_all(h, s));
#if STORES
  dense.to = min_int(dense.to, a.room_tiles);
#endif
  int n = pipe.team, from = min_int(max_int(tiles.place(dense.from, pipe.team), TEAMS + pipe.team), tiles.count), to = min_int(tiles.place(dense.to, pipe.team), tiles.count);
#pragma unroll 1
  for (int part = 0; part < 2; part++) {
    n = each_of_rows(h, s, pipe, rows, lane, tiles, n, part ? tiles.count : from, any);
    if (part || n >= to) continue;
    u8* stored = tile_of(n);
    n = each_dense_of_rows(s, pipe, rows, n, to, [&](const float (&c)[TILES][4]) {
      count_pooled<true>(counts, words, c, stored, 0, visible, 0, 0);
      stored += KEYS * ROWS;
    });
  }
  pipe.turn += tiles.count;
  counts.finish(s, pipe);
}
#endif
