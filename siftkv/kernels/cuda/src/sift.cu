// The policy step (`siftkv.kernels.reference.sift`): `plan` decides from scores, a warp a head slot; `coordinate`, one block, lays the requests' needs
// end to end; `commit` moves the tokens, a warp a head slot. Head slots without an action cost `commit` one load. Each
// starts early and waits for the one before.
constexpr int SIFT_THREADS = 128, SIFT_WARPS = SIFT_THREADS / 32, COORDINATE_THREADS = 256;
constexpr u32 NOTHING = 0, APPEND = 1, OVERWRITE = 2, REMOVE = 3;

// A head slot's plan in 16 bits: two of action a tier, then a bit a tier that takes a page, then one that returns a page.
constexpr u32 ACTIONS = 0xFF, TAKES = 0xF00, RETURNS = 0xF000;
DEV u32 action_of(u32 plan, int tier) { return plan >> (2 * tier) & 3u; }
DEV u32 takes_bit(int tier) { return 0x100u << tier; }
DEV u32 returns_bit(int tier) { return 0x1000u << tier; }

struct Request {
  i64 start;  // position of the token that leaves the window
  int served, takes, returns[TIERS];  // pages of the requests before
};

struct Sift {
  Cache cache;
  const i64* slots;
  u8* done;
  u16* plans;        // [B, L, H]
  int* victims;      // [B, L, H, T]
  int* needs;        // [B, 2 + T]: pages to take, to return a tier, held; zero between steps
  Request* requests;
  i64* bases;        // places in the ring, unreduced: of pages taken, then of pages returned a tier
  u8* not_finite;    // [S]
  i64* peak_pages;   // [S]
  int batch, examine, last, padding;  // last: of the turns of a step; padding: the slot of empty rows
};
constexpr int NEEDS = 2 + TIERS, HELD = 1 + TIERS;
DEV i64 seen_after(const Sift& a, i64 slot) { return a.cache.seen[slot] + (a.examine || slot == a.padding ? 0 : 1); }

struct HeadSlot {
  int index, request, slot, layer, head;  // index: in the batch
  i64 at;                                 // in the cache
};
DEV bool find_head_slot(const Sift& a, HeadSlot& h) {
  int each = a.cache.layers * a.cache.heads;
  h.index = blockIdx.x * SIFT_WARPS + threadIdx.x / 32;
  h.request = h.index / each;
  if (h.request >= a.batch) return false;
  int inside = h.index - h.request * each;
  h.slot = static_cast<int>(a.slots[h.request]);
  h.layer = inside / a.cache.heads, h.head = inside % a.cache.heads;
  h.at = static_cast<i64>(h.slot) * each + inside;
  return true;
}

// Lowest stored score of a tier, and its slot in tier (the first of equals). Bit patterns of positive fp16 numbers order like integers.
struct Weakest { u32 bits; int victim; };
DEV u32 lowest_of(uint4 x, int valid) {
  u32 words[4] = {x.x, x.y, x.z, x.w}, low = ALL;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 unused = (2 * i < valid ? 0u : 0xFFFFu) | (2 * i + 1 < valid ? 0u : 0xFFFF0000u);
    low = __vminu2(low, words[i] | unused);
  }
  return min(low & 0xFFFFu, low >> 16);
}
template <class F> DEV Weakest weakest(const Cache& c, i64 at, int length) {
  constexpr int chunks = (F::TOKENS + 7) / 8;
  Entries pages = entries_of(c, at, F::INDEX);
  int total = length / F::TOKENS * chunks + ceil_div(length % F::TOKENS, 8);
  auto load = [&](int chunk) { return reinterpret_cast<const uint4*>(page_at(c, pages[chunk / chunks]) + F::SCORE)[chunk % chunks]; };
  auto valid = [&](int chunk) { return min_int(F::TOKENS - chunk % chunks * 8, length - chunk / chunks * F::TOKENS - chunk % chunks * 8); };
  u32 low = 0xFFFFu, found = ALL;
#pragma unroll 4
  for (int chunk = threadIdx.x & 31; chunk < total; chunk += 32) {
    u32 here = lowest_of(load(chunk), valid(chunk));
    if (here < low) low = here, found = chunk;
  }
  u32 bits = __reduce_min_sync(ALL, low);
  int chunk = static_cast<int>(__reduce_min_sync(ALL, low == bits ? found : ALL));
  const u16* scores = reinterpret_cast<const u16*>(page_at(c, pages[chunk / chunks]) + F::SCORE) + chunk % chunks * 8;
  int lane = threadIdx.x & 31;
  u32 equal = __ballot_sync(ALL, lane < min_int(8, valid(chunk)) && scores[lane & 7] == bits);
  return {bits, chunk / chunks * F::TOKENS + chunk % chunks * 8 + __ffs(equal) - 1};
}

