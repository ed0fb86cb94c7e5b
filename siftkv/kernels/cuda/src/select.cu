// Which tokens of a request its last queries vote for (`siftkv.policies.hardkv.selection`), a block a head slot. Keys are read twice: for the bars of all
// rows (`survey.cuh`), and to count the rows whose bar a token reaches.
// Sums over the eight lanes of a column, N / 8 a lane: lane (g, t) ends with values N / 8 g and on of what lanes t had.
template <class T, int N> DEV void scattered_sum(T (&sum)[N / 8], const T (&x)[N]) {
  int lane = threadIdx.x & 31;
  T half[N / 2], quarter[N / 4];
#pragma unroll
  for (int i = 0; i < N / 2; i++) {
    T keep = lane & 16 ? x[N / 2 + i] : x[i], give = lane & 16 ? x[i] : x[N / 2 + i];
    half[i] = keep + shuffle_xor(give, 16);
  }
#pragma unroll
  for (int i = 0; i < N / 4; i++) {
    T keep = lane & 8 ? half[N / 4 + i] : half[i], give = lane & 8 ? half[i] : half[N / 4 + i];
    quarter[i] = keep + shuffle_xor(give, 8);
  }
#pragma unroll
  for (int i = 0; i < N / 8; i++) {
    T keep = lane & 4 ? quarter[N / 8 + i] : quarter[i], give = lane & 4 ? quarter[i] : quarter[N / 8 + i];
    sum[i] = keep + shuffle_xor(give, 4);
  }
}
// The same of counts below 256, two rows a word and two tokens a half.
template <int N> DEV void scattered_counts(u32 (&sum)[N / 8], const u32 (&x)[N / 2]) {
  static_assert(N == 8 || N == 16, "tokens of a lane");
  u32 four[N / 4], lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < N / 4; i++) four[i] = __byte_perm(x[2 * i], x[2 * i + 1], 0x5410) + __byte_perm(x[2 * i], x[2 * i + 1], 0x7632);
#pragma unroll
  for (int i = 0; i < N / 8; i++) four[i] = (lane & 16 ? four[N / 8 + i] : four[i]) + shuffle_xor(lane & 16 ? four[i] : four[N / 8 + i], 16);
  if constexpr (N == 16) four[0] = (lane & 8 ? four[1] : four[0]) + shuffle_xor(lane & 8 ? four[0] : four[1], 8);
  else four[0] += shuffle_xor(four[0], 8);
  four[0] += shuffle_xor(four[0], 4);
