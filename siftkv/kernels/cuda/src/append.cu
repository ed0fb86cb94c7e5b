// Placing a layer of a prompt: `list` writes down which tokens each tier of each head keeps, in order, and the last of its blocks takes the pages for all
// of them; `place` encodes a page a block, in shared memory where codes are channel-major, so that memory sees whole lines.
constexpr int LIST_THREADS = 1024, PLACE_THREADS = 256, WINDOW_THREADS = 256;
constexpr bool HAS_IMAGE = PAGE_BYTES + PLACE_THREADS / 32 * SHELF_BYTES <= 46 * 1024;

struct Append {
  Cache cache;
  const u16 *k, *v;
  const float* score;
  const i64* position;
  const signed char* tier;
  int *order;          // [H, T, n]: tokens of each tier
  int *counts;         // [H, T]: tokens listed, then (from the last block on) those that are placed
  int *starts;         // [H, T]: lengths before
  int *tickets;        // blocks that are done (zero between calls)
  int *refused;        // [S]: calls that found too few pages
  i64 k_token, k_head, v_token, v_head, score_head, score_token, position_token, tier_head, tier_token;
  int layer, slot, tokens;
};
DEV i64 append_head_slot(const Append& a, int head) { return (static_cast<i64>(a.slot) * a.cache.layers + a.layer) * a.cache.heads + head; }

DEV int tokens_a_page(int tier) {
#define TOKENS_OF(T) if (tier == T) return Tier<T>::TOKENS;
  EACH_TIER(TOKENS_OF)
  return 1;
}

DEV void list_head(const Append& a, int head) {
  __shared__ int sums[TIERS][32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, placed[TIERS] = {};
  for (int from = 0; from < a.tokens; from += LIST_THREADS) {
    int i = from + threadIdx.x, own = i < a.tokens ? a.tier[head * a.tier_head + i * a.tier_token] : -1, rank = 0;
    __syncthreads();
#pragma unroll
    for (int t = 0; t < TIERS; t++) {
      u32 same = __ballot_sync(ALL, own == t);
      if (own == t) rank = __popc(same & ((1u << lane) - 1u));
      if (lane == 0) sums[t][warp] = __popc(same);
    }
    __syncthreads();
    // Each warp sums what stands before it, a lane a warp.
#pragma unroll
    for (int t = 0; t < TIERS; t++) {
      int others = sums[t][lane], before = static_cast<int>(__reduce_add_sync(ALL, lane < warp ? others : 0));
      if (own == t) a.order[(static_cast<i64>(head) * TIERS + t) * a.tokens + placed[t] + before + rank] = i;
      placed[t] += static_cast<int>(__reduce_add_sync(ALL, others));
    }
  }
  if (threadIdx.x == 0)
    for (int t = 0; t < TIERS; t++) a.counts[head * TIERS + t] = placed[t];
}
// Pages in the order of the reference: tier by tier, in each the heads in order. All or nothing.
DEV void take_pages(const Append& a) {
  const Cache& c = a.cache;
  __shared__ i64 taken;
  __shared__ int refused;
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, pairs = TIERS * c.heads;
  auto fresh_pages = [&](int pair, int& held) {
    int tier = pair / c.heads, at = pair % c.heads * TIERS + tier, tokens = tokens_a_page(tier);
    int length = c.lengths[append_head_slot(a, pair % c.heads) * TIERS + tier];
    held = ceil_div(length, tokens);
    return ceil_div(length + a.counts[at], tokens) - held;
  };
  auto pages_before = [&](int pair) {
    int sum = 0, held;
    for (int p = lane; p < pair; p += 32) sum += fresh_pages(p, held);
    return static_cast<int>(__reduce_add_sync(ALL, sum));
  };
  if (warp == 0) {
    int all = pages_before(pairs);
    if (lane == 0) {
      taken = c.counters[0];
      refused = all > c.counters[1] - taken;
      if (refused) a.refused[a.slot]++;
      else c.counters[0] = taken + all;
    }
  }
  __syncthreads();
  for (int pair = warp; pair < pairs; pair += LIST_THREADS / 32) {
    int tier = pair / c.heads, head = pair % c.heads, held, fresh = fresh_pages(pair, held), before = pages_before(pair);
    Entries pages = entries_of(c, append_head_slot(a, head), tier);
    for (int i = lane; i < fresh && !refused; i += 32) pages[held + i] = c.free_ring[(taken + before + i) % c.num_pages];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < pairs; i += LIST_THREADS) {
    int* length = c.lengths + append_head_slot(a, i / TIERS) * TIERS + i % TIERS;
    a.starts[i] = *length;
    if (refused) a.counts[i] = 0;
    *length += a.counts[i];
  }
}
extern "C" __global__ void __launch_bounds__(LIST_THREADS) list(const __grid_constant__ Append a) {
  __shared__ int last;
  list_head(a, blockIdx.x);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(a.tickets, 1) == a.cache.heads - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) a.tickets[0] = 0;
  take_pages(a);
}

