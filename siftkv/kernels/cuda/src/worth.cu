// Prompt tokens ranked by worth: `weigh` turns sums of squared attention into worth, `levels` counts how many tokens of a head reach each level of it,
// and `place`, told how many go where, finds the worth where each tier begins, digit by digit, and writes each token's tier and score.
// Sums of squares come from `attention`, to which each prompt is two: one with its last rows, one with rows all along it that follow from afar.
constexpr int RANK_THREADS = 1024, RANK_WARPS = RANK_THREADS / 32, TIERS = 3;
constexpr int DIGIT_BITS[3] = {11, 10, 10}, DIGIT_SHIFT[3] = {20, 10, 0}, MOST_DIGITS = 2048;  // of 31 bits: worth has no sign
constexpr int NO_CUT = 0x7FFFFFFF;
static_assert(LEVELS % RANK_THREADS == 0 && MOST_DIGITS % 32 == 0, "levels and digits in equal parts");

// One prompt: its tokens, those `[first, end)` that leave the window, and its first of blocks of `weigh`.
struct __align__(16) Ranked { int start, length, first, end, first_block, blocks, unused[2]; };

// What tiers have in common in all prompts: how many levels their bars are above the lowest one's, what a token costs more than in the next tier, tokens
// a page, shares where heads cannot be told apart, and tokens that the last tier of a head leaves to what comes next.
struct Sizes { int shift[TIERS]; float step[TIERS], a_page[TIERS], even[TIERS], ahead; };

struct Worth {
  Importance asked;      // its prompts are 2 b, the last rows of prompt b, and 2 b + 1, distant ones
  const u16* v;
  const Ranked* ranked;
  const int2* weigh_work;  // (prompt, index in it) of each block
  float2* partial;       // [blocks, H]: worth and mean squares of tokens that leave the window, in sum
  float *worth, *norm;   // [H, tokens]; squared norms of values
  float* above;          // [R, H, width]
  float *factor, *prior;  // [R, H]: of `seed_of` in a score; mean square that every token is taken to have in advance
  float* score;          // [H, tokens]: measured, then what is kept
  const float* bounds;   // [R, H, TIERS]
  signed char* tier;     // [H, tokens]
  const float* room;     // [8, R]: `Room` of each prompt
  float *held, *share;   // [R, H, TIERS]: how many tokens are in a tier or a better one; shares of what the request sees later
  i64 v_token, v_head, score_head;
  float distant, later, unseen;  // unseen: of the average mean square, what every token is taken to have in advance
  int width, young, pool;  // pool: positions, odd, that `weigh` averages over, at most MOST_POOLED
  Sizes sizes;
};

