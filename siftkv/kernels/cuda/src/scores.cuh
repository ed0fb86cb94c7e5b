// Votes by a score of each token, which all rows of a head slot share: a histogram of scores says which score a row's count of tokens reaches.
constexpr int SCORES = 0x7801, PART_WORDS = (SCORE_WORDS + SELECT_THREADS - 1) / SELECT_THREADS;
// Calls `f(i, score)` for tokens `first + i`; scores of several are on their way at once.
template <class F> DEV void each_score(const Select& a, const Head& h, int first, int count, F f) {
  constexpr int at_once = 8;
  for (int from = threadIdx.x; from < count; from += at_once * SELECT_THREADS) {
    u32 bits[at_once];
#pragma unroll
    for (int n = 0; n < at_once; n++) bits[n] = from + n * SELECT_THREADS < count ? score_of(a, h, first + from + n * SELECT_THREADS) : 0;
#pragma unroll
    for (int n = 0; n < at_once; n++)
      if (from + n * SELECT_THREADS < count) f(from + n * SELECT_THREADS, min_int(bits[n], SCORES - 1));
  }
}
DEV u32 counter(const u32* pairs, int i) { return pairs[i / 2] >> 16 * (i & 1) & 0xFFFFu; }
DEV void count_score(u32* pairs, int i) { atomicAdd(pairs + i / 2, 1u << 16 * (i & 1)); }
DEV void clear_scores(u32* pairs) {
  for (int i = threadIdx.x; i < SCORE_WORDS; i += SELECT_THREADS) pairs[i] = 0;
  sync_block();
}
// Of a thread's own counters.
DEV u32 sum_of_part(const u32* pairs) {
  u32 sum = 0;
  for (int i = threadIdx.x * PART_WORDS; i < min_int(SCORE_WORDS, (threadIdx.x + 1) * PART_WORDS); i++) sum += (pairs[i] & 0xFFFFu) + (pairs[i] >> 16);
  return sum;
}
// Sum over the threads before this one, and over all; `scratch` holds a word a warp.
DEV u32 sum_before(u32 x, u32* scratch, u32& total) {
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  u32 sum = x, before = 0;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    u32 other = __shfl_up_sync(ALL, sum, o);
    if (lane >= o) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  sync_block();
  total = 0;
#pragma unroll
  for (int w = 0; w < SELECT_THREADS / 32; w++) {
    if (w < warp) before += scratch[w];
    total += scratch[w];
  }
  sync_block();
  return before + sum - x;
}
// The score that the `count` best tokens have at least. Tokens that a row does not see count too, so that it never selects too few.
DEV void find_score_thresholds(const Select& a, const Head& h, Shared& s) {
  u32 *pairs = s.scores(), total;
  clear_scores(pairs);
  each_score(a, h, 0, h.total, [&](int, int score) { count_score(pairs, score); });
  sync_block();
  u32 before = sum_before(sum_of_part(pairs), s.counts, total);
  s.counts[threadIdx.x] = total - before;  // of this part and all that follow
  sync_block();
  int row = threadIdx.x;
  if (row < ROWS && s.threshold[row] != NEVER_REACHED) {
    int wanted = s.count[row] + h.total - s.visible[row], low = 0, high = SELECT_THREADS;
    while (low < high) {  // how many parts have so many from them on
      int middle = (low + high) / 2;
      if (static_cast<int>(s.counts[middle]) >= wanted) low = middle + 1;
      else high = middle;
    }
    int found = low < SELECT_THREADS ? s.counts[low] : 0, score = min_int(SCORES, low * 2 * PART_WORDS);
    while (score > 0 && found < wanted) found += counter(pairs, --score);
    s.threshold[row] = score;
  }
  sync_block();
}
// How many rows of the block have a threshold that a score reaches, for every score.
DEV void count_score_votes(Shared& s) {
  u32 *pairs = s.scores(), total;
  clear_scores(pairs);
  if (threadIdx.x < ROWS && s.threshold[threadIdx.x] < SCORES) count_score(pairs, s.threshold[threadIdx.x]);
  sync_block();
  u32 sum = sum_before(sum_of_part(pairs), s.counts, total);
  for (int i = threadIdx.x * PART_WORDS; i < min_int(SCORE_WORDS, (threadIdx.x + 1) * PART_WORDS); i++) {
    u32 pair = pairs[i], first = sum + (pair & 0xFFFFu);
    sum = first + (pair >> 16);
    pairs[i] = first | sum << 16;
  }
  sync_block();
}
// Votes that a score has from the block's rows, of a token that all of them see if v is below `least`.
DEV u32 votes_by_score(const Shared& s, const u32* pairs, int v, int score, int least) {
  if (v < least) return counter(pairs, score);
  u32 votes = 0;
  for (int r = 0; r < ROWS; r++) votes += s.threshold[r] <= score && v < s.visible[r];
  return votes;
}
#if !PAGED
DEV void vote_by_score(const Select& a, const Head& h, Shared& s) {
  const u32* pairs = s.scores();
  count_score_votes(s);
  int least = h.total;
  for (int r = 0; r < ROWS; r++) least = min_int(least, s.visible[r]);
  each_score(a, h, h.first, min_int(h.candidates, a.columns), [&](int i, int score) {
    u32 votes = votes_by_score(s, pairs, h.first + i, score, least);
    atomicAdd(a.tally + static_cast<i64>(h.index) * a.columns + i, static_cast<u64>(votes) << VOTE_SHIFT);
  });
  sync_block();
}
#endif
