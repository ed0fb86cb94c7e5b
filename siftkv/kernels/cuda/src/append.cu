// Placing a layer of a batch of prompts. `list` writes down which tokens each tier of each head keeps, a block for a head and a piece of a prompt, and the
// last of these blocks takes the pages for all; its other blocks look at every key and value once, for the window and for NaN. `place` encodes a page
// a block, in shared memory where codes are channel-major, so that memory sees whole lines.
constexpr int LIST_THREADS = 512, PLACE_THREADS = 256, LISTED = LIST_THREADS, LOOKED_AT = 32, PIECE = HEAD_DIM % 8 == 0 ? 8 : 1;
#define LARGER_OF(T) most = Tier<T>::TOKENS > most ? Tier<T>::TOKENS : most;
constexpr int most_tokens_a_page() {
  int most = 0;
  EACH_TIER(LARGER_OF)
  return most;
}
constexpr int MOST_TOKENS = most_tokens_a_page();
constexpr bool HAS_IMAGE = PAGE_BYTES + 4 * MOST_TOKENS + PLACE_THREADS / 32 * SHELF_BYTES <= 46 * 1024;
constexpr u32 EXPONENT = MODEL_BF16 ? 0x7F807F80u : 0x7C007C00u;

// One prompt: its rows, the tokens `[first, end)` of it that leave the window, and its pieces of `LISTED` of these.
struct __align__(16) Stored { int slot, start, length, first, end, first_piece, pieces, unused; };
// What a tier of a head takes of a prompt: its length before, tokens, and pages of the prompt that come before its own.
struct __align__(16) Share { int start, count, pages_before, fresh; };

struct Append {
  Cache cache;
  const u16 *k, *v;
  const float* score;
  const i64* position;  // of each token, or null: its index in the prompt
  const signed char* tier;
  const Stored* prompts;
  const int2 *list_work, *look_work, *place_work;  // (prompt, index in it): pieces, `LOOKED_AT` tokens, pages
  u16* order;   // [pieces, H, T, LISTED]: tokens of each tier in a piece
  int* counts;  // [pieces, H, T]: how many, then (from the last block on) how many come before
  Share* shares;  // [B, H, T]
  i64* bases;     // [B]: place in the ring of the prompt's first page, or -1: refused
  int* tickets;   // blocks that are done (zero between calls)
  int* refused;   // [S]: prompts that found too few pages
  u8* not_finite;  // [S], or null
  i64 k_token, k_head, v_token, v_head, score_head, score_token, position_token, tier_head, tier_token;
  int layer, batch, pieces;
};
DEV i64 append_head_slot(const Append& a, int slot, int head) { return (static_cast<i64>(slot) * a.cache.layers + a.layer) * a.cache.heads + head; }

DEV int tokens_a_page(int tier) {
#define TOKENS_OF(T) if (tier == T) return Tier<T>::TOKENS;
  EACH_TIER(TOKENS_OF)
  return 1;
}

