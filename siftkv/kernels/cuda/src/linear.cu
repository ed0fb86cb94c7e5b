// y = W x for one or two rows of x. Each warp streams pairs of rows of W through a ring of its own in shared memory, filled by bulk copies. A block a
// multiprocessor, and the first copies are under way before the predecessor has ended, since weights are never written.
constexpr int LINEAR_WARPS = 8, CHUNK = 1024;  // channels of each row that a stage holds
constexpr int LINEAR_STAGE_BYTES = 4 * CHUNK, LINEAR_RING_BYTES = LINEAR_STAGES * LINEAR_STAGE_BYTES;

// Adds eight channels of W times x.
DEV void add_piece(float& sum, const u32 (&w)[4], const u32 (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) sum += low_value(w[i]) * low_value(x[i]), sum += high_value(w[i]) * high_value(x[i]);
}

// A warp's pairs of rows, chunk after chunk.
template <Kind KIND> struct Stream {
  const Linear& a;
  u32 data, barriers;
  int pair, channel, stage;  // of the next copy

  // By lane 0, or by all.
  DEV void fetch(int step) {
    Rows rows = rows_of<KIND>(a, pair);
    u32 bytes = 2 * min_int(CHUNK, a.size - channel), to = data + stage * LINEAR_STAGE_BYTES, barrier = barriers + 8 * stage;
    auto row = [&](int i) { return reinterpret_cast<const u8*>(a.weight + static_cast<i64>(i) * a.size + channel); };
    if constexpr (BULK) {
      barrier_expect(barrier, 2 * bytes);
      bulk_copy(to, row(rows.first), bytes, barrier);
      bulk_copy(to + 2 * CHUNK, row(rows.second), bytes, barrier);
    } else {
      copy_together<32>(to, row(rows.first), bytes, threadIdx.x & 31);
      copy_together<32>(to + 2 * CHUNK, row(rows.second), bytes, threadIdx.x & 31);
      arrive_with_copies(barrier);
    }
    stage = stage + 1 == LINEAR_STAGES ? 0 : stage + 1;
    channel += CHUNK;
    if (channel >= a.size) channel = 0, pair += step;
  }
};

template <Kind KIND, int REQUESTS> DEV void linear(const Linear& a) {
  extern __shared__ __align__(128) u8 rings[];
  __shared__ u64 barriers[LINEAR_WARPS * LINEAR_STAGES];
  constexpr int pieces = CHUNK / 256;
  let_successor_start();
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, step = gridDim.x * LINEAR_WARPS, pair = blockIdx.x * LINEAR_WARPS + warp;
  Stream<KIND> stream = {a, shared_address(rings) + warp * LINEAR_RING_BYTES, shared_address(barriers + warp * LINEAR_STAGES), pair, 0, 0};
  if (lane == 0) {
    for (int i = 0; i < LINEAR_STAGES; i++) barrier_init(stream.barriers + 8 * i, BULK ? 1 : 32);
    async_proxy_fence();
    if constexpr (BULK)
      for (int i = 0; i < LINEAR_STAGES && stream.pair < a.pairs; i++) stream.fetch(step);
  }
  __syncwarp();
  if constexpr (!BULK)
    for (int i = 0; i < LINEAR_STAGES && stream.pair < a.pairs; i++) stream.fetch(step);
  wait_for_predecessor();
  int stage = 0, parity = 0;
  for (; pair < a.pairs; pair += step) {
    float y0[REQUESTS] = {}, y1[REQUESTS] = {};
    for (int channel = 8 * lane; channel < a.size + 8 * lane; channel += CHUNK) {
      u32 x[REQUESTS][pieces][4];
#pragma unroll
      for (int b = 0; b < REQUESTS; b++)
#pragma unroll
        for (int i = 0; i < pieces; i++) {
          int c = channel + 256 * i;
          uint4 raw = c < a.size ? *reinterpret_cast<const uint4*>(a.x + static_cast<i64>(b) * a.size + c) : uint4{0, 0, 0, 0};
          x[b][i][0] = raw.x, x[b][i][1] = raw.y, x[b][i][2] = raw.z, x[b][i][3] = raw.w;
        }
      barrier_wait(stream.barriers + 8 * stage, parity);
      u32 from = stream.data + stage * LINEAR_STAGE_BYTES + 16 * lane;
#pragma unroll
      for (int i = 0; i < pieces; i++) {
        if (channel + 256 * i >= a.size) break;
        u32 first[4], second[4];
        load_words<4, 4>(first, from + 512 * i);
        load_words<4, 4>(second, from + 2 * CHUNK + 512 * i);
#pragma unroll
        for (int b = 0; b < REQUESTS; b++) add_piece(y0[b], first, x[b][i]), add_piece(y1[b], second, x[b][i]);
      }
      __syncwarp();
      if ((!BULK || lane == 0) && stream.pair < a.pairs) stream.fetch(step);
      if (++stage == LINEAR_STAGES) stage = 0, parity ^= 1;
    }
#pragma unroll
    for (int b = 0; b < REQUESTS; b++) {
#pragma unroll
      for (int o = 16; o; o >>= 1) y0[b] += shuffle_xor(y0[b], o), y1[b] += shuffle_xor(y1[b], o);
      if (lane == b) {
        Rows rows = rows_of<KIND>(a, pair);
        finish<KIND>(a, b, pair, rows, terms_of<KIND>(a, b, pair, rows), y0[b], y1[b]);
      }
    }
  }
}
#define LINEAR(NAME, KIND, REQUESTS) \
  extern "C" __global__ void __launch_bounds__(32 * LINEAR_WARPS) NAME##_##REQUESTS(const __grid_constant__ Linear a) { linear<KIND, REQUESTS>(a); }
#define LINEARS(NAME, KIND) LINEAR(NAME, KIND, 1) LINEAR(NAME, KIND, 2)
LINEARS(plain, PLAIN)
LINEARS(swiglu, SWIGLU)
LINEARS(rotary, ROTARY)
