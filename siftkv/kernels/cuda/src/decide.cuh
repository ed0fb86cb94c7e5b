// What votes decide, a head slot a block: every candidate with a vote stays; where these are more than the budget, the best by (votes so far, mass).
// `scratch` is shared memory. Votes so far and means are written beside the tokens.
constexpr int RADIX = 256, AT_ONCE = 8;

DEV u32 block_sum(u32 x, u32* scratch) {
  if (threadIdx.x == 0) scratch[0] = 0;
  sync_block();
  u32 warp = __reduce_add_sync(ALL, x);
  if ((threadIdx.x & 31) == 0 && warp) atomicAdd(scratch, warp);
  sync_block();
  u32 sum = scratch[0];
  sync_block();
  return sum;
}
DEV float block_sum(float x, float* scratch) {
  for (int o = 16; o; o >>= 1) x += shuffle_xor(x, o);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x / 32] = x;
  sync_block();
  float sum = 0.f;
  for (int w = 0; w < SELECT_THREADS / 32; w++) sum += scratch[w];
  sync_block();
  return sum;
}
// Where a candidate's votes and score stand, null where its tier keeps none.
struct Beside { u16 *votes, *score; };
DEV Beside beside(const Select& a, const Head& h, int v) {
  Beside b = {nullptr, nullptr};
  locate(a, h, v, [](int, i64) {},
         [&](auto tier, const int* page, int index) {
           using F = decltype(tier);
           u8* at = page_at(a.cache, *page);
           if constexpr (F::VOTES) b.votes = reinterpret_cast<u16*>(at + F::VOTE) + index;
           if constexpr (F::SCORES && !BY_SCORE) b.score = reinterpret_cast<u16*>(at + F::SCORE) + index;
         });
  return b;
}
DEV u64 rank_of(u32 votes, float mass) { return static_cast<u64>(votes) << 32 | __float_as_uint(mass); }

DEV u64 tally_of(u32 votes, float mass) { return static_cast<u64>(votes) << VOTE_SHIFT | __float2ull_rn(mass * (1ull << MASS_BITS)); }
DEV u32 votes_of(u64 tally) { return static_cast<u32>(tally >> VOTE_SHIFT); }
DEV float mass_of(u64 tally) { return static_cast<float>(tally & ((1ull << VOTE_SHIFT) - 1)) * (1.f / (1ull << MASS_BITS)); }

