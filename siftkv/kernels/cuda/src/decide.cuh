// What votes decide, a head slot a block: every candidate with a vote stays; where these are more than the budget, the best by (votes so far, mass).
// `scratch` is shared memory. Votes so far and means are written beside the tokens.
constexpr int RADIX = 256, AT_ONCE = 8;

DEV u32 block_sum(u32 x, u32* scratch) {
  if (threadIdx.x == 0) scratch[0] = 0;
  __syncthreads();
  u32 warp = __reduce_add_sync(ALL, x);
  if ((threadIdx.x & 31) == 0 && warp) atomicAdd(scratch, warp);
  __syncthreads();
  u32 sum = scratch[0];
  __syncthreads();
  return sum;
}
DEV float block_sum(float x, float* scratch) {
  for (int o = 16; o; o >>= 1) x += shuffle_xor(x, o);
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.f;
  for (int w = 0; w < SELECT_THREADS / 32; w++) sum += scratch[w];
  __syncthreads();
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

struct Cut { u64 least; int equals; };  // equals: how many tokens that stand exactly at `least` stay, the oldest
// The rank above which exactly `budget` tokens stand, eight bits at a time; `rank(i)` is 0 for what has no vote.
template <class Rank> DEV Cut find_cut(const Select& a, int candidates, u32* scratch, Rank rank) {
  u64 prefix = 0;
  int left = a.budget;
  for (int shift = 40; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < RADIX; i += SELECT_THREADS) scratch[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < candidates; i += SELECT_THREADS) {
      u64 own = rank(i);
      if (own && own >> shift >> 8 == prefix) atomicAdd(scratch + (own >> shift & 255), 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = RADIX - 1;
      while (digit > 0 && static_cast<int>(scratch[digit]) < left) left -= scratch[digit--];
      scratch[RADIX] = digit, scratch[RADIX + 1] = left;
    }
    __syncthreads();
    prefix = prefix << 8 | scratch[RADIX], left = scratch[RADIX + 1];
    __syncthreads();
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
  __syncthreads();
}
DEV int rows_that_see(const Head& h, const int* of_query, int least, int v) {
  if (v < least) return h.rows;
  int sees = 0;
  for (int w = 0; w < h.rows / GROUP; w++) sees += of_query[w] > v ? GROUP : 0;
  return sees;
}
DEV void decide(const Select& a, const Head& h, const int* of_query, u32* scratch, bool whole) {
  constexpr int in_shared = (SCRATCH_WORDS - 512) / 2;  // ranks of 8 bytes behind the first 2 kB of `scratch`
  i64 first = static_cast<i64>(h.index) * a.columns;
  int candidates = min_int(h.candidates, a.columns), least = h.total;
  for (int w = 0; w < h.rows / GROUP; w++) least = min_int(least, of_query[w]);
  u64 *ranks = reinterpret_cast<u64*>(scratch + 512), *tally = a.tally + first;
  float dropped = 0.f;
  u32 kept = 0;
  for (int i = candidates + threadIdx.x; i < a.columns; i += SELECT_THREADS) a.keep[first + i] = 0;
  for (int from = threadIdx.x; from < candidates; from += AT_ONCE * SELECT_THREADS) {
    u64 own[AT_ONCE];
    Beside at[AT_ONCE];
    u32 votes[AT_ONCE];
    // Loads of all before anything is stored, so that they wait together.
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      int i = from + n * SELECT_THREADS;
      own[n] = i < candidates ? tally[i] : 0, at[n] = {nullptr, nullptr};
      if (i < candidates && !whole) at[n] = beside(a, h, h.first + i);
    }
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) votes[n] = at[n].votes != nullptr ? *at[n].votes : 0u;
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++) {
      int i = from + n * SELECT_THREADS;
      if (i >= candidates) continue;
      u32 now = static_cast<u32>(own[n] >> VOTE_SHIFT);
      bool stays = whole || now > 0;
      kept += stays;
      a.keep[first + i] = stays;
      if (whole) continue;
      float mass = static_cast<float>(own[n] & ((1ull << VOTE_SHIFT) - 1)) * (1.f / (1ull << MASS_BITS));
      float mean = mass / static_cast<float>(max_int(1, rows_that_see(h, of_query, least, h.first + i)));
      now = min(now + votes[n], 0xFFFFu);
      if (at[n].votes != nullptr) *at[n].votes = static_cast<u16>(now);
      if (at[n].score != nullptr) *at[n].score = score_bits(mean);
      if (!stays) dropped += mass;
      u64 rank = stays ? rank_of(now, mean) : 0;
      tally[i] = rank;
      if (i < in_shared) ranks[i] = rank;
    }
  }
  kept = block_sum(kept, scratch);
  if (kept > static_cast<u32>(a.budget) && !whole) {
    if (candidates <= in_shared) cut_to_budget(a, first, candidates, scratch, [&](int i) { return ranks[i]; });
    else cut_to_budget(a, first, candidates, scratch, [&](int i) { return tally[i]; });
    kept = a.budget;
    for (int i = threadIdx.x; i < candidates; i += SELECT_THREADS)
      if (tally[i] && !a.keep[first + i]) dropped += __uint_as_float(static_cast<u32>(tally[i])) * rows_that_see(h, of_query, least, h.first + i);
  }
  dropped = block_sum(dropped, reinterpret_cast<float*>(scratch));
  if (threadIdx.x != 0) return;
  a.kept[h.index] = static_cast<int>(kept);
  a.covered[h.index] = 1.f - dropped / static_cast<float>(max_int(1, h.rows));
}