// Sum over a block, the same for all its threads; the order is fixed.
template <int WARPS> DEV float sum_of_block(float x, float* shared) {
  for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffle_xor(x, lanes);
  __syncthreads();
  if ((threadIdx.x & 31) == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.f;
  for (int i = 0; i < WARPS; i++) sum += shared[i];
  return sum;
}
// Mean square attention of a prompt's rows that follow `key`, and how many these are.
DEV float mean_square(const Importance& a, const Prompt& p, int head, int key, int& rows) {
  rows = p.count - first_after(a.padded_rows + p.first_padded, p.count, key + p.lag);
  if (rows == 0) return 0.f;
  const float* sums = sums_of(a, p) + static_cast<i64>(head) * p.length + key;
  float sum = 0.f;
  for (int part = 0; part < p.row_parts; part++) sum += sums[static_cast<i64>(part) * a.heads * p.length];
  return __fdiv_rn(sum, static_cast<float>(rows));
}
DEV float square_of(u32 pair) {
  float low = model_to_float(static_cast<u16>(pair & 0xFFFF)), high = model_to_float(static_cast<u16>(pair >> 16));
  return low * low + high * high;
}
extern "C" __global__ void __launch_bounds__(FINISH_THREADS) weigh(const __grid_constant__ Worth w) {
  __shared__ float recent[FINISH_THREADS + MOST_POOLED - 1], norm[FINISH_THREADS], sums[FINISH_THREADS / 32];
  let_successor_start();
  const Importance& a = w.asked;
  int2 work = w.weigh_work[blockIdx.x];
  const Ranked r = w.ranked[work.x];
  int head = blockIdx.y, from = work.y * FINISH_THREADS, key = from + threadIdx.x, piece = threadIdx.x & 7, beside = w.pool / 2;
  const u16* values = w.v + r.start * w.v_token + head * w.v_head;
  for (int i = threadIdx.x / 8; i < FINISH_THREADS; i += FINISH_THREADS / 8) {
    const uint4* row = reinterpret_cast<const uint4*>(values + min_int(from + i, r.length - 1) * w.v_token);
    float sum = 0.f;
#pragma unroll
    for (int c = piece; c < HEAD_DIM / 8; c += 8) {
      uint4 x = row[c];
      sum += square_of(x.x) + square_of(x.y) + (square_of(x.z) + square_of(x.w));
    }
    for (int lanes = 4; lanes > 0; lanes /= 2) sum += shuffle_xor(sum, lanes);
    if (piece == 0) norm[i] = sum;
  }
  wait_for_predecessor();
  const Prompt &last = a.prompts[2 * work.x], &distant = a.prompts[2 * work.x + 1];
  int rows;
  for (int i = threadIdx.x; i < FINISH_THREADS + 2 * beside; i += FINISH_THREADS) {
    int at = from + i - beside;
    recent[i] = at >= 0 && at < r.length ? mean_square(a, last, head, at, rows) : 0.f;
  }
  __syncthreads();
  float worth = 0.f, square = 0.f;
  if (key < r.length) {
    int low = max_int(key - beside, 0), high = min_int(key + beside, r.length - 1);
    float pooled = 0.f;
    for (int i = low; i <= high; i++) pooled += recent[i - from + beside];
    float far = mean_square(a, distant, head, key, rows);
    if (rows < LEAST_DISTANT) far = recent[threadIdx.x + beside];
    square = pooled / static_cast<float>(high - low + 1) + w.distant * far;
    worth = square * norm[threadIdx.x];
    i64 at = static_cast<i64>(head) * a.tokens + r.start + key;
    w.worth[at] = worth, w.norm[at] = norm[threadIdx.x];
    if (key < r.first || key >= r.end) worth = square = 0.f;
  }
  worth = sum_of_block<FINISH_THREADS / 32>(worth, sums);
  square = sum_of_block<FINISH_THREADS / 32>(square, sums);
  if (threadIdx.x == 0) w.partial[(r.first_block + work.y) * a.heads + head] = {worth, square};
}

// What ranks a token: its worth with the prior; of equals the last comes first. Rounded after each operation, as elsewhere.
DEV float ranked(const Worth& w, float worth, float norm, float prior, int key, int length) {
  return __fadd_rn(worth, __fmul_rn(prior, norm)) * (1.f + w.later * static_cast<float>(key) / static_cast<float>(length));
}
// What a token's score is in proportion to.
DEV float seed_of(float worth) { return worth * worth; }
DEV int level_of(float worth) {
  float level = (log2_fast(worth) - LOWEST_OCTAVE) * LEVELS_AN_OCTAVE;
  return static_cast<int>(fminf(fmaxf(level, 0.f), LEVELS - 1));
}
extern "C" __global__ void __launch_bounds__(RANK_THREADS) levels(const __grid_constant__ Worth w) {
  let_successor_start();
  __shared__ int counts[LEVELS], totals[RANK_WARPS];
  __shared__ float sums[RANK_WARPS];
  const int EACH = LEVELS / RANK_THREADS;
  int head = blockIdx.y, heads = w.asked.heads, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  const Ranked r = w.ranked[blockIdx.x];
  for (int i = threadIdx.x; i < LEVELS; i += RANK_THREADS) counts[i] = 0;
  wait_for_predecessor();
  float sum = 0.f, squares = 0.f, mass = 0.f, measured = 0.f;
  for (int i = threadIdx.x; i < r.blocks * heads; i += RANK_THREADS) {
    float2 part = w.partial[r.first_block * heads + i];
    sum += part.x, squares += part.y;
  }
  float others = static_cast<float>(max_int((r.end - r.first) * heads, 1));
  float average = sum_of_block<RANK_WARPS>(sum, sums) / others, prior = w.unseen * (sum_of_block<RANK_WARPS>(squares, sums) / others);
  i64 start = static_cast<i64>(head) * w.asked.tokens + r.start;
  float *worth = w.worth + start, *score = w.score + head * w.score_head + r.start;
  const float* norm = w.norm + start;
  for (int key = threadIdx.x; key < r.length; key += RANK_THREADS) {
    float x = worth[key];
    if (key >= r.length - w.young) worth[key] = x = fmaxf(x, average);
    mass += seed_of(x);
    measured += score[key];
    if (key >= r.first && key < r.end) atomicAdd(&counts[level_of(ranked(w, x, norm[key], prior, key, r.length))], 1);
  }
  mass = sum_of_block<RANK_WARPS>(mass, sums);
  measured = sum_of_block<RANK_WARPS>(measured, sums);
  i64 column = static_cast<i64>(blockIdx.x) * heads + head;
  if (threadIdx.x == 0) w.factor[column] = measured / fmaxf(mass, 1.17549435e-38f), w.prior[column] = prior;
  // Threads from the last on have the highest levels first, so that what is before a level is what is above it.
  int first = LEVELS - EACH * (threadIdx.x + 1), own = 0, before;
  for (int i = 0; i < EACH; i++) own += counts[first + i];
  before = own;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    int other = __shfl_up_sync(ALL, before, lanes);
    if (lane >= lanes) before += other;
  }
  if (lane == 31) totals[warp] = before;
  __syncthreads();
  before -= own;
  for (int i = 0; i < warp; i++) before += totals[i];
  float* above = w.above + column * w.width;
  for (int i = EACH - 1; i >= 0; i--) above[first + i] = static_cast<float>(before += counts[first + i]);
  for (int i = LEVELS + threadIdx.x; i < w.width; i += RANK_THREADS) above[i] = 0.f;
}

