// A block's shared memory.
constexpr int PARTS = SELECT_THREADS / ROWS, PART = (BUCKETS + PARTS - 1) / PARTS;  // of a histogram, a thread each for every row
constexpr int NEVER_REACHED = 0x7FFF;                 // a threshold
constexpr bool COUNTS_ABOVE = REACH > 0 || BY_SCORE;  // else only masses matter there
constexpr int SCORE_WORDS = (0x7801 + 1) / 2;         // counters of 16 bits, one for each score that there is
#if PAGED
constexpr int OWN_BYTES = OWN_STEPS < STEPS ? QUERY_HALF_BYTES : 16;  // of queries, where buckets are stored
#endif

struct Shared {
#if PAGED
  u8 lines[RING_BYTES];              // from an address that 1,024 divides
#if STORES
  u8 own_queries[OWN_BYTES];
#endif
  u32 histogram[HISTOGRAM_WORDS];    // with a pool, queries and what tokens reach (`Reached`) come here after it
#if !STORES
  u8 own_queries[REACH > 0 ? 16 : QUERY_BYTES];
#endif
  int positions[REACH > 0 ? STAGES : 1][POSITION_ROW];
  u64 full[FILLS], empty[FILLS], decided;
#if STORES
  alignas(16) u32 reaches[ROWS / 2], shares[ROWS / 2][2];  // of two rows, see `write_marks`
  float rest[ROWS];
  Room room;
#else
  alignas(16) float bar[ROWS / 2][4];  // of two rows: products that reach it, exponents
#endif
  alignas(16) u32 kept[READERS / 32][8];  // what a warp would keep in registers
  bool contiguous;         // candidates have no gaps
  int last_pass;           // the pass that votes, of those that begin with a decision
#else
  u32 histogram[HISTOGRAM_WORDS];
  u8 lines[TEAMS][STAGES * STAGE_BYTES];
  u64 full[TEAMS][STAGES], empty[TEAMS][STAGES];
#endif
  float total[TEAMS][ROWS], below[TEAMS][ROWS];  // masses: all, those below the windows
  float most[PARTS][ROWS];                       // what a part of a histogram may hold
  float low[ROWS], exponent[ROWS];
  int threshold[ROWS], pooled[ROWS], count[ROWS], moved[ROWS], visible[ROWS], of_query[MOST_QUERIES];
  u32 counts[SELECT_THREADS];
  Head head;
#if PAGED
  DEV u8* queries() { return REACH > 0 && !STORED ? reinterpret_cast<u8*>(histogram) : own_queries; }
#endif
  DEV u32* scratch() { return reinterpret_cast<u32*>(this); }             // SCRATCH_WORDS, when all passes are done
  DEV u32* scores() { return PAGED ? histogram : scratch(); }            // SCORE_WORDS between passes
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory");
static_assert(!BY_SCORE || (PAGED ? HISTOGRAM_WORDS : SCRATCH_WORDS) >= SCORE_WORDS, "room for a counter a score");
#if PAGED
// Tokens that all rows see.
DEV int seen_by_all(const Head& h, const Shared& s) {
  int least = h.total;
  for (int r = threadIdx.x & 31; r < ROWS; r += 32) least = min_int(least, s.visible[r]);
  for (int o = 1; o < 32; o <<= 1) least = min_int(least, shuffle_xor(least, o));
  return least;
}
// Tiles whose tokens, and those before them that pools want, are candidates without gaps that all rows see.
struct Dense {
  int from, to;
  DEV bool has(int tile) const { return tile >= from && tile < to; }
};
DEV Dense dense_tiles(const Head& h, const Shared& s, int least) {
  if (!s.contiguous) return {MOST_TOKENS, MOST_TOKENS};
  return {ceil_div(h.first + BEFORE + h.pad, KEYS), (min_int(h.first + h.candidates, least) + h.pad) / KEYS};
}
#endif
