// The decoder's arithmetic between its matrix products: eight 16-bit channels a thread, fp32 inside, each value rounded
// to the model's type where the reference rounds it.
constexpr int NORM_THREADS = 512, NORM_WARPS = NORM_THREADS / 32;
constexpr int MOST_PIECES = 8;  // a thread holds of a row; rows of one piece leave registers for more rows at a time

struct Norm {
  const u16 *x, *update, *weight;
  u16 *added, *out;
  float eps;
  int size;
};
struct Rotate {
  const u16* x;
  const float *cos, *sin;
  u16* out;
  i64 token, head;
  int tokens, heads, dim;
};
struct Swiglu {
  const u16* gate_up;
  u16* out;
  i64 rows;
  int size;
};

struct Eight {
  float x[8];
  DEV void load(const u16* from) {
    uint4 raw = *reinterpret_cast<const uint4*>(from);
    u32 w[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      x[2 * i] = model_to_float(static_cast<u16>(w[i] & 0xffff));
      x[2 * i + 1] = model_to_float(static_cast<u16>(w[i] >> 16));
    }
  }
  DEV void load(const float* from) {
    const float4* f = reinterpret_cast<const float4*>(from);
    float4 a = f[0], b = f[1];
    x[0] = a.x; x[1] = a.y; x[2] = a.z; x[3] = a.w;
    x[4] = b.x; x[5] = b.y; x[6] = b.z; x[7] = b.w;
  }
  DEV uint4 packed() const {
    return {pack_plain(x[0], x[1]), pack_plain(x[2], x[3]), pack_plain(x[4], x[5]), pack_plain(x[6], x[7])};
  }
  DEV void store(u16* to) const { *reinterpret_cast<uint4*>(to) = packed(); }
  DEV void round() {
    uint4 raw = packed();
    load(reinterpret_cast<const u16*>(&raw));
  }
};
DEV float block_sum(float x) {
  __shared__ float warps[NORM_WARPS];
  for (int o = 16; o > 0; o >>= 1) x += shuffle_xor(x, o);
  if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = x;
  __syncthreads();
  x = 0;
#pragma unroll
  for (int i = 0; i < NORM_WARPS; i++) x += warps[i];
  return x;
}

// One row: x from element `from` on, everything else at `row`. KEEPS: x itself goes to `added`.
template <bool ADDS, bool KEEPS, int PIECES = MOST_PIECES>
DEV void norm_row(const Norm& a, i64 from, i64 row) {
  Eight held[PIECES];
  float sum = 0;
  for (int i = 0, c = 8 * threadIdx.x; c < a.size; i++, c += 8 * NORM_THREADS)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(a.weight + c));
  wait_for_predecessor();
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    int c = 8 * (threadIdx.x + i * NORM_THREADS);
    if (c >= a.size) break;
    Eight& x = held[i];
    x.load(a.x + from + c);
    if constexpr (ADDS) {
      Eight update;
      update.load(a.update + row + c);
      for (int j = 0; j < 8; j++) x.x[j] += update.x[j];
      x.round();
    }
    if constexpr (ADDS || KEEPS) x.store(a.added + row + c);
    for (int j = 0; j < 8; j++) sum += x.x[j] * x.x[j];
  }
  float inverse = 1.0f / sqrtf(block_sum(sum) / a.size + a.eps);
#pragma unroll
  for (int i = 0; i < PIECES; i++) {
    int c = 8 * (threadIdx.x + i * NORM_THREADS);
    if (c >= a.size) break;
    Eight &x = held[i], weight;
    weight.load(a.weight + c);
    for (int j = 0; j < 8; j++) x.x[j] *= inverse;
    x.round();
    for (int j = 0; j < 8; j++) x.x[j] *= weight.x[j];
    x.store(a.out + row + c);
  }
}
DEV i64 own_row(const Norm& a) { return static_cast<i64>(blockIdx.x) * a.size; }
extern "C" __global__ void __launch_bounds__(NORM_THREADS) rms_norm(const __grid_constant__ Norm a) {
  let_successor_start();
  norm_row<false, false>(a, own_row(a), own_row(a));
}
extern "C" __global__ void __launch_bounds__(NORM_THREADS) add_rms_norm(const __grid_constant__ Norm a) {
  let_successor_start();
  norm_row<true, false>(a, own_row(a), own_row(a));
}
extern "C" __global__ void __launch_bounds__(NORM_THREADS, 4) add_rms_norm_narrow(const __grid_constant__ Norm a) {
  let_successor_start();
  norm_row<true, false, 1>(a, own_row(a), own_row(a));
}

extern "C" __global__ void __launch_bounds__(128) rotate(const __grid_constant__ Rotate a) {
  let_successor_start();
  wait_for_predecessor();
  int half = a.dim / 2, pieces = half / 8;
  i64 index = static_cast<i64>(blockIdx.x) * 128 + threadIdx.x, pair = index / pieces;
  int c = 8 * static_cast<int>(index % pieces), head = static_cast<int>(pair % a.heads);
  i64 token = pair / a.heads;
  if (token >= a.tokens) return;
  const u16* from = a.x + token * a.token + head * a.head + c;
  u16* to = a.out + pair * a.dim + c;
  Eight low, high, cosine, sine, first, second;
  low.load(from);
  high.load(from + half);
  cosine.load(a.cos + token * a.dim + c);
  sine.load(a.sin + token * a.dim + half + c);
  for (int j = 0; j < 8; j++) {
    first.x[j] = low.x[j] * cosine.x[j] - high.x[j] * sine.x[j];
    second.x[j] = high.x[j] * cosine.x[j] + low.x[j] * sine.x[j];
  }
  first.store(to);
  second.store(to + half);
}

extern "C" __global__ void __launch_bounds__(128) swiglu(const __grid_constant__ Swiglu a) {
  let_successor_start();
  wait_for_predecessor();
  int pieces = a.size / 8;
  i64 index = static_cast<i64>(blockIdx.x) * 128 + threadIdx.x, row = index / pieces;
  int c = 8 * static_cast<int>(index % pieces);
  if (row >= a.rows) return;
  const u16* from = a.gate_up + 2 * row * a.size + c;
  Eight gate, up;
  gate.load(from);
  up.load(from + a.size);
  for (int j = 0; j < 8; j++) gate.x[j] = gate.x[j] / (1.0f + exp2_fast(-1.44269504f * gate.x[j]));
  gate.round();
  for (int j = 0; j < 8; j++) gate.x[j] *= up.x[j];
  gate.store(a.out + row * a.size + c);
}