// What goes down the tiers: the newcomer, or what it displaced.
struct Carried {
  bool active;
  float score;
  u32 plan;
};
// Tokens that a head's tier may hold after `seen` tokens: a share fills its last page.
template <class F> DEV int cap_of(const Cache& c, i64 at, float seen) {
  int cap = c.cap[at];
  float share = ceilf(__fmul_rn(c.cap_share[at], seen));
  return share < static_cast<float>(cap) ? min_int(ceil_div(static_cast<int>(fmaxf(share, 0.f)), F::TOKENS) * F::TOKENS, cap) : cap;
}
template <class F> DEV void plan_tier(const Sift& a, const HeadSlot& h, Carried& x, float seen) {
  const Cache& c = a.cache;
  i64 at = h.at * TIERS + F::INDEX;
  int length = c.lengths[at], cap = cap_of<F>(c, at, seen);
  float threshold = __fdiv_rn(c.alpha[at], seen);
  bool accept = x.active && cap > 0 && x.score >= threshold;
  if (!accept && (x.active || !a.examine || length == 0)) return;
  bool full = length >= cap;
  Weakest w = {0, 0};
  float lowest = INF;
  // Scores are not negative, so nothing falls short of a threshold of zero.
  if constexpr (F::SCORES)
    if (length > 0 && (threshold > 0.f || full)) w = weakest<F>(c, h.at, length), lowest = score_value(w.bits);
  bool leaves = lowest < threshold;
  u32 action = NOTHING;
  if (x.active) {
    if (full && x.score < lowest) return;
    action = leaves || (full && lowest <= x.score) ? OVERWRITE : APPEND;
  } else if (leaves) action = REMOVE;
  if (action == NOTHING) return;
  x.plan |= action << (2 * F::INDEX);
  if (action == APPEND && length % F::TOKENS == 0) x.plan |= takes_bit(F::INDEX);
  if (action == REMOVE && (length - 1) % F::TOKENS == 0) x.plan |= returns_bit(F::INDEX);
  x.active = action != APPEND;
  if (x.active) x.score = lowest;
  if ((threadIdx.x & 31) == 0) a.victims[static_cast<i64>(h.index) * TIERS + F::INDEX] = w.victim;
}
DEV void add_needs(const Sift& a, const HeadSlot& h, u32 plan) {
  int* needs = a.needs + h.request * NEEDS;
  if (a.last) {
    int held = 0;
#define ADD_HELD(T) held += ceil_div(a.cache.lengths[h.at * TIERS + T], Tier<T>::TOKENS);
    EACH_TIER(ADD_HELD)
    if (held) atomicAdd(needs + HELD, held);
  }
  if (plan & TAKES) atomicAdd(needs, __popc(plan & TAKES));
  if (plan & RETURNS)
    for (int t = 0; t < TIERS; t++)
      if (plan & returns_bit(t)) atomicAdd(needs + 1 + t, 1);
}
// Whether the newest token's key or value holds NaN or infinity: an exponent of all ones.
DEV bool newest_not_finite(const Sift& a, const HeadSlot& h) {
  const Cache& c = a.cache;
  constexpr u32 exponent = MODEL_BF16 ? 0x7F80u : 0x7C00u;
  i64 row = window_row(c, h.at, h.slot, c.seen[h.slot]) * HEAD_DIM;
  bool bad = false;
  for (int i = 2 * (threadIdx.x & 31); i < HEAD_DIM; i += 64) {
    u32 words[2] = {*reinterpret_cast<const u32*>(c.window_k + row + i), *reinterpret_cast<const u32*>(c.window_v + row + i)};
    for (u32 w : words) bad |= (w & exponent) == exponent || (w >> 16 & exponent) == exponent;
  }
  return __ballot_sync(ALL, bad) != 0;
}
extern "C" __global__ void __launch_bounds__(SIFT_THREADS) plan(const __grid_constant__ Sift a) {
  wait_for_predecessor();
  let_successor_start();
  HeadSlot h;
  if (!find_head_slot(a, h)) return;
  const Cache& c = a.cache;
  i64 start = c.window_start[h.slot], seen = seen_after(a, h.slot);
  if (!a.examine && newest_not_finite(a, h)) a.not_finite[h.slot] = 1;
  Carried x = {!a.examine && seen - start > c.window[h.slot], 0.f, 0};
  if (x.active || (a.examine && a.done[h.request] && c.catch_up[h.slot] >= a.examine)) {
    x.score = c.window_score[window_row(c, h.at, h.slot, start)];
    float tokens = __ll2float_rn(seen);
#define PLAN_TIER(T) plan_tier<Tier<T>>(a, h, x, tokens);
    EACH_TIER(PLAN_TIER)
  }
  if ((threadIdx.x & 31) != 0) return;
  a.plans[h.index] = static_cast<u16>(x.plan);
  add_needs(a, h, x.plan);
}