// Where a tier ends: tokens above `key` are in it or in a better one, and of those that are equal the ones before `cut`.
struct End { u32 key; int wanted, equal, cut; };
// By a warp: the digit at which so many tokens are wanted from the top; `wanted` becomes how many of those with this digit.
DEV void find_digit(const int* counts, int digits, int bits, End& e) {
  int lane = threadIdx.x & 31, each = digits / 32, first = digits - each * (lane + 1), own = 0;
  for (int i = 0; i < each; i++) own += counts[first + (i + lane) % each];  // no two lanes at one bank
  int until = own;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    int other = __shfl_up_sync(ALL, until, lanes);
    if (lane >= lanes) until += other;
  }
  int wanted = e.wanted, before = until - own;
  __syncwarp();
  if (before < wanted && wanted <= until) {
    int digit = first + each - 1;
    while (before + counts[digit] < wanted) before += counts[digit--];
    e.key = e.key << bits | digit;
    e.wanted = wanted - before;
    e.equal = counts[digit];
  }
}
// A head's tokens as they are ranked.
struct Tokens {
  const float *worth, *norm;
  float prior;
  int length;
  DEV u32 bits(const Worth& w, int key) const { return __float_as_uint(ranked(w, worth[key], norm[key], prior, key, length)) & 0x7FFFFFFFu; }
};
// The position behind the `wanted`-th token that has the key of a tier's end.
DEV void find_cut(const Worth& w, const Ranked& r, const Tokens& tokens, End& e, int* totals) {
  int lane = threadIdx.x & 31, warp = threadIdx.x / 32, before = 0, wanted = e.wanted;
  u32 end = e.key;
  for (int base = r.first; base < r.end && before < wanted; base += RANK_THREADS) {
    int key = base + threadIdx.x;
    bool equal = key < r.end && tokens.bits(w, key) == end;
    u32 found = __ballot_sync(ALL, equal);
    if (lane == 0) totals[warp] = __popc(found);
    __syncthreads();
    int mine = before + __popc(found & ((2u << lane) - 1u));
    for (int i = 0; i < RANK_WARPS; i++) {
      if (i < warp) mine += totals[i];
      before += totals[i];
    }
    if (equal && mine == wanted) e.cut = key + 1;
    __syncthreads();
  }
}
extern "C" __global__ void __launch_bounds__(RANK_THREADS) place(const __grid_constant__ Worth w) {
  wait_for_predecessor();
  __shared__ int counts[TIERS][MOST_DIGITS], totals[RANK_WARPS];
  __shared__ End ends[TIERS];
  int head = blockIdx.y, heads = w.asked.heads, warp = threadIdx.x / 32;
  i64 column = static_cast<i64>(blockIdx.x) * heads + head;
  const Ranked r = w.ranked[blockIdx.x];
  i64 start = static_cast<i64>(head) * w.asked.tokens + r.start;
  const Tokens tokens = {w.worth + start, w.norm + start, w.prior[column], r.length};
  if (threadIdx.x < TIERS) {
    float bound = ceilf(w.bounds[column * TIERS + threadIdx.x]);
    ends[threadIdx.x] = {0u, static_cast<int>(fminf(fmaxf(bound, 0.f), static_cast<float>(r.end - r.first))), 0, NO_CUT};
  }
  __syncthreads();
  bool none[TIERS];
#pragma unroll
  for (int t = 0; t < TIERS; t++) none[t] = ends[t].wanted == 0;
#pragma unroll
  for (int pass = 0; pass < 3; pass++) {
    const int bits = DIGIT_BITS[pass], shift = DIGIT_SHIFT[pass], digits = 1 << bits;
    for (int i = threadIdx.x; i < TIERS * digits; i += RANK_THREADS) counts[i / digits][i % digits] = 0;
    __syncthreads();
    u32 known[TIERS];
#pragma unroll
    for (int t = 0; t < TIERS; t++) known[t] = ends[t].key;
    for (int key = r.first + threadIdx.x; key < r.end; key += RANK_THREADS) {
      u32 x = tokens.bits(w, key);
#pragma unroll
      for (int t = 0; t < TIERS; t++)
        if (x >> (shift + bits) == known[t]) atomicAdd(&counts[t][x >> shift & (digits - 1)], 1);
    }
    __syncthreads();
    if (warp < TIERS) find_digit(counts[warp], digits, bits, ends[warp]);
    __syncthreads();
  }
#pragma unroll
  for (int t = 0; t < TIERS; t++)
    if (!none[t] && ends[t].wanted < ends[t].equal) find_cut(w, r, tokens, ends[t], totals);
  __syncthreads();
  float factor = w.factor[column], *score = w.score + head * w.score_head + r.start;
  signed char* tier = w.tier + start;
  u32 end[TIERS];
  int cut[TIERS];
#pragma unroll
  for (int t = 0; t < TIERS; t++) end[t] = ends[t].key, cut[t] = ends[t].cut;
  for (int key = threadIdx.x; key < r.length; key += RANK_THREADS) {
    score[key] = fminf(seed_of(tokens.worth[key]) * factor, 1.f);
    int own = -1;
    if (key >= r.first && key < r.end) {
      u32 bits = tokens.bits(w, key);
#pragma unroll
      for (int t = TIERS - 1; t >= 0; t--)
        if (!none[t] && (bits > end[t] || (bits == end[t] && key < cut[t]))) own = t;
    }
    tier[key] = static_cast<signed char>(own);
  }
}