#pragma unroll
  for (int i = 0; i < N / 8; i++) sum[i] = four[0] >> 8 * (N / 8 * (lane >> 2) % 4 + i) & 0xFFu;
}
// What a token has to reach in a lane's rows: a product, or a bucket.
struct Bar {
  float offset[HELD][2], least[HELD][2], exponent[HELD][2];
  u32 short_of[HELD];
  DEV void read(const Select& a, const Shared& s, int rank) {
    each_row(rank, [&](int m, int half, int row) {
      int bucket = s.threshold[row];
      bool everything = a.p >= 1.f || bucket == 0;
      // A hair less than the bucket's edge, so that no token of it is lost to rounding.
      float z = s.low[row] + edge(bucket) - 1e-4f;
      least[m][half] = bucket == NEVER_REACHED ? INF : everything ? NOTHING : z * (1.f / LOGIT_SCALE);
      offset[m][half] = Window<false>::offset_of(s.low[row]), exponent[m][half] = -s.exponent[row];
      u32 less = static_cast<u32>(1 - s.pooled[row]) & 0xFFFFu;
      short_of[m] = half ? short_of[m] | less << 16 : less;
    });
  }
};
DEV void read_votes(const Select& a, const Head& h, Shared& s, Pipe& pipe, int block, const Tiles& tiles) {
  constexpr int each = LANE_KEYS / 8;
  Rows rows;
  Lane lane;
  Bar bar;
  rows.load(a, h, block * ROWS, pipe.rank);
  lane.read(s, h, block, pipe.rank);
  bar.read(a, s, pipe.rank);
  int candidates = min_int(h.candidates, a.columns);
  u64* tally = a.tally + static_cast<i64>(h.index) * a.columns;
  take(a, h, pipe, rows, tiles, [&](int tile, u32 stage, float(&products)[HELD][TILES][4], auto release) {
    float votes[LANE_KEYS] = {}, mass[LANE_KEYS] = {}, sum[each], counted[each] = {};
    u32 pairs[LANE_KEYS / 2] = {}, counts[each];  // votes of two tokens and two rows a word
    Near near;
    if constexpr (REACH > 0) near.find(h, tile, stage);
    each_logits(products, h, lane, tile, stage, release, [&](int m, const float(&c)[TILES][4]) {
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int half = i / 2, token = 2 * n + (i & 1);
          mass[token] += exp2_fast(fmaf(c[n][i], LOGIT_SCALE, bar.exponent[m][half]));
          if constexpr (REACH == 0 && !BY_SCORE) votes[token] += reaches(c[n][i], bar.least[m][half]);
        }
      if constexpr (REACH > 0) {
        Words words;
        find_words(words, c, bar.offset[m]);
#pragma unroll
        for (int first = 0; first < LANE_KEYS; first += PART_KEYS) {
          u32 pooled[PART_KEYS];
          pool_part(pooled, words, c, first, near, is_plain(lane, tile));
#pragma unroll
          for (int i = 0; i < PART_KEYS; i += 2) pairs[(first + i) / 2] += reach_two(pooled[i], bar.short_of[m]) + (reach_two(pooled[i + 1], bar.short_of[m]) << 8);
        }
      }
    });
    if (!lane.active) return;
    scattered_sum(sum, mass);
    if constexpr (REACH > 0) scattered_counts<LANE_KEYS>(counts, pairs);
    else if constexpr (!BY_SCORE) scattered_sum(counted, votes);
#pragma unroll
    for (int k = 0; k < each; k++) {
      u32 number = BY_SCORE ? 0 : REACH > 0 ? counts[k] : static_cast<u32>(counted[k]);
      int j = LANE_KEYS * (threadIdx.x & 3) + each * ((threadIdx.x & 31) >> 2) + k, i = first_of(tile) + j - h.first;
      if (j < HALO || j >= KEYS - HALO || i < 0 || i >= candidates) continue;
      atomicAdd(tally + i, tally_of(number, sum[k]));
    }
  });
}
DEV void vote(const Select& a, const Head& h, Shared& s, Pipe& pipe, int block) {
  int from = h.first / STRIDE, candidates = min_int(h.candidates, a.columns);
  Tiles tiles = {from, ceil_div(h.first + candidates, STRIDE) - from, 0, 0, 0};
  stream(a, h, pipe, tiles, [&] { read_votes(a, h, s, pipe, block, tiles); });
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1) select(const __grid_constant__ Select a) {
  extern __shared__ __align__(128) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) s.head = head_of(a);
  __syncthreads();
  const Head& h = s.head;
  bool feeds = threadIdx.x >= READERS;
  int warp = threadIdx.x / 32, team = feeds ? warp - READERS / 32 : warp / TEAM_WARPS, at = min_int(team, TEAMS - 1);
  Pipe pipe = {team, feeds ? FEEDER : warp % TEAM_WARPS, shared_address(s.lines[at]), shared_address(s.full[at]), shared_address(s.empty[at]), 0, 0};
  if (threadIdx.x < TEAMS * STAGES) {
    barrier_init(shared_address(&s.full[0][0] + threadIdx.x), COPIERS);
    barrier_init(shared_address(&s.empty[0][0] + threadIdx.x), TEAM_WARPS);
  }
  for (int i = threadIdx.x; i < a.columns; i += SELECT_THREADS) a.tally[static_cast<i64>(h.index) * a.columns + i] = 0;
  int latest = h.candidates > 0 ? position_of(a, h, h.first + h.candidates - 1) : -1;
  for (int w = threadIdx.x; w < QUERY_ROWS; w += SELECT_THREADS) s.of_query[w] = w * GROUP < h.rows ? visible_to(a, h, w, latest) : 0;
  __syncthreads();
  bool whole = h.rows == 0 || h.total > MOST_TOKENS;
  for (int block = 0; block * ROWS < h.rows && !whole && h.candidates > 0; block++) {
    if (threadIdx.x < ROWS) {
      int row = block * ROWS + threadIdx.x;
      s.visible[threadIdx.x] = row < h.rows ? s.of_query[row / GROUP] : h.total;
    }
    __syncthreads();
    find_bars(a, h, s, pipe, block);
    if constexpr (BY_SCORE) find_score_thresholds(a, h, s);
    vote(a, h, s, pipe, block);
    if constexpr (BY_SCORE) vote_by_score(a, h, s);
  }
  if (whole) keep_all(a, h);
  else decide(a, h, s.of_query, s.scratch());
}