DEV void list_piece(const Append& a, int2 work, int head) {
  __shared__ int sums[TIERS][LIST_THREADS / 32];
  const Stored& p = a.prompts[work.x];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = p.first + work.y * LISTED + threadIdx.x;
  int own = token < p.end ? a.tier[head * a.tier_head + (p.start + token) * a.tier_token] : -1, rank = 0;
  i64 at = (static_cast<i64>(p.first_piece + work.y) * a.cache.heads + head) * TIERS;
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
    int others = lane < LIST_THREADS / 32 ? sums[t][lane] : 0, before = static_cast<int>(__reduce_add_sync(ALL, lane < warp ? others : 0));
    if (own == t) a.order[(at + t) * LISTED + before + rank] = static_cast<u16>(threadIdx.x);
    if (warp == t) {
      int all = static_cast<int>(__reduce_add_sync(ALL, others));
      if (lane == 0) a.counts[at + t] = all;
    }
  }
}
// A thread a column of counts: what comes before each piece, and what the tier takes.
DEV void add_up(const Append& a, int column) {
  constexpr int AT_ONCE = 8;
  int each = a.cache.heads * TIERS, prompt = column / each, inside = column % each, tier = inside % TIERS, sum = 0;
  const Stored& p = a.prompts[prompt];
  int* counts = a.counts + static_cast<i64>(p.first_piece) * each + inside;
  for (int from = 0; from < p.pieces; from += AT_ONCE) {
    int x[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) x[i] = from + i < p.pieces ? counts[(from + i) * each] : 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      if (from + i < p.pieces) counts[(from + i) * each] = sum;
      sum += x[i];
    }
  }
  int start = a.cache.lengths[append_head_slot(a, p.slot, inside / TIERS) * TIERS + tier], tokens = tokens_a_page(tier);
  a.shares[column] = {start, sum, 0, ceil_div(start + sum, tokens) - ceil_div(start, tokens)};
}
// A warp a prompt: the pages it takes, in the order of the reference: tier by tier, in each the heads in order.
DEV void order_pages(const Append& a, int prompt) {
  int lane = threadIdx.x & 31, pairs = TIERS * a.cache.heads, before = 0;
  for (int from = 0; from < pairs; from += 32) {
    int pair = from + lane, at = prompt * pairs + pair % a.cache.heads * TIERS + pair / a.cache.heads;
    int own = pair < pairs ? a.shares[at].fresh : 0, sum = own;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      int other = __shfl_up_sync(ALL, sum, o);
      if (lane >= o) sum += other;
    }
    if (pair < pairs) a.shares[at].pages_before = before + sum - own;
    before += __shfl_sync(ALL, sum, 31);
  }
  if (lane == 0) a.bases[prompt] = before;
}
// One warp: prompts take pages in order, each all that it needs or none; one that is refused leaves them to those behind it.
DEV void grant_pages(const Append& a) {
  i64 taken = a.cache.counters[0], end = a.cache.counters[1];
  int lane = threadIdx.x & 31;
  for (int from = 0; from < a.batch; from += 32) {
    int prompt = from + lane, need = prompt < a.batch ? static_cast<int>(a.bases[prompt]) : 0;
    i64 base = -1;
    for (int i = 0; i < 32; i++) {
      int next = __shfl_sync(ALL, need, i);
      bool fits = next <= end - taken;
      if (lane == i && fits) base = taken;
      if (fits) taken += next;
    }
    if (prompt >= a.batch) continue;
    a.bases[prompt] = base;
    if (base < 0) a.refused[a.prompts[prompt].slot]++;
  }
  if (lane == 0) a.cache.counters[0] = taken;
}
DEV void take_pages(const Append& a) {
  int warp = threadIdx.x >> 5, each = a.cache.heads * TIERS, columns = a.batch * each;
  for (int i = threadIdx.x; i < columns; i += LIST_THREADS) add_up(a, i);
  __syncthreads();
  for (int i = warp; i < a.batch; i += LIST_THREADS / 32) order_pages(a, i);
  __syncthreads();
  if (warp == 0) grant_pages(a);
  __syncthreads();
  for (int i = threadIdx.x; i < columns; i += LIST_THREADS) {
    int prompt = i / each, inside = i % each;
    if (a.bases[prompt] < 0) a.shares[i].count = 0;
    else a.cache.lengths[append_head_slot(a, a.prompts[prompt].slot, 0) * TIERS + inside] = a.shares[i].start + a.shares[i].count;
  }
}

DEV i64 position_of(const Append& a, const Stored& p, int token) { return a.position == nullptr ? token : a.position[(p.start + token) * a.position_token]; }

struct Piece { u32 x[(PIECE + 1) / 2]; };
DEV Piece load_piece(const u16* from) {
  Piece y;
  if constexpr (PIECE == 1) y.x[0] = *from;
  else *reinterpret_cast<uint4*>(y.x) = *reinterpret_cast<const uint4*>(from);
  return y;
}
DEV void store_piece(u16* to, const Piece& y) {
  if constexpr (PIECE == 1) *to = static_cast<u16>(y.x[0]);
  else *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(y.x);
}
// The greatest exponents of the two halves of words.
DEV u32 exponents_of(const Piece& y, u32 most) {
#pragma unroll
  for (int i = 0; i < (PIECE + 1) / 2; i++) most = __vmaxu2(most, y.x[i] & EXPONENT);
  return most;
}
DEV void look_at(const Append& a, int2 work) {
  constexpr int row = HEAD_DIM / PIECE;
  const Stored p = a.prompts[work.x];
  const Cache& c = a.cache;
  int from = work.y * LOOKED_AT, each = c.heads * row, all = min_int(LOOKED_AT, p.length - from) * each;
  u32 most = 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < all; i += LIST_THREADS) {
    int token = from + i / each, head = i % each / row, channel = i % row * PIECE;
    Piece k = load_piece(a.k + (p.start + token) * a.k_token + head * a.k_head + channel);
    Piece v = load_piece(a.v + (p.start + token) * a.v_token + head * a.v_head + channel);
    most = exponents_of(v, exponents_of(k, most));
    if (token >= p.first && token < p.end) continue;
    i64 at = window_row(c, append_head_slot(a, p.slot, head), p.slot, position_of(a, p, token));
    store_piece(c.window_k + at * HEAD_DIM + channel, k);
    store_piece(c.window_v + at * HEAD_DIM + channel, v);
    if (channel == 0) c.window_score[at] = a.score[head * a.score_head + (p.start + token) * a.score_token];
  }
  bool finite = (most & 0xFFFFu) < (EXPONENT & 0xFFFFu) && most >> 16 < EXPONENT >> 16;
  if (!finite && a.not_finite != nullptr) a.not_finite[p.slot] = 1;
}
extern "C" __global__ void __launch_bounds__(LIST_THREADS, 3) list(const __grid_constant__ Append a) {
  __shared__ int last;
  let_successor_start();
  int listing = a.pieces * a.cache.heads, block = blockIdx.x;
  if (block >= listing) {
    look_at(a, a.look_work[block - listing]);
    return;
  }
  list_piece(a, a.list_work[block / a.cache.heads], block % a.cache.heads);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(a.tickets, 1) == listing - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) a.tickets[0] = 0;
  take_pages(a);
}