// What a prompt may take in the layer (`Room` of `siftkv.policies.sift_shares`).
struct Room { float budget, pages, middle, growth, each, weight, whole, unknown; };
constexpr int COLUMNS = HEADS * TIERS;
static_assert(SCALES < RANK_THREADS && COLUMNS <= RANK_THREADS, "a thread for each size of a layer, for each tier of each head");

DEV float total_above(const float* above, int width, int level) {
  float sum = 0.f;
#pragma unroll
  for (int h = 0; h < HEADS; h++) sum += above[h * width + level];
  return sum;
}
DEV float between(float least, float most, float x) { return x < 0.5f ? least + x * (most - least) : most - (most - least) * (1.f - x); }
DEV float sum_of(const float (&x)[COLUMNS]) {
  float sum = 0.f;
  for (int i = 0; i < COLUMNS; i++) sum += x[i];
  return sum;
}
// `_opened` and `_pages` of `siftkv.policies.sift_shares`, in shared memory: what is wanted, in pages, becomes `grown` and `pages`.
struct Pages {
  float wanted[COLUMNS], grown[COLUMNS], pages[COLUMNS], more[COLUMNS], sums[RANK_WARPS];
  DEV void open(float total) {
    int own = threadIdx.x;
    bool mine = own < COLUMNS;
    float least = own % TIERS == TIERS - 1, scaled = mine ? wanted[own] * (total / fmaxf(sum_of(wanted), ALMOST)) : 0.f;
    __syncthreads();
    if (mine) wanted[own] = scaled;
    __syncthreads();
    bool fit = own <= SCALES;
    for (int turn = 0; turn < 2 && fit; turn++) {
      float later = turn == 0 ? 1.f : SOON, needed = 0.f;
      for (int i = 0; i < COLUMNS; i++) needed += fmaxf(ceilf(wanted[i] * (own * (1.f / SCALES) * later)), i % TIERS == TIERS - 1);
      fit = needed <= total * later;
    }
    int fits = static_cast<int>(fmaxf(sum_of_block<RANK_WARPS>(fit, sums) - 1.f, 0.f));
    float held = 0.f, part = 0.f;
    if (mine) {
      part = scaled * (fits * (1.f / SCALES));
      pages[own] = held = fmaxf(ceilf(part), least);
      more[own] = fmaxf(scaled - held, 0.f);
    }
    __syncthreads();
    float free = total - sum_of(pages), asked = mine ? more[own] * fminf(fmaxf(free / fmaxf(sum_of(more), ALMOST), 0.f), 1.f) : 0.f;
    float full = floorf(asked + ALMOST);
    __syncthreads();
    if (mine) more[own] = asked - full, pages[own] = full;
    __syncthreads();
    float left = free - sum_of(pages);
    int turn = 0;
    for (int i = 0; i < COLUMNS && mine; i++) turn += more[i] > more[own] || (more[i] == more[own] && i < own);
    __syncthreads();
    if (mine) {
      pages[own] = held + full + (turn < left);
      grown[own] = fits > 0 ? part : fminf(scaled, pages[own]);
    }
    __syncthreads();
  }
};
// `shares` of `siftkv.policies.sift_shares`: a block a prompt.
extern "C" __global__ void __launch_bounds__(RANK_THREADS) share_out(const __grid_constant__ Worth w) {
  let_successor_start();
  __shared__ Pages p;
  __shared__ float held[COLUMNS];
  wait_for_predecessor();
  const Sizes& s = w.sizes;
  const float* field = w.room + blockIdx.x;
  float room[8];
#pragma unroll
  for (int i = 0; i < 8; i++) room[i] = field[i * gridDim.x];
  const Room r = {room[0], room[1], room[2], room[3], room[4], room[5], room[6], room[7]};
  const float* above = w.above + static_cast<i64>(blockIdx.x) * HEADS * w.width;
  auto cost = [&](int level) {
    float sum = 0.f;
#pragma unroll
    for (int t = 0; t < TIERS; t++) sum += total_above(above, w.width, level + s.shift[t]) * s.step[t];
    return sum;
  };
  float ahead = r.whole * s.ahead, budget = r.budget - HEADS * s.step[TIERS - 1] * ahead, over = 0.f;
  for (int level = threadIdx.x; level < LEVELS; level += RANK_THREADS) over += cost(level) > budget;
  int fits = static_cast<int>(sum_of_block<RANK_WARPS>(over, p.sums)), high = min_int(fits, LEVELS - 1), low = max_int(fits - 1, 0);
  float least = cost(high), spread = fminf(fmaxf((budget - least) / fmaxf(cost(low) - least, ALMOST), 0.f), 1.f);
  int own = threadIdx.x, tier = own % TIERS;
  if (tier < TIERS - 1) ahead = 0.f;
  auto within = [&](int t) {
    const float* column = above + own / TIERS * w.width + s.shift[t];
    return floorf(between(column[high], column[low], spread));
  };
  float share = 0.f;
  if (own < COLUMNS) {
    held[own] = within(tier) - (tier > 0 ? within(tier - 1) : 0.f) + ahead;
    share = held[own] * r.growth;
    p.wanted[own] = held[own] / s.a_page[tier];
  }
  __syncthreads();
  if (r.whole > 0.f) {
    p.open(r.pages);
    if (own < COLUMNS) {
      float grown = fmaxf(p.grown[own] * s.a_page[tier], (p.pages[own] - 1.f) * s.a_page[tier] + 1.f);  // what a tier has opened it may fill
      share = fmaxf(grown - 0.5f, 0.f) * r.each;  // half a token less, lest rounding open a page
      held[own] = fmaxf(p.pages[own] * s.a_page[tier] - ahead, 0.f);
    }
    __syncthreads();
  }
  if (own >= COLUMNS) return;
  float bound = 0.f;
  for (int i = own - tier; i <= own; i++) bound += held[i];
  i64 at = static_cast<i64>(blockIdx.x) * COLUMNS + own;
  w.held[at] = fminf(bound, r.middle);
  w.share[at] = r.unknown > 0.f ? s.even[tier] * r.weight : share;
}
