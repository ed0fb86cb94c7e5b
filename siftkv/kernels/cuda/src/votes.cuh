// The pass that counts votes: a warpgroup a tile, from keys multiplied by rows, so that a lane has 32 rows of each of its two tokens.
DEV void write_bars(const Select& a, Shared& s) {
  int row = threadIdx.x;
  if (row >= ROWS) return;
  int bucket = REACH > 0 ? s.pooled[row] : s.threshold[row];
  bool everything = a.p >= 1.f || bucket == 0;
  // A hair less than the bucket's edge, so that no token of it is lost to rounding.
  float z = s.low[row] + edge(bucket) - 1e-4f;
  s.bar[row / 2][row % 2] = bucket == NEVER_REACHED ? INF : everything ? NOTHING : z * (1.f / LOGIT_SCALE);
  s.bar[row / 2][2 + row % 2] = -s.exponent[row];
}
// What a lane has of the rows of its two tokens.
struct Sums {
  float mass[2];
  u32 missed[2];  // bits of rows whose bar a token does not reach
  DEV void add(const float (&c)[ROWS / 8][4], const Shared& s) {
    mass[0] = mass[1] = 0.f, missed[0] = missed[1] = 0;
#pragma unroll
    for (int n = 0; n < ROWS / 8; n++) {
      float4 bar = *reinterpret_cast<const float4*>(s.bar[4 * n + (threadIdx.x & 3)]);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float first = c[n][2 * half], second = c[n][2 * half + 1];
        mass[half] += exp2_fast(fmaf(first, LOGIT_SCALE, bar.z));
        mass[half] += exp2_fast(fmaf(second, LOGIT_SCALE, bar.w));
        if constexpr (BY_SCORE) continue;
        missed[half] = __funnelshift_l(__float_as_uint(first - bar.x), missed[half], 1);
        missed[half] = __funnelshift_l(__float_as_uint(second - bar.y), missed[half], 1);
      }
    }
  }
};
// The products of a warpgroup's tiles with all rows, from the n-th on. Calls `beside(n)` while they are made, then `count(n, sums)`.
template <class F, class G> DEV void each_of_keys(const Head& h, const Pipe& pipe, Shared& s, const Every& tiles, int n, int least, F beside, G count) {
  for (; n < tiles.count; n += GROUPS) {
    int from = first_of(h, tiles.at(n)), line = 16 * (threadIdx.x / 32 & 3) + ((threadIdx.x & 31) >> 2);
    float c[ROWS / 8][4];
    await_tile(h, pipe, n, from);
    start_keys(c, pipe.address(n), shared_address(s.queries()));
    beside(n);
    await_products(c);
    release(pipe, n, TEAM_WARPS / 4);
    if (!is_plain(from, least)) {
#pragma unroll
      for (int i = 0; i < ROWS / 2; i++) {
        int token = from + token_of(line + i / 2 % 2 * 8);
        if (token < 0 || token >= s.visible[i / 4 * 8 + 2 * (threadIdx.x & 3) + i % 2]) c[i / 4][i % 4] = -INF;
      }
    }
    Sums sums;
    sums.add(c, s);
#pragma unroll
    for (int o = 1; o < 4; o <<= 1) sums.mass[0] += shuffle_xor(sums.mass[0], o), sums.mass[1] += shuffle_xor(sums.mass[1], o);
    count(n, sums);
  }
}
DEV Decided count_votes(const Select& a, const Head& h, Shared& s, Pipe& pipe, int block, const Every& tiles) {
  int warp = threadIdx.x / 32, lane = threadIdx.x & 31, t = lane & 3, least = seen_by_all(h, s);
  Ballots ballots(a, h, s, block);
  Ballots::Early early;
  auto own = [&](int n) { return t < 2 ? first_of(h, tiles.at(n)) + 16 * (warp & 3) + 8 * t + (lane >> 2) : -1; };
  each_of_keys(h, pipe, s, tiles, warp / 4, least, [&](int n) { early = ballots.early(own(n)); }, [&](int n, const Sums& sums) {
    u32 votes;
    if constexpr (BY_SCORE) {
      votes = own(n) >= 0 ? votes_by_score(s, s.scores(), own(n), min_int(early.score, SCORES - 1), least) : 0;
    } else {
      votes = __popc(~sums.missed[0]) | __popc(~sums.missed[1]) << 16;
      votes += shuffle_xor(votes, 1), votes += shuffle_xor(votes, 2);
      votes = votes >> 16 * (t & 1) & 0xFFFFu;
    }
    ballots.cast(own(n), early, votes, t ? sums.mass[1] : sums.mass[0]);
  });
  pipe.turn += tiles.count;
  return ballots.decided;
}
#if REACHES
// What tokens of two tiles reach, a warpgroup each: bits of rows, four words a token, and masses, behind those of BEFORE tokens before them. Three in turn, so that
// tiles can be written while warps still read those before.
struct Reached {
  u32 rows[3][BEFORE + 2 * KEYS][4];
  float mass[3][BEFORE + 2 * KEYS];
};
static_assert(GROUPS == 2 * TEAMS, "warpgroups that share a run of tiles");
static_assert(QUERY_BYTES + TEAMS * sizeof(Reached) <= 4 * HISTOGRAM_WORDS, "room where the histogram was");
// Rows of word `t` that see a token: row 8 n + 2 t + e is bit 31 - 2 n - e.
DEV u32 seeing_rows(const Shared& s, int v, int t) {
  u32 rows = 0;
#pragma unroll 1
  for (int i = 0; i < 32; i++) rows = rows << 1 | (v >= 0 && v < s.visible[i / 2 * 8 + 2 * t + i % 2]);
  return rows;
}
DEV void write_reached(Reached& r, const Sums& sums, int turn, int place) {
  int warp = threadIdx.x / 32 & 3, lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int token = place * KEYS + token_of(16 * warp + 8 * half + (lane >> 2));
    r.rows[turn][BEFORE + token][t] = ~sums.missed[half];
    if (t == 0) r.mass[turn][BEFORE + token] = sums.mass[half];
    if (token < 2 * KEYS - BEFORE) continue;
    int next = turn == 2 ? 0 : turn + 1;
    r.rows[next][token - 2 * KEYS + BEFORE][t] = ~sums.missed[half];
    if (t == 0) r.mass[next][token - 2 * KEYS + BEFORE] = sums.mass[half];
  }
}
// The same where a token has the votes of rows whose bar it or a near one reaches. Two warpgroups share a run of tiles; two threads a token.
DEV Decided count_pooled_votes(const Select& a, const Head& h, Shared& s, Pipe& pipe, int block, const Every& tiles) {
  int group = threadIdx.x / 128, run = group % TEAMS, place = group / TEAMS;
  int j = threadIdx.x % 128 / 2, pair = threadIdx.x & 1, own = BEFORE + place * KEYS + j, least = seen_by_all(h, s), turn = 0;
  Ballots ballots(a, h, s, block);
  Reached& r = reinterpret_cast<Reached*>(s.queries() + QUERY_BYTES)[run];
  u32 near;
  Ballots::Early early;
  each_of_keys(h, pipe, s, tiles, group, least, [&](int n) {
    int from = first_of(h, tiles.at(n));
    u32 positions = pipe.positions_at(n);
    near = is_dense(h, positions, from) ? ALL_NEAR : near_at(positions, j);
    early = {nullptr, 0, 0};
    if (pair == 0 && n >= TEAMS) early = ballots.early(from + j - REACH);
  }, [&](int n, const Sums& sums) {
    int from = first_of(h, tiles.at(n)), middle = from + j - REACH;
    write_reached(r, sums, turn, place);
    asm volatile("bar.sync %0, 256;" ::"r"(2 + run) : "memory");
    u32 reached[2] = {0, 0};
#pragma unroll
    for (int d = 0; d < WIDTH; d++) {
      const u32* rows = &r.rows[turn][own - d][2 * pair];
      if (near >> d & 1u) reached[0] |= rows[0], reached[1] |= rows[1];
    }
    if (!(from >= REACH && from + KEYS <= least)) reached[0] &= seeing_rows(s, middle, 2 * pair), reached[1] &= seeing_rows(s, middle, 2 * pair + 1);
    u32 votes = __popc(reached[0]) + __popc(reached[1]);
    votes += shuffle_xor(votes, 1);
    if (pair == 0 && n >= TEAMS) ballots.cast(middle, early, votes, r.mass[turn][own - REACH]);
    turn = turn == 2 ? 0 : turn + 1;
  });
  pipe.turn += tiles.count;
  return ballots.decided;
}
#endif
