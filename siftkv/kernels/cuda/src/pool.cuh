// The histogram of a row's logits, and SnapKV's maximum over neighbours.
//
// A row has a window of logits, FINE buckets an octave from `low` on, z in octaves: bucket b is `FINE (z - low)` rounded. Bucket 0 is for what stands below,
// TOP for what stands above. Buckets are integers in floats: added to 2^23, they are the low bits. A counter has COPIES, so that the four lanes that hold
// tokens of one row do not wait for each other.
constexpr int BUCKETS = 128, TOP = BUCKETS - 1, HISTOGRAMS = REACH > 0 ? 2 : 1, COPIES = COUNTERS / HISTOGRAMS, FINE = 16 / HISTOGRAMS, WORDS = ROWS / 2 * COPIES;
constexpr float MAGIC = 8388608.f, NOTHING = -3e38f;
constexpr float COARSE = 0.5f, COARSE_LOW = -128.f;  // a first look: buckets an octave, and where its window begins

// Octaves above `low` where a bucket begins.
DEV float edge(int bucket) { return (static_cast<float>(bucket) - 0.5f) * (1.f / FINE); }
// What turns a row's product into a bucket, for `fine` buckets an octave from `low` on: one saturating product between 0 and 1, and one that rounds.
DEV float slope_of(float fine) { return fine * (LOGIT_SCALE / TOP); }
DEV float offset_of(float fine, float low) { return -low * (fine / TOP); }
DEV float bucket_of(float c, float slope, float offset) { return fmaf(__saturatef(fmaf(c, slope, offset)), TOP, MAGIC); }
// Counts a bucket: a float's bits, or a number. Without a condition, which would cost more than to count what nobody reads.
DEV void count_in(u32 histogram, u32 bucket, int word, u32 one) {
  constexpr int shift = COPIES == 4 ? 10 : COPIES == 2 ? 9 : 8;
  static_assert(WORDS * 4 == 1 << shift, "bytes of a bucket");
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(histogram + (bucket << shift) + 4 * word), "r"(one) : "memory");
}
// 1 where x reaches y, else 0.
DEV float reaches(float x, float y) {
  float z;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
DEV int word_of(int row) { return row / 16 * 8 + row % 8; }
DEV int half_of(int row) { return row % 16 / 8; }

DEV u32 larger(u32 x, u32 y) {
#if __CUDA_ARCH__ >= 900
  u32 z;
  asm("max.u16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
#else
  return max(x & 0xFFFF0000u, y & 0xFFFF0000u) | max(x & 0xFFFFu, y & 0xFFFFu);
#endif
}
// Which tokens of a tile stand within REACH positions of the one `d` places before them (bit: the earlier one). Lane j has token j's position.
struct Near {
  u32 right[REACH + 1], left[REACH + 1];
  bool all;
  DEV void find(int position, bool inside) {
    int lane = threadIdx.x & 31, t = lane & 3;
    all = true;
#pragma unroll
    for (int d = 1; d <= REACH; d++) {
      int other = __shfl_down_sync(ALL, position, d);
      bool there = __shfl_down_sync(ALL, inside, d) && inside && lane + d < 32;
      u32 near = __ballot_sync(ALL, there && other - position <= REACH);
      all &= near == ALL >> d;
      right[d] = near >> (2 * t), left[d] = near << d >> (2 * t);
    }
  }
};
constexpr int TILES = KEYS / 8;
// Buckets (two rows a word) of the pair of tokens `SHIFT` pairs away, token `e` of it. Pairs of a tile stand in lanes t = 0 .. 3 of its words n.
template <int SHIFT> DEV void neighbours(u32 (&out)[TILES], const u32 (&own)[TILES][2], int e) {
  int lane = threadIdx.x & 31, t = lane & 3, from = (lane & ~3) | ((t + SHIFT) & 3);
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    bool wraps = SHIFT > 0 ? t < SHIFT : t >= 4 + SHIFT;
    int other = n + (SHIFT > 0 ? 1 : -1);
    u32 next = other >= 0 && other < TILES ? own[other < 0 ? 0 : other > TILES - 1 ? TILES - 1 : other][e] : 0u;
    out[n] = __shfl_sync(ALL, wraps ? next : own[n][e], from);
  }
}
template <bool GAPS> DEV void pool_words(u32 (&pooled)[TILES][2], const u32 (&own)[TILES][2], const Near& near) {
  u32 at[5][2][TILES];  // pairs -2 .. 2
#pragma unroll
  for (int e = 0; e < 2; e++) {
    neighbours<-1>(at[1][e], own, e);
    neighbours<1>(at[3][e], own, e);
    if (REACH >= 4 || (REACH == 3 && e == 1)) neighbours<-2>(at[0][e], own, e);
    if (REACH >= 4 || (REACH == 3 && e == 0)) neighbours<2>(at[4][e], own, e);
#pragma unroll
    for (int n = 0; n < TILES; n++) at[2][e][n] = own[n][e];
  }
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      u32 best = own[n][e];
#pragma unroll
      for (int d = 1; d <= REACH; d++) {
        u32 right = at[2 + ((e + d) >> 1)][(e + d) & 1][n], left = at[2 + ((e - d) >> 1)][(e - d) & 1][n], bit = 1u << (8 * n + e);
        if (GAPS) right = near.right[d] & bit ? right : 0u, left = near.left[d] & bit ? left : 0u;
        best = larger(best, larger(right, left));
      }
      pooled[n][e] = best;
    }
}
