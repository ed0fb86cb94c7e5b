// A block's shared memory.
constexpr int PARTS = SELECT_THREADS / ROWS, PART = (BUCKETS + PARTS - 1) / PARTS;  // of a histogram, a thread each for every row
constexpr int NEVER_REACHED = 0x7FFF;                 // a threshold
constexpr bool COUNTS_ABOVE = REACH > 0 || BY_SCORE;  // else only masses matter there
constexpr int SCORE_WORDS = (0x7801 + 1) / 2;         // counters of 16 bits, one for each score that there is

struct Shared {
#if PAGED
  u8 lines[RING_BYTES];              // from an address that 1,024 divides
  u32 histogram[HISTOGRAM_WORDS];    // with a pool, queries and what tokens reach (`Reached`) come here after it
  u8 own_queries[REACH > 0 ? 16 : QUERY_BYTES];
  int positions[REACH > 0 ? STAGES : 1][POSITION_ROW];
  u64 full[FILLS], empty[STAGES], decided;
  alignas(16) float bar[ROWS / 2][4];  // of two rows: products that reach it, exponents
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
  DEV u8* queries() { return REACH > 0 ? reinterpret_cast<u8*>(histogram) : own_queries; }
#endif
  DEV u32* scratch() { return reinterpret_cast<u32*>(this); }             // SCRATCH_WORDS, when all passes are done
  DEV u32* scores() { return PAGED ? histogram : scratch(); }            // SCORE_WORDS between passes
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "shared memory");
static_assert(!BY_SCORE || (PAGED ? HISTOGRAM_WORDS : SCRATCH_WORDS) >= SCORE_WORDS, "room for a counter a score");
