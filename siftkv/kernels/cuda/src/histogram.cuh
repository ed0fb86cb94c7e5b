// The histogram of a row's logits.
//
// A row has a window of logits, FINE buckets an octave from `low` on, z in octaves: bucket b is `FINE (z - low)` rounded. Bucket 0 is for what stands below,
// TOP for what stands above. Buckets are integers in floats: added to 2^23, they are the low bits. Two rows share a word, of which a
// bucket has copies, so that the four lanes that hold tokens of one row do not wait for each other. A first look has twice the buckets, two octaves each, and
// one histogram.
constexpr int BUCKETS = 64, TOP = BUCKETS - 1, HISTOGRAMS = REACH > 0 ? 2 : 1, FINE = 8 / HISTOGRAMS, HISTOGRAM_WORDS = BUCKETS * ROWS / 2 * COUNTERS;
constexpr int SCRATCH_WORDS = RING_BYTES / 4 + (PAGED ? 0 : HISTOGRAM_WORDS);
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
// The same of eight, of two rows by turns.
DEV void count_in(const u32 (&counters)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) count_in(counters[i], i % 2 ? 1u << 16 : 1u);
}
DEV int word_of(int row) { return row / 16 * 8 + row % 8; }
DEV int half_of(int row) { return row % 16 / 8; }