DEV Token load_token(const Append& a, const Stored& p, int head, int token) {
  Token x;
  i64 at = p.start + token;
  const u16 *k = a.k + at * a.k_token + head * a.k_head, *v = a.v + at * a.v_token + head * a.v_head;
  each_channel([&](int i, int c) { x.k[i] = model_to_float(k[c]), x.v[i] = model_to_float(v[c]); });
  x.score = a.score[head * a.score_head + at * a.score_token];
  x.position = static_cast<int>(position_of(a, p, token));
  return x;
}
// The token of a prompt that is the `rank`-th of a tier.
DEV int listed_token(const Append& a, const Stored& p, int head, int tier, int rank) {
  int each = a.cache.heads * TIERS, inside = head * TIERS + tier, low = 0, high = p.pieces - 1;
  const int* before = a.counts + static_cast<i64>(p.first_piece) * each + inside;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (before[middle * each] <= rank) low = middle;
    else high = middle - 1;
  }
  const u16* order = a.order + (static_cast<i64>(p.first_piece + low) * each + inside) * LISTED;
  return p.first + low * LISTED + order[rank - before[low * each]];
}
// The page at `index` of a tier, which is new unless the tier filled a part of it before.
DEV int claimed_page(const Append& a, const Share& share, i64 base, Entries pages, int index, int tokens) {
  int fresh = index - ceil_div(share.start, tokens);
  if (fresh < 0) return pages[index];
  int page = a.cache.free_ring[static_cast<u64>(base + share.pages_before + fresh) % static_cast<u64>(a.cache.num_pages)];
  if (threadIdx.x == 0) pages[index] = page;
  return page;
}
DEV void copy_page(u8* to, const u8* from) {
  for (int i = threadIdx.x; i < PAGE_BYTES / 16; i += PLACE_THREADS) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
}
template <class F> DEV void place_page(const Append& a, int prompt, int head, const Share& share, int index, int* tokens, u8* image, u8* shelf) {
  constexpr bool staged = HAS_IMAGE && !F::DENSE;
  const Stored& p = a.prompts[prompt];
  int base = index * F::TOKENS, from = max_int(share.start - base, 0), stop = min_int(share.start + share.count - base, F::TOKENS);
  Entries pages = entries_of(a.cache, append_head_slot(a, p.slot, head), F::INDEX);
  u8 *page = page_at(a.cache, claimed_page(a, share, a.bases[prompt], pages, index, F::TOKENS)), *to = staged ? image : page;
  for (int i = from + threadIdx.x; i < stop; i += PLACE_THREADS) tokens[i] = listed_token(a, p, head, F::INDEX, base + i - share.start);
  if (staged && from > 0) copy_page(image, page);
  __syncthreads();
  for (int i = from + threadIdx.x / 32; i < stop; i += PLACE_THREADS / 32) {
    Token x = load_token(a, p, head, tokens[i]);
    if constexpr (!F::DENSE) condition(a.cache, x.k, a.layer, head, x.position);
    write_token<F>(to, i, x, shelf);
  }
  if constexpr (staged) {
    __syncthreads();
    copy_page(page, image);
  }
}
extern "C" __global__ void __launch_bounds__(PLACE_THREADS) place(const __grid_constant__ Append a) {
  __shared__ __align__(16) u8 image[HAS_IMAGE ? PAGE_BYTES : 16];
  __shared__ int tokens[MOST_TOKENS];
  __shared__ u8 shelves[PLACE_THREADS / 32][SHELF_BYTES];
  wait_for_predecessor();
  int2 work = a.place_work[blockIdx.x];
  int head = blockIdx.y, index = work.y;
  const Share* shares = a.shares + (work.x * a.cache.heads + head) * TIERS;
#define PLACE_TIER(T) \
  { \
    Share share = shares[T]; \
    int first = share.start / Tier<T>::TOKENS, pages = share.count > 0 ? ceil_div(share.start + share.count, Tier<T>::TOKENS) - first : 0; \
    if (index >= 0 && index < pages) place_page<Tier<T>>(a, work.x, head, share, first + index, tokens, image, shelves[threadIdx.x / 32]); \
    index -= pages; \
  }
  EACH_TIER(PLACE_TIER)
}