DEV Token load_token(const Append& a, int head, int token) {
  Token x;
  const u16 *k = a.k + token * a.k_token + head * a.k_head, *v = a.v + token * a.v_token + head * a.v_head;
  each_channel([&](int i, int c) { x.k[i] = model_to_float(k[c]), x.v[i] = model_to_float(v[c]); });
  x.score = a.score[head * a.score_head + token * a.score_token];
  x.position = static_cast<int>(a.position[token * a.position_token]);
  return x;
}
DEV void copy_page(u8* to, const u8* from) {
  for (int i = threadIdx.x; i < PAGE_BYTES / 16; i += PLACE_THREADS) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
}
template <class F> DEV void place_page(const Append& a, int head, int index, u8* image, u8* shelf) {
  constexpr bool staged = HAS_IMAGE && !F::DENSE;
  int at = head * TIERS + F::INDEX, start = a.starts[at], end = start + a.counts[at], base = index * F::TOKENS;
  u8 *page = page_at(a.cache, entries_of(a.cache, append_head_slot(a, head), F::INDEX)[index]), *to = staged ? image : page;
  int from = max_int(start - base, 0), stop = min_int(end - base, F::TOKENS);
  if (staged && from > 0) {
    copy_page(image, page);
    __syncthreads();
  }
  const int* order = a.order + static_cast<i64>(at) * a.tokens + base - start;
  for (int token = from + threadIdx.x / 32; token < stop; token += PLACE_THREADS / 32) {
    Token x = load_token(a, head, order[token]);
    if constexpr (!F::DENSE) condition(a.cache, x.k, a.layer, head, x.position);
    write_token<F>(to, token, x, shelf);
  }
  if constexpr (staged) {
    __syncthreads();
    copy_page(page, image);
  }
}
extern "C" __global__ void __launch_bounds__(PLACE_THREADS) place(const __grid_constant__ Append a) {
  __shared__ __align__(16) u8 image[HAS_IMAGE ? PAGE_BYTES : 16];
  __shared__ u8 shelves[PLACE_THREADS / 32][SHELF_BYTES];
  int head = blockIdx.y, index = blockIdx.x;
#define PLACE_TIER(T) \
  { \
    int start = a.starts[head * TIERS + T], count = a.counts[head * TIERS + T], first = start / Tier<T>::TOKENS; \
    int pages = count > 0 ? ceil_div(start + count, Tier<T>::TOKENS) - first : 0; \
    if (index >= 0 && index < pages) place_page<Tier<T>>(a, head, first + index, image, shelves[threadIdx.x / 32]); \
    index -= pages; \
  }
  EACH_TIER(PLACE_TIER)
}

extern "C" __global__ void __launch_bounds__(WINDOW_THREADS) window(const __grid_constant__ Append a) {
  int index = blockIdx.x * (WINDOW_THREADS / 32) + threadIdx.x / 32, lane = threadIdx.x & 31;
  int token = index / a.cache.heads, head = index % a.cache.heads;
  if (token >= a.tokens) return;
  i64 row = window_row(a.cache, append_head_slot(a, head), a.slot, a.position[token * a.position_token]);
  for (int c = lane; c < HEAD_DIM; c += 32) {
    a.cache.window_k[row * HEAD_DIM + c] = a.k[token * a.k_token + head * a.k_head + c];
    a.cache.window_v[row * HEAD_DIM + c] = a.v[token * a.v_token + head * a.v_head + c];
  }
  if (lane == 0) a.cache.window_score[row] = a.score[head * a.score_head + token * a.score_token];
}
