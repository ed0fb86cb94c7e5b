// The two ends of a model pass: token ids become the first layer's input, logits become tokens.
constexpr int CHOOSE_THREADS = 1024;

struct Enter {
  Norm norm;  // x: the embedding; added, out: [T, size]
  const i64 *tokens, *positions;
  const float *cos_table, *sin_table;  // [places, dim / 2]
  float *cos, *sin;                    // [T, dim]
  int vocab, places, dim;
};
extern "C" __global__ void __launch_bounds__(NORM_THREADS) enter(const __grid_constant__ Enter a) {
  wait_for_predecessor();
  let_successor_start();
  i64 row = blockIdx.x, token = a.tokens[row], place = a.positions[row];
  token = token < 0 ? 0 : token < a.vocab ? token : a.vocab - 1;
  place = place < 0 ? 0 : place < a.places ? place : a.places - 1;
  int half = a.dim / 2;
  for (int i = threadIdx.x; i < half; i += NORM_THREADS) {
    float c = a.cos_table[place * half + i], s = a.sin_table[place * half + i];
    a.cos[row * a.dim + i] = a.cos[row * a.dim + half + i] = c;
    a.sin[row * a.dim + i] = -s, a.sin[row * a.dim + half + i] = s;
  }
  norm_row<false, true>(a.norm, token * a.norm.size, row * a.norm.size);
}

struct Choose {
  const u16* logits;
  const u8* not_finite;  // [S]
  const i64 *slots, *counters;
  i64* out;  // [2 B + 2]: tokens, whether each may be used, counters
  int requests, vocab;
};
struct Best {
  float value;
  int token;
  bool nan;
  DEV void see(float x, int at) {
    nan |= x != x;
    if (x > value) value = x, token = at;
  }
  // Larger values first, then lower tokens; both zeros are equal.
  DEV u64 key() const {
    u32 bits = __float_as_uint(value + 0.f), order = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<u64>(order) << 32 | (ALL - static_cast<u32>(token));
  }
};
extern "C" __global__ void __launch_bounds__(CHOOSE_THREADS) choose(const __grid_constant__ Choose a) {
  __shared__ u64 keys[CHOOSE_THREADS / 32];
  wait_for_predecessor();
  let_successor_start();
  const u16* row = a.logits + static_cast<i64>(blockIdx.x) * a.vocab;
  Best best = {-__int_as_float(0x7f800000), 0, false};
  int whole = a.vocab % 8 == 0 ? a.vocab : 0;
#pragma unroll 4
  for (int at = 8 * threadIdx.x; at < whole; at += 8 * CHOOSE_THREADS) {
    Eight x;
    x.load(row + at);
    for (int i = 0; i < 8; i++) best.see(x.x[i], at + i);
  }
  for (int at = whole + threadIdx.x; at < a.vocab; at += CHOOSE_THREADS) best.see(model_to_float(row[at]), at);
  u64 key = best.key();
  for (int o = 16; o; o >>= 1) {
    u64 other = shuffle_xor(key, o);
    key = other > key ? other : key;
  }
  if ((threadIdx.x & 31) == 0) keys[threadIdx.x >> 5] = key;
  bool nan = __syncthreads_or(best.nan);
  if (threadIdx.x != 0) return;
  for (u64 other : keys) key = other > key ? other : key;
  u32 order = static_cast<u32>(key >> 32), bits = order & 0x80000000u ? order ^ 0x80000000u : ~order;
  bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  a.out[blockIdx.x] = ALL - static_cast<u32>(key & ALL);
  a.out[a.requests + blockIdx.x] = finite && !nan && !a.not_finite[a.slots[blockIdx.x]];
  if (blockIdx.x == 0) a.out[2 * a.requests] = a.counters[0], a.out[2 * a.requests + 1] = a.counters[1];
}