struct Cut { u64 least; int equals; };  // equals: how many tokens that stand exactly at `least` stay, the oldest
// The rank above which exactly `budget` tokens stand, eight bits at a time; `rank(i)` is 0 for what has no vote.
template <class Rank> DEV Cut find_cut(const Select& a, int candidates, u32* scratch, Rank rank) {
  u64 prefix = 0;
  int left = a.budget;
  for (int shift = 40; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < RADIX; i += SELECT_THREADS) scratch[i] = 0;
    sync_block();
    for (int i = threadIdx.x; i < candidates; i += SELECT_THREADS) {
      u64 own = rank(i);
      if (own && own >> shift >> 8 == prefix) atomicAdd(scratch + (own >> shift & 255), 1u);
    }
    sync_block();
    if (threadIdx.x == 0) {
      int digit = RADIX - 1;
      while (digit > 0 && static_cast<int>(scratch[digit]) < left) left -= scratch[digit--];
      scratch[RADIX] = digit, scratch[RADIX + 1] = left;
    }
    sync_block();
    prefix = prefix << 8 | scratch[RADIX], left = scratch[RADIX + 1];
    sync_block();
  }
  return {prefix, left};
}
template <class Rank> DEV void apply_cut(const Select& a, i64 first, int candidates, const Cut& cut, u32* scratch, Rank rank) {
  u32 equals = 0;
  for (int i = threadIdx.x; i < candidates; i += SELECT_THREADS) {
    u64 own = rank(i);
    if (own < cut.least) a.keep[first + i] = 0;
    equals += own == cut.least;
  }
  equals = block_sum(equals, scratch);
  if (equals <= cut.equals || threadIdx.x >= 32) return;
  int lane = threadIdx.x, seen = 0;
  for (int from = 0; from < candidates; from += 32) {
    bool equal = from + lane < candidates && rank(from + lane) == cut.least;
    u32 all = __ballot_sync(ALL, equal);
    if (equal && seen + __popc(all & ((1u << lane) - 1u)) >= cut.equals) a.keep[first + from + lane] = 0;
    seen += __popc(all);
  }
}
template <class Rank> DEV void cut_to_budget(const Select& a, i64 first, int candidates, u32* scratch, Rank rank) {
  Cut cut = find_cut(a, candidates, scratch, rank);
  apply_cut(a, first, candidates, cut, scratch, rank);
  sync_block();
}
DEV int rows_that_see(const Head& h, const int* of_query, int least, int v) {
  if (v < least) return h.rows;
  int sees = 0;
  for (int w = 0; w < h.rows / GROUP; w++) sees += of_query[w] > v ? GROUP : 0;
  return sees;
}
// What was decided, a thread's share.
struct Decided {
  float dropped;
  u32 kept;
};
// Whether ranks are wanted: only a budget asks for them.
DEV bool ranks(const Select& a, const Head& h) { return a.budget < h.candidates; }
// Decides on candidate i, that has `now` votes and, summed over the rows that see it, `mass`; `before` are the votes that stand beside it. Returns its rank.
DEV u64 decide_token(const Select& a, const Head& h, int i, const Beside& at, u32 before, u32 now, float mass, int sees, Decided& decided) {
  bool stays = now > 0;
  if constexpr (STORED) {
    a.keep[static_cast<i64>(h.index) * a.columns + i] = stays;
    if (at.votes != nullptr) *at.votes = static_cast<u16>(min_int(now + before, 0xFFFF));
    decided.kept += stays;
    if (!stays) decided.dropped += mass;
    return 0;
  }
  float mean = mass / static_cast<float>(max_int(1, sees));
  u32 votes = min_int(now + before, 0xFFFF);
  a.keep[static_cast<i64>(h.index) * a.columns + i] = stays;
  if (at.votes != nullptr) *at.votes = static_cast<u16>(votes);
  if (at.score != nullptr) *at.score = score_bits(mean);
  decided.kept += stays;
  if (!stays) decided.dropped += mass;
  return stays ? rank_of(votes, mean) : 0;
}
// Where more stay than the budget, the best of them do: `tally` holds ranks, of which the first may stand in `scratch`, too. Sums of all threads are written.
DEV void finish_decisions(const Select& a, const Head& h, const int* of_query, u32* scratch, Decided decided, int in_shared) {
  i64 first = static_cast<i64>(h.index) * a.columns;
  int candidates = min_int(h.candidates, a.columns), least = h.total;
  const u64 *ranks = reinterpret_cast<const u64*>(scratch + 512), *tally = a.tally + first;
  for (int i = candidates + threadIdx.x; i < a.columns; i += SELECT_THREADS) a.keep[first + i] = 0;
  u32 kept = block_sum(decided.kept, scratch);
  if (kept > static_cast<u32>(a.budget)) {
    if (candidates <= in_shared) cut_to_budget(a, first, candidates, scratch, [&](int i) { return ranks[i]; });
    else cut_to_budget(a, first, candidates, scratch, [&](int i) { return tally[i]; });
    kept = a.budget;
    for (int w = 0; w < h.rows / GROUP; w++) least = min_int(least, of_query[w]);
    for (int i = threadIdx.x; i < candidates; i += SELECT_THREADS)
      if (tally[i] && !a.keep[first + i]) decided.dropped += __uint_as_float(static_cast<u32>(tally[i])) * rows_that_see(h, of_query, least, h.first + i);
  }
  float dropped = block_sum(decided.dropped, reinterpret_cast<float*>(scratch));
  if (threadIdx.x != 0) return;
  a.kept[h.index] = static_cast<int>(kept);
  a.covered[h.index] = 1.f - dropped / static_cast<float>(max_int(1, h.rows));
}
// Everything stays, and nothing is known of it.
DEV void keep_all(const Select& a, const Head& h) {
  i64 first = static_cast<i64>(h.index) * a.columns;
  int candidates = min_int(h.candidates, a.columns);
  for (int i = threadIdx.x; i < a.columns; i += SELECT_THREADS) a.keep[first + i] = i < candidates;
  if (threadIdx.x == 0) a.kept[h.index] = candidates, a.covered[h.index] = 1.f;
}
#if !PAGED
// Decides on all candidates from their tallies.
DEV void decide(const Select& a, const Head& h, const int* of_query, u32* scratch) {
  constexpr int in_shared = (SCRATCH_WORDS - 512) / 2;  // ranks of 8 bytes behind the first 2 kB of `scratch`
  int candidates = min_int(h.candidates, a.columns), least = h.total;
  for (int w = 0; w < h.rows / GROUP; w++) least = min_int(least, of_query[w]);
  u64 *ranks = reinterpret_cast<u64*>(scratch + 512), *tally = a.tally + static_cast<i64>(h.index) * a.columns;
  Decided decided = {0.f, 0};
  for (int from = threadIdx.x; from < candidates; from += AT_ONCE * SELECT_THREADS) {
    u64 own[AT_ONCE];
    Beside at[AT_ONCE];
    u32 votes[AT_ONCE];
    // Loads of all before anything is stored, so that they wait together.
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      int i = from + n * SELECT_THREADS;
      own[n] = i < candidates ? tally[i] : 0, at[n] = {nullptr, nullptr};
      if (i < candidates) at[n] = beside(a, h, h.first + i);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) votes[n] = at[n].votes != nullptr ? *at[n].votes : 0u;
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      int i = from + n * SELECT_THREADS;
      if (i >= candidates) continue;
      int sees = rows_that_see(h, of_query, least, h.first + i);
      tally[i] = decide_token(a, h, i, at[n], votes[n], votes_of(own[n]), mass_of(own[n]), sees, decided);
      if (i < in_shared) ranks[i] = tally[i];
    }
  }
  finish_decisions(a, h, of_query, scratch, decided, in_shared);
}
#endif
