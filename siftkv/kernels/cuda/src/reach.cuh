// SnapKV's maximum over neighbours, told by position. Tokens stand in order of time, and a token's maximum is due REACH tokens later, so that what came before
// suffices: "the tokens up to j" are the WIDTH last ones, and their middle is the token whose maximum is due at j.
constexpr int WIDTH = 2 * REACH + 1;
constexpr u32 ALL_NEAR = (1u << WIDTH) - 1;

DEV u32 larger(u32 x, u32 y) {
  u32 z;
  asm("max.u16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
DEV int position_beside(u32 positions, int j) { return static_cast<int>(load_shared(positions + 4 * (BEFORE + j))); }
// Whether every token of a tile, and those before it that matter to it, is next to the following one.
DEV bool is_dense(const Head& h, u32 positions, int from) {
  return from >= 2 * REACH && from + KEYS <= h.total && position_beside(positions, KEYS - 1) - position_beside(positions, -2 * REACH) == KEYS - 1 + 2 * REACH;
}
// Which of the tokens up to j are near their middle: bit d for token j - d.
DEV u32 near_at(u32 positions, int j) {
  int middle = position_beside(positions, j - REACH);
  u32 near = 0;
#pragma unroll
  for (int d = 0; d < WIDTH; d++) {
    int apart = position_beside(positions, j - d) - middle;
    near |= apart <= REACH && apart >= -REACH ? 1u << d : 0u;
  }
  return near;
}
// Counters of buckets, as distances in bytes, of a lane's four tokens of RUN, two rows a word, and of the four RUN tokens before.
constexpr u32 BUCKET_BYTES = 4 * Window<false>::bucket_words;
static_assert(TOP * BUCKET_BYTES < 1 << 16, "distances that half a word holds");
struct Words {
  u32 own[4] = {}, previous[4], bytes[2];  // bytes: buckets, of the two rows of a token and then of the next one
  // Products of tokens 2 m + e of the four.
  DEV void next(const float (&first)[4], const float (&second)[4], const float (&offset)[2]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float* c = i < 2 ? first : second;
      previous[i] = own[i];
      own[i] = __byte_perm(__float_as_uint(Window<false>::bucket_of(c[i % 2], offset[0])), __float_as_uint(Window<false>::bucket_of(c[2 + i % 2], offset[1])), 0x5410);
    }
    bytes[0] = __byte_perm(own[0], own[1], 0x6420), bytes[1] = __byte_perm(own[2], own[3], 0x6420);
#pragma unroll
    for (int i = 0; i < 4; i++) own[i] *= BUCKET_BYTES;
  }
  // What stands `d` lanes before, of which lanes have one `here` and one `earlier`.
  static DEV u32 before(u32 here, u32 earlier, int d, int lane) {
    return __shfl_sync(ALL, (lane & 3) + d < 4 ? here : earlier, (lane & ~3) | ((lane - d) & 3));
  }
  // The maximum of four from the k-th on.
  static DEV u32 from(const u32 (&x)[4], int k) {
    u32 most = x[3];
#pragma unroll
    for (int i = 0; i < 3; i++) most = i >= k ? larger(most, x[i]) : most;
    return most;
  }
  // Maxima due at the four, where all tokens are next to each other.
  DEV void dense(u32 (&due)[4]) const {
    int lane = thread_now() & 31;
    u32 whole = REACH > 1 ? before(from(own, 0), from(previous, 0), 1, lane) : 0, here = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int first = i - 2 * REACH, lanes = (3 - first) / 4, k = first + 4 * lanes;  // the first of WIDTH tokens: the k-th of a lane so many before
      here = i == 0 ? own[0] : larger(here, own[i]);
      due[i] = here;
      if (lanes <= 0) due[i] = i == 3 ? from(own, k) : here;
      if (lanes == 2) due[i] = larger(due[i], whole);
      if (lanes >= 1) due[i] = larger(due[i], lanes == 1 && k == 0 ? whole : before(from(own, k), from(previous, k), lanes, lane));
    }
  }
  // The same by positions: `at` has those of the four and of the eight tokens before.
  DEV void sparse(u32 (&due)[4], const u32 (&at)[12]) const {
    u32 tokens[4 + 2 * REACH];  // the last of the four first
#pragma unroll
    for (int i = 0; i < 4; i++) tokens[i] = own[3 - i];
#pragma unroll
    for (int d = 1; d <= 2 * REACH; d++) tokens[3 + d] = before(own[(8 - d) % 4], previous[(8 - d) % 4], (d + 3) / 4, threadIdx.x & 31);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int middle = static_cast<int>(at[8 + i - REACH]);
      due[i] = tokens[3 - i + REACH];
#pragma unroll
      for (int d = 0; d < WIDTH; d++) {
        int position = static_cast<int>(at[8 + i - d]);
        if (d != REACH) due[i] = larger(due[i], (d < REACH ? position <= middle + REACH : position >= middle - REACH) ? tokens[3 - i + d] : 0u);
      }
    }
  }
};
