// Copies of several tensors by one launch, a tensor a run of blocks.
constexpr int MOST_COPIES = 8, COPY_THREADS = 256, PIECES = 4, BLOCK_WORDS = 4 * PIECES * COPY_THREADS;

struct Copies {
  const u32* from[MOST_COPIES];
  u32* to[MOST_COPIES];
  i64 words[MOST_COPIES];
  int first[MOST_COPIES], wide[MOST_COPIES];  // a tensor's first block; whether it is made of whole pieces of 16 bytes
};
extern "C" __global__ void __launch_bounds__(COPY_THREADS) copies(const __grid_constant__ Copies a) {
  int n = 0, block = static_cast<int>(blockIdx.x);
  while (n + 1 < MOST_COPIES && block >= a.first[n + 1]) n++;
  i64 begin = static_cast<i64>(block - a.first[n]) * BLOCK_WORDS, end = begin + BLOCK_WORDS < a.words[n] ? begin + BLOCK_WORDS : a.words[n];
  const u32* from = a.from[n];
  u32* to = a.to[n];
  if (!a.wide[n]) {
    for (i64 i = begin + threadIdx.x; i < end; i += COPY_THREADS) to[i] = from[i];
    return;
  }
  uint4 x[PIECES];
#pragma unroll
  for (int k = 0; k < PIECES; k++) {
    i64 i = begin + 4 * (k * COPY_THREADS + static_cast<int>(threadIdx.x));
    if (i < end) x[k] = *reinterpret_cast<const uint4*>(from + i);
  }
#pragma unroll
  for (int k = 0; k < PIECES; k++) {
    i64 i = begin + 4 * (k * COPY_THREADS + static_cast<int>(threadIdx.x));
    if (i < end) *reinterpret_cast<uint4*>(to + i) = x[k];
  }
}