// Sum over the threads of the block up to and with this one; `total` is the sum of all.
DEV int block_sum(int x, int& total) {
  __shared__ int warps[COORDINATE_THREADS / 32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    int other = __shfl_up_sync(ALL, x, o);
    if (lane >= o) x += other;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = x;
  __syncthreads();
  total = 0;
  for (int i = 0; i < COORDINATE_THREADS / 32; i++) {
    if (i == warp) x += total;
    total += warps[i];
  }
  return x;
}
extern "C" __global__ void __launch_bounds__(COORDINATE_THREADS) coordinate(const __grid_constant__ Sift a) {
  wait_for_predecessor();
  let_successor_start();
  const Cache& c = a.cache;
  i64 taken = c.counters[0], returned = c.counters[1];
  int asked = 0, takes = 0, returns[TIERS] = {};
  for (int from = 0; from < a.batch; from += COORDINATE_THREADS) {
    int b = from + threadIdx.x, total;
    bool inside = b < a.batch;
    int* needs = a.needs + b * NEEDS;
    int own = inside ? needs[0] : 0;
    bool served = asked + block_sum(own, total) <= returned - taken;
    asked += total;
    int granted = inside && served ? own : 0;
    int before = takes + block_sum(granted, total) - granted;
    takes += total;
    if (inside) a.requests[b].served = served, a.requests[b].takes = before, needs[0] = 0;
    for (int t = 0; t < TIERS; t++) {
      int back = inside && served ? needs[1 + t] : 0;
      before = returns[t] + block_sum(back, total) - back;
      returns[t] += total;
      if (inside) a.requests[b].returns[t] = before, needs[1 + t] = 0;
      granted -= back;
    }
    if (!inside) continue;
    i64 slot = a.slots[b], start = c.window_start[slot], seen = seen_after(a, slot);
    a.requests[b].start = start;
    if (a.last) {
      i64 held = needs[HELD] + granted;
      if (held > a.peak_pages[slot]) a.peak_pages[slot] = held;
      needs[HELD] = 0;
    }
    if (a.examine) continue;
    a.done[b] = served;
    if (slot == a.padding) continue;
    c.seen[slot] = seen;
    if (served && seen - start > c.window[slot]) c.window_start[slot] = start + 1;
  }
  if (threadIdx.x != 0) return;
  a.bases[0] = taken;
  for (int t = 0; t < TIERS; t++) {
    a.bases[1 + t] = returned;
    returned += returns[t];
  }
  c.counters[0] = taken + takes, c.counters[1] = returned;
}

// How many bits of `mask` the plans of the request's earlier head slots have.
DEV int bits_before(const Sift& a, const HeadSlot& h, u32 mask) {
  int first = h.request * a.cache.layers * a.cache.heads, count = 0;
  for (int i = first + (threadIdx.x & 31); i < h.index; i += 32) count += __popc(a.plans[i] & mask);
  return static_cast<int>(__reduce_add_sync(ALL, count));
}
DEV int page_to_take(const Sift& a, const HeadSlot& h, u32 plan, int tier) {
  int own = __popc(plan & TAKES & (takes_bit(tier) - 1));
  i64 at = a.bases[0] + a.requests[h.request].takes + bits_before(a, h, TAKES) + own;
  return a.cache.free_ring[at % a.cache.num_pages];
}
DEV void give_page_back(const Sift& a, const HeadSlot& h, int tier, int page) {
  i64 at = a.bases[1 + tier] + a.requests[h.request].returns[tier] + bits_before(a, h, returns_bit(tier));
  if ((threadIdx.x & 31) == 0) a.cache.free_ring[at % a.cache.num_pages] = page;
}

// Fill the hole with the tier's last token; a page that this empties goes back.
template <class F> DEV void fill_hole(const Sift& a, const HeadSlot& h, u32 plan, Entries pages, int hole, int last) {
  int source = pages[last / F::TOKENS];
  copy_token<F>(page_at(a.cache, pages[hole / F::TOKENS]), hole % F::TOKENS, page_at(a.cache, source), last % F::TOKENS);
  if (!(plan & returns_bit(F::INDEX))) return;
  give_page_back(a, h, F::INDEX, source);
  __syncwarp();
  if ((threadIdx.x & 31) == 0) pages[last / F::TOKENS] = -1;
}
template <class F> DEV void commit_tier(const Sift& a, const HeadSlot& h, u32 plan, Token& x, u8* shelf) {
  u32 action = action_of(plan, F::INDEX);
  if (action == NOTHING) return;
  int* length_at = a.cache.lengths + h.at * TIERS + F::INDEX;
  int length = *length_at, lane = threadIdx.x & 31;
  int place = action == APPEND ? length : a.victims[static_cast<i64>(h.index) * TIERS + F::INDEX];
  Entries pages = entries_of(a.cache, h.at, F::INDEX);
  bool fresh = plan & takes_bit(F::INDEX);
  int id = fresh ? page_to_take(a, h, plan, F::INDEX) : pages[place / F::TOKENS];
  u8* page = page_at(a.cache, id);
  Token out;
  if (action != APPEND) out = read_token<F>(page, place % F::TOKENS);
  __syncwarp();
  if (action == REMOVE) fill_hole<F>(a, h, plan, pages, place, length - 1);
  else write_token<F>(page, place % F::TOKENS, x, shelf);
  if (lane == 0) {
    if (fresh) pages[place / F::TOKENS] = id;
    if (action == APPEND) *length_at = length + 1;
    if (action == REMOVE) *length_at = length - 1;
  }
  if (action != APPEND) x = out;
}
extern "C" __global__ void __launch_bounds__(SIFT_THREADS) commit(const __grid_constant__ Sift a) {
  wait_for_predecessor();
  let_successor_start();
  __shared__ u8 shelves[SIFT_WARPS][SHELF_BYTES];
  HeadSlot h;
  if (!find_head_slot(a, h)) return;
  const Cache& c = a.cache;
  u32 plan = a.plans[h.index];
  if (!(plan & ACTIONS) || !a.requests[h.request].served) return;
  i64 start = a.requests[h.request].start, row = window_row(c, h.at, h.slot, start);
  Token x;
  each_channel([&](int i, int channel) {
    x.k[i] = model_to_float(c.window_k[row * HEAD_DIM + channel]);
    x.v[i] = model_to_float(c.window_v[row * HEAD_DIM + channel]);
  });
  x.score = c.window_score[row], x.position = static_cast<int>(start);
#define COMMIT_TIER(T) \
  if (T == FIRST_QUANTISED && plan >> (2 * T) & ACTIONS >> (2 * T)) condition(c, x.k, h.layer, h.head, max_int(0, min_int(x.position, c.positions - 1))); \
  commit_tier<Tier<T>>(a, h, plan, x, shelves[threadIdx.x / 32]);
  EACH_TIER(COMMIT_TIER)
}
