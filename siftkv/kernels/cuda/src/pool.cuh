// The histogram of a row's logits, and SnapKV's maximum over neighbours.
//
// A row has a window of logits, FINE buckets an octave from `low` on, z in octaves: bucket b is `FINE (z - low)` rounded. Bucket 0 is for what stands below,
// TOP for what stands above. Buckets are integers in floats: added to 2^23, they are the low bits. Two rows share a word, of which a
// bucket has copies, so that the four lanes that hold tokens of one row do not wait for each other. A first look has twice the buckets, two octaves each, and
// one histogram.
constexpr int BUCKETS = 64, TOP = BUCKETS - 1, HISTOGRAMS = REACH > 0 ? 2 : 1, FINE = 8 / HISTOGRAMS, HISTOGRAM_WORDS = BUCKETS * ROWS / 2 * COUNTERS;
constexpr int SCRATCH_WORDS = HISTOGRAM_WORDS + TEAMS * STAGES * STAGE_BYTES / 4;
constexpr float MAGIC = 8388608.f, NOTHING = -3e38f;
constexpr float COARSE_LOW = -128.f;  // where a first look's window begins

template <bool FIRST> struct Window {
  static constexpr int top = FIRST ? 2 * BUCKETS - 1 : TOP, copies = FIRST ? COUNTERS / 2 : COUNTERS / HISTOGRAMS, bucket_words = ROWS / 2 * copies;
  static constexpr float fine = FIRST ? 0.5f : FINE;
  // What turns a row's product into a bucket: one saturating product between 0 and 1, and one that rounds.
  static constexpr float slope = fine * (LOGIT_SCALE / top);
  static DEV float offset_of(float low) { return -low * (fine / top); }
  static DEV float bucket_of(float c, float offset) { return fmaf(__saturatef(fmaf(c, slope, offset)), top, MAGIC); }
  // Product up to which a bucket is 0, and a hair more, so that none is forgotten.
  static DEV float beneath(float offset) { return ((0.5f + 1e-3f) / top - offset) * (1.f / slope); }
  // Where a bucket (a float's bits, or a number) is counted.
  static DEV u32 counter_of(u32 word, u32 bucket) { return word + bucket * (4 * bucket_words); }
};
static_assert(COUNTERS >= 2 && 0x4B000000u * (4 * ROWS / 2) == 0, "a float's bits above its low ones vanish in an address");
// Octaves above `low` where a bucket begins.
DEV float edge(int bucket) { return (static_cast<float>(bucket) - 0.5f) * (1.f / FINE); }
// Without a condition, which would cost more than to count what nobody reads.
DEV void count_in(u32 counter, u32 one) { asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(counter), "r"(one) : "memory"); }
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
