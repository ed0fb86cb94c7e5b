// SnapKV's maximum over neighbours.
// 1 where x reaches y, else 0.
DEV float reaches(float x, float y) {
  float z;
  asm("set.ge.f32.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
DEV u32 larger(u32 x, u32 y) {
#if __CUDA_ARCH__ >= 900
#if __CUDA_ARCH__ >= 900
  u32 z;
  asm("max.u16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
#else
  return max(x & 0xFFFF0000u, y & 0xFFFF0000u) | max(x & 0xFFFFu, y & 0xFFFFu);
#endif
#else
  return max(x & 0xFFFF0000u, y & 0xFFFF0000u) | max(x & 0xFFFFu, y & 0xFFFFu);
#endif
}
// 1 for each of two rows whose bucket `x` reaches a bar, of which `short_of` is one less, negated; both have 15 bits.
DEV u32 reach_two(u32 x, u32 short_of) {
#if __CUDA_ARCH__ >= 900
  u32 z;
  asm("{.reg .b32 t; add.s16x2 t, %1, %2; min.s16x2.relu %0, t, %3;}" : "=r"(z) : "r"(x), "r"(short_of), "r"(0x00010001u));
  return z;
#else
  return ((x & 0xFFFFu) + (short_of & 0xFFFFu) - 1u >> 15 & 1u ^ 1u) | ((x >> 16) + (short_of >> 16) - 1u >> 15 & 1u ^ 1u) << 16;
#endif
}
// Which of a lane's tokens stand within REACH positions of the one `d` places after or before them.
struct Near {
  u32 right[REACH + 1], left[REACH + 1];
  bool all;
  DEV void find(const Head& h, int tile, u32 stage) {
    int lane = threadIdx.x & 31, from = first_of(tile);
    auto position = [&](int j) { return static_cast<int>(load_shared(stage + POSITIONS_AT + 4 * j)); };
    all = from >= 0 && from + KEYS <= h.total && position(KEYS - 1) - position(0) == KEYS - 1;
    if (all) return;
#pragma unroll
    for (int d = 1; d <= REACH; d++) {
      u64 near = 0;
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        int j = 32 * e + lane;
        bool there = j + d < KEYS && from + j >= 0 && from + j + d < h.total && position(j + d) - position(j) <= REACH;
        near |= static_cast<u64>(__ballot_sync(ALL, there)) << (32 * e);
      }
      right[d] = static_cast<u32>(near >> (LANE_KEYS * (lane & 3))), left[d] = static_cast<u32>((near << d) >> (LANE_KEYS * (lane & 3)));
    }
  }
};
constexpr int PART_KEYS = 8;
// A lane's buckets of two rows, a word each, and its neighbours' next to them. A tile's first and last maxima are not sound, which nobody reads.
struct Words {
  u32 own[LANE_KEYS], before[REACH + 1], after[REACH + 1];
  DEV void find_neighbours() {
#pragma unroll
    for (int d = 0; d < REACH; d++) before[d] = __shfl_up_sync(ALL, own[LANE_KEYS - REACH + d], 1), after[d] = __shfl_down_sync(ALL, own[d], 1);
  }
  // Maxima over neighbours of PART_KEYS tokens from `first` on.
  DEV void pool(u32 (&pooled)[PART_KEYS], int first, const Near& near) const {
    u32 x[PART_KEYS + 2 * REACH];
#pragma unroll
    for (int i = 0; i < PART_KEYS + 2 * REACH; i++) {
      int j = first + i - REACH;
      x[i] = j < 0 ? before[REACH + j] : j >= LANE_KEYS ? after[j - LANE_KEYS] : own[j];
    }
    if (near.all) {
      // Maxima of three, then of three of these.
      u32 three[PART_KEYS + 2 * REACH];
#pragma unroll
      for (int i = 1; i + 1 < PART_KEYS + 2 * REACH; i++) three[i] = larger(larger(x[i - 1], x[i]), x[i + 1]);
#pragma unroll
      for (int i = 0; i < PART_KEYS; i++) pooled[i] = REACH == 1 ? three[i + 1] : larger(larger(three[i + 1], three[i + REACH]), three[i + 2 * REACH - 1]);
      return;
    }
#pragma unroll
    for (int i = 0; i < PART_KEYS; i++) {
      u32 best = x[REACH + i];
#pragma unroll
      for (int d = 1; d <= REACH; d++) {
        u32 right = near.right[d] >> (first + i) & 1u ? x[REACH + i + d] : 0u, left = near.left[d] >> (first + i) & 1u ? x[REACH + i - d] : 0u;
        best = larger(best, larger(right, left));
      }
      pooled[i] = best;
    }
  }
};
