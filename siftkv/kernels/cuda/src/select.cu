// Which tokens of a request its last queries vote for (`siftkv.policies.hardkv.selection`), a block a head slot. Keys are read twice: for the bars of all
// rows (`survey.cuh`), and to count the rows whose bar a token reaches.
// The score that the `count` best tokens have at least. Tokens that a row does not see count too, so that it never selects too few.
DEV void find_score_thresholds(const Select& a, const Head& h, Shared& s) {
  constexpr int part = (0x7801 + SELECT_THREADS - 1) / SELECT_THREADS;
  for (int i = threadIdx.x; i < 0x7801; i += SELECT_THREADS) s.histogram[i] = 0;
  __syncthreads();
  for (int v = threadIdx.x; v < h.total; v += SELECT_THREADS) atomicAdd(s.histogram + min_int(score_of(a, h, v), 0x7800), 1u);
  __syncthreads();
  u32 sum = 0;
  for (int i = threadIdx.x * part; i < min_int(0x7801, (threadIdx.x + 1) * part); i++) sum += s.histogram[i];
  s.counts[threadIdx.x] = sum;
  __syncthreads();
  int row = threadIdx.x;
  if (row < ROWS && s.threshold[row] != NEVER_REACHED) {
    int wanted = s.count[row] + h.total - s.visible[row], found = 0, i = SELECT_THREADS;
    while (i > 0 && found + static_cast<int>(s.counts[i - 1]) < wanted) found += s.counts[--i];
    int bits = min_int(0x7801, i * part);
    while (bits > 0 && found < wanted) found += s.histogram[--bits];
    s.threshold[row] = bits;
  }
  __syncthreads();
}

// Sums over the eight lanes of a column: lane (g, t) ends with value g of what lanes t had.
template <class T> DEV T scattered_sum(const T (&x)[8]) {
  int lane = threadIdx.x & 31;
  T half[4], quarter[2];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    T keep = lane & 16 ? x[4 + i] : x[i], give = lane & 16 ? x[i] : x[4 + i];
    half[i] = keep + shuffle_xor(give, 16);
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    T keep = lane & 8 ? half[2 + i] : half[i], give = lane & 8 ? half[i] : half[2 + i];
    quarter[i] = keep + shuffle_xor(give, 8);
  }
  T keep = lane & 4 ? quarter[1] : quarter[0], give = lane & 4 ? quarter[0] : quarter[1];
  return keep + shuffle_xor(give, 4);
}
// What a token has to reach in a lane's rows: a product, or a bucket.
struct Bar {
  float offset[HELD][2], least[HELD][2], exponent[HELD][2];
  u32 pooled[HELD];
  DEV void read(const Select& a, const Shared& s, int rank) {
    each_row([&](int m, int half, int row) {
      row += WARP_ROWS * rank;
      int bucket = s.threshold[row];
      bool everything = a.p >= 1.f || bucket == 0;
      // A hair less than the bucket's edge, so that no token of it is lost to rounding.
      float z = s.low[row] + edge(bucket) - 1e-4f;
      least[m][half] = bucket == NEVER_REACHED ? INF : everything ? NOTHING : z * (1.f / LOGIT_SCALE);
      offset[m][half] = offset_of(FINE, s.low[row]), exponent[m][half] = -s.exponent[row];
      pooled[m] = half ? pooled[m] | static_cast<u32>(s.pooled[row]) << 16 : static_cast<u32>(s.pooled[row]);
    });
  }
};
template <bool WORD> struct Counts { using Type = float; };
template <> struct Counts<true> { using Type = u32; };  // of two rows, 16 bits each
using VoteCount = Counts<(REACH > 0)>::Type;
DEV void vote(const Select& a, const Head& h, Shared& s, Pipe& pipe, const Rows& rows, const Lane& lane) {
  Bar bar;
  bar.read(a, s, pipe.rank);
  auto body = [&](int tile, u32 keys) {
    if (!lane.active) return;
    VoteCount votes[8] = {};
    float mass[8] = {}, c[HELD][TILES][4];
    Near near;
    if constexpr (REACH > 0) near = near_in(a, h, tile);
    logits_of(c, a, h, lane, rows, tile, keys);
#pragma unroll
    for (int m = 0; m < HELD; m++) {
      Buckets b;
      if constexpr (REACH > 0) b.find(c[m], slope_of(FINE), bar.offset[m], near, is_plain(lane, tile));
#pragma unroll
      for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
          int half = i / 2;
          mass[2 * n + (i & 1)] += exp2_fast(fmaf(c[m][n][i], LOGIT_SCALE, bar.exponent[m][half]));
          if constexpr (REACH == 0 && !BY_SCORE) votes[2 * n + (i & 1)] += reaches(c[m][n][i], bar.least[m][half]);
        }
        if constexpr (REACH > 0)
          for (int e = 0; e < 2; e++) votes[2 * n + e] += ((b.pooled[n][e] | 0x80008000u) - bar.pooled[m]) >> 15 & 0x00010001u;
      }
    }
    u32 counted = static_cast<u32>(scattered_sum(votes));
    float sum = scattered_sum(mass);
    int value = (threadIdx.x & 31) >> 2, j = value / 2 * 8 + 2 * (threadIdx.x & 3) + (value & 1), v = first_of(tile) + j, i = v - h.first;
    if constexpr (REACH > 0) counted = (counted & 0xFFFFu) + (counted >> 16);
    if (j < HALO || j >= KEYS - HALO || i < 0 || i >= min_int(h.candidates, a.columns)) return;
    if constexpr (BY_SCORE) {
      int bits = score_of(a, h, v);
      for (int r = WARP_ROWS * pipe.rank; r < WARP_ROWS * (pipe.rank + 1); r++) counted += s.threshold[r] <= bits && v < s.visible[r];
    }
    atomicAdd(a.tally + static_cast<i64>(h.index) * a.columns + i, static_cast<u64>(counted) << VOTE_SHIFT | __float2ull_rn(sum * (1ull << MASS_BITS)));
  };
  stream(a, h, pipe, h.first / STRIDE, ceil_div(h.first + h.candidates, STRIDE), 1, body);
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(SELECT_THREADS, 1) select(const __grid_constant__ Select a) {
  extern __shared__ __align__(128) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) s.head = head_of(a);
  __syncthreads();
  const Head& h = s.head;
  int team = threadIdx.x / TEAM_THREADS, rank = threadIdx.x / 32 % TEAM_WARPS;
  Pipe pipe = {team, rank, 0, shared_address(s.lines[team]), shared_address(s.full[team]), shared_address(s.empty[team])};
  if (threadIdx.x < TEAMS * STAGES) {
    barrier_init(shared_address(&s.full[0][0] + threadIdx.x), BULK ? 1 : 32);
    barrier_init(shared_address(&s.empty[0][0] + threadIdx.x), TEAM_WARPS);
  }
  async_proxy_fence();
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
    Rows rows;
    Lane lane;
    rows.load(a, h, block * ROWS + WARP_ROWS * rank);
    lane.read(s, h, block, rank);
    find_bars(a, h, s, pipe, rows, lane, block);
    if constexpr (BY_SCORE) find_score_thresholds(a, h, s);
    vote(a, h, s, pipe, rows, lane);
  }
  decide(a, h, s.of_query, s.histogram, whole);
}
