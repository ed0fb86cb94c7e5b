// Compaction of one request's tiers: what a selection keeps becomes contiguous in the target tier, in order of time. `schedule` lists the survivors of a
// head slot a block, and the last of its blocks books pages for all of them, all or nothing; `move` moves tokens and returns pages, a block a head slot.
//
// The target is the first source. A survivor never moves to a later place of its tier, so that what a round has not read yet is never overwritten.
constexpr int SCHEDULE_THREADS = 512, MOVE_THREADS = 512, MOVE_WARPS = MOVE_THREADS / 32, PER_WARP = 8;
constexpr int SOURCE_SHIFT = 28;  // an entry of `order`: number of the source, index in its tier
using Target = Tier<TARGET>;

struct Booking {
  i64 taken, returned;  // places in the ring, unreduced, of a head slot's new pages and of those that it returns
};
struct Rewrite {
  Cache cache;
  u8* page_skip;
  const u8* keep;        // [L, H, columns], candidates in order of (source, index)
  const int* tokens_at;  // [L, H, T]: lengths that `keep` speaks of; what came later stays
  int* order;            // [L, H, room]: survivors
  int* counts;           // [L, H]
  Booking* bookings;     // [L, H]
  i64* returned;         // the ring's counter afterwards
  int* tickets;          // [2], zero between calls; [2]: whether a list was too long
  u8* done;
  int slot, columns, room;
};

DEV i64 head_slot_of(const Rewrite& a, int index) { return static_cast<i64>(a.slot) * a.cache.layers * a.cache.heads + index; }
template <class F> DEV int pages_of(int tokens) { return ceil_div(tokens, F::TOKENS); }

// Sum over the threads of the block before this one; `total` is the sum of all.
DEV i64 sum_before(i64 x, i64& total) {
  __shared__ i64 warps[SCHEDULE_THREADS / 32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  i64 sum = x;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    i64 other = __shfl_up_sync(ALL, sum, o);
    if (lane >= o) sum += other;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  i64 before = 0;
  total = 0;
  for (int w = 0; w < SCHEDULE_THREADS / 32; w++) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  return before + sum - x;
}
template <class F> DEV void list_source(const Rewrite& a, int index, int number, int& column, int& listed) {
  i64 at = head_slot_of(a, index) * TIERS + F::INDEX;
  int length = a.cache.lengths[at], known = min_int(a.tokens_at[static_cast<i64>(index) * TIERS + F::INDEX], length);
  const u8* keep = a.keep + static_cast<i64>(index) * a.columns + column;
  int* order = a.order + static_cast<i64>(index) * a.room;
  for (int from = 0; from < length; from += 4 * SCHEDULE_THREADS) {
    int first = from + 4 * threadIdx.x;
    u32 own = 0;
    for (int i = 0; i < 4; i++) own |= first + i < length && (first + i >= known || column + first + i >= a.columns || keep[first + i]) ? 1u << i : 0u;
    i64 total, place = listed + sum_before(__popc(own), total);
    for (int i = 0; i < 4; i++)
      if (own >> i & 1u) {
        if (place < a.room) order[place] = number << SOURCE_SHIFT | (first + i);
        place++;
      }
    listed += static_cast<int>(total);
  }
  column += a.tokens_at[static_cast<i64>(index) * TIERS + F::INDEX];
}
struct Pages { int taken, returned, crowded; };
DEV Pages pages_moved(const Rewrite& a, int index) {
  i64 at = head_slot_of(a, index) * TIERS;
  int fresh = pages_of<Target>(a.counts[index]), held = pages_of<Target>(a.cache.lengths[at + TARGET]), row = fresh;
  Pages p = {max_int(0, fresh - held), max_int(0, held - fresh), 0};
#define COUNT_SOURCE(T) if (T != TARGET) p.returned += pages_of<Tier<T>>(a.cache.lengths[at + T]);
  EACH_SOURCE(COUNT_SOURCE)
#define COUNT_ROW(T) if (T != TARGET && T / 2 == TARGET / 2) row += pages_of<Tier<T>>(a.cache.lengths[at + T]);
  EACH_TIER(COUNT_ROW)
  p.crowded = row > a.cache.width;
  return p;
}
DEV void book_pages(const Rewrite& a) {
  const Cache& c = a.cache;
  int all = c.layers * c.heads;
  i64 taken = c.counters[0], returned = c.counters[1], takes = 0, returns = 0, crowded = 0, total;
  for (int from = 0; from < all; from += SCHEDULE_THREADS) {
    int i = from + threadIdx.x;
    Pages p = {0, 0, 0};
    if (i < all) p = pages_moved(a, i);
    i64 before = sum_before(p.taken, total);
    if (i < all) a.bookings[i].taken = taken + takes + before;
    takes += total;
    before = sum_before(p.returned, total);
    if (i < all) a.bookings[i].returned = returned + returns + before;
    returns += total;
    sum_before(p.crowded, total);
    crowded += total;
  }
  if (threadIdx.x != 0) return;
  bool fits = takes <= returned - taken && crowded == 0 && a.tickets[2] == 0;
  *a.done = fits;
  a.tickets[2] = 0;
  *a.returned = returned + returns;
  if (fits) c.counters[0] = taken + takes;
}
DEV bool is_last(int* ticket, int blocks) {
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(ticket, 1) == blocks - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}
extern "C" __global__ void __launch_bounds__(SCHEDULE_THREADS) schedule(const __grid_constant__ Rewrite a) {
  int column = 0, listed = 0, number = 0;
#define LIST_SOURCE(T) list_source<Tier<T>>(a, blockIdx.x, number++, column, listed);
  EACH_SOURCE(LIST_SOURCE)
  if (threadIdx.x == 0) {
    a.counts[blockIdx.x] = listed;
    if (listed > a.room) a.tickets[2] = 1;
  }
  if (is_last(a.tickets, gridDim.x)) book_pages(a);
}

// Places before the first that a survivor leaves or comes to.
DEV int standing(const int* order, int count) {
  int low = 0;
  while (low < count) {
    int middle = (low + count) / 2;
    if (order[middle] == middle) low = middle + 1;
    else count = middle;
  }
  return low;
}
// A round of survivors in registers, `PER_WARP` a warp: all are read before one is written.
template <class F> struct Round {
  static constexpr int PIECES = HEAD_DIM / 4, EACH = PER_WARP * PIECES / 32;  // 16 bytes each, keys then values
  uint4 data[EACH];
  u16 score, votes;
  int position;
  float weight;

  template <class Body> static DEV void each_piece(u8* page, int slot, int tokens, Body body) {
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      int q = (threadIdx.x & 31) + 32 * i, token = q / PIECES, part = q % PIECES;
      bool value = part >= PIECES / 2;
      u8* from = reinterpret_cast<u8*>(__shfl_sync(ALL, reinterpret_cast<u64>(page), token));
      int row = __shfl_sync(ALL, slot, token);
      if (token < tokens) body(i, reinterpret_cast<uint4*>(from + (value ? F::VALUE : F::KEY) + row * 2 * HEAD_DIM) + (value ? part - PIECES / 2 : part));
    }
  }
  DEV void read(u8* page, int slot, int tokens) {
    each_piece(page, slot, tokens, [&](int i, const uint4* at) { data[i] = *at; });
    if ((threadIdx.x & 31) >= tokens) return;
    if constexpr (F::SCORES) score = reinterpret_cast<const u16*>(page + F::SCORE)[slot];
    if constexpr (F::POSITIONS) position = reinterpret_cast<const int*>(page + F::POSITION)[slot];
    if constexpr (F::VOTES) votes = reinterpret_cast<const u16*>(page + F::VOTE)[slot];
    if constexpr (F::WEIGHTS) weight = reinterpret_cast<const float*>(page + F::WEIGHT)[slot];
  }
  DEV void write(u8* page, int slot, int tokens) {
    each_piece(page, slot, tokens, [&](int i, uint4* at) { *at = data[i]; });
    if ((threadIdx.x & 31) >= tokens) return;
    if constexpr (F::SCORES) reinterpret_cast<u16*>(page + F::SCORE)[slot] = score;
    if constexpr (F::POSITIONS) reinterpret_cast<int*>(page + F::POSITION)[slot] = position;
    if constexpr (F::VOTES) reinterpret_cast<u16*>(page + F::VOTE)[slot] = votes;
    if constexpr (F::WEIGHTS) reinterpret_cast<float*>(page + F::WEIGHT)[slot] = weight;
  }
};
template <class F> DEV void move_dense(const Rewrite& a, i64 head_slot, const int* order, int count) {
  Entries pages = entries_of(a.cache, head_slot, F::INDEX);
  int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  for (int base = standing(order, count); base < count; base += MOVE_WARPS * PER_WARP) {
    int first = base + warp * PER_WARP, tokens = max_int(0, min_int(PER_WARP, count - first));
    u8 *from = nullptr, *to = nullptr;
    int source = 0, target = first + lane;
    if (lane < tokens) {
      source = order[target];
      from = page_at(a.cache, pages[source / F::TOKENS]), to = page_at(a.cache, pages[target / F::TOKENS]);
    }
    Round<F> round;
    round.read(from, source % F::TOKENS, tokens);
    __syncthreads();
    round.write(to, target % F::TOKENS, tokens);
  }
}

template <class F, class S> DEV void place_survivor(const Rewrite& a, int index, u8* image, int slot, int source, u8* shelf) {
  i64 head_slot = head_slot_of(a, index);
  const u8* page = page_at(a.cache, entries_of(a.cache, head_slot, S::INDEX)[source / S::TOKENS]);
  if constexpr (F::INDEX == S::INDEX) {
    copy_token<F>(image, slot, page, source % F::TOKENS);
  } else {
    Token x = read_token<S>(page, source % S::TOKENS);
    if constexpr (S::DENSE) condition(a.cache, x.k, index / a.cache.heads, index % a.cache.heads, max_int(0, min_int(x.position, a.cache.positions - 1)));
    write_token<F>(image, slot, x, shelf);
  }
}
// A page at a time, put together in shared memory.
template <class F> DEV void move_quantised(const Rewrite& a, int index, const int* order, int count, u8* image, u8* shelf) {
  Entries pages = entries_of(a.cache, head_slot_of(a, index), F::INDEX);
  int held = pages_of<F>(a.cache.lengths[head_slot_of(a, index) * TIERS + F::INDEX]);
  for (int p = standing(order, count) / F::TOKENS; p * F::TOKENS < count; p++) {
    int stop = min_int(count - p * F::TOKENS, F::TOKENS);
    for (int i = threadIdx.x / 32; i < stop; i += MOVE_WARPS) {
      int entry = order[p * F::TOKENS + i], number = 0;
#define PLACE_SOURCE(T) if (entry >> SOURCE_SHIFT == number++) place_survivor<F, Tier<T>>(a, index, image, i, entry & ((1 << SOURCE_SHIFT) - 1), shelf);
      EACH_SOURCE(PLACE_SOURCE)
    }
    int page = p < held ? pages[p] : a.cache.free_ring[(a.bookings[index].taken + p - held) % a.cache.num_pages];
    __syncthreads();
    for (int i = threadIdx.x; i < PAGE_BYTES / 16; i += MOVE_THREADS)
      reinterpret_cast<uint4*>(page_at(a.cache, page))[i] = reinterpret_cast<const uint4*>(image)[i];
    if (p >= held && threadIdx.x == 0) pages[p] = page;
    __syncthreads();
  }
}
template <class F> DEV void return_source(const Rewrite& a, i64 head_slot, int left, i64& place) {
  const Cache& c = a.cache;
  Entries pages = entries_of(c, head_slot, F::INDEX);
  int held = pages_of<F>(c.lengths[head_slot * TIERS + F::INDEX]);
  for (int i = threadIdx.x; i < held; i += MOVE_THREADS) {
    if constexpr (SKIPS) a.page_skip[&pages[i] - c.table] = 0;
    if (i < left) continue;
    c.free_ring[(place + i - left) % c.num_pages] = pages[i];
    pages[i] = -1;
  }
  place += max_int(0, held - left);
}
extern "C" __global__ void __launch_bounds__(MOVE_THREADS) move(const __grid_constant__ Rewrite a) {
  __shared__ __align__(16) u8 image[Target::DENSE ? 16 : PAGE_BYTES];
  __shared__ u8 shelves[MOVE_WARPS][Target::DENSE ? 1 : SHELF_BYTES];
  if (!*a.done) return;
  int index = blockIdx.x, count = a.counts[index];
  i64 head_slot = head_slot_of(a, index), place = a.bookings[index].returned;
  const int* order = a.order + static_cast<i64>(index) * a.room;
  if constexpr (Target::DENSE) move_dense<Target>(a, head_slot, order, count);
  else move_quantised<Target>(a, index, order, count, image, shelves[threadIdx.x / 32]);
  __syncthreads();
#define RETURN_SOURCE(T) return_source<Tier<T>>(a, head_slot, T == TARGET ? pages_of<Target>(count) : 0, place);
  EACH_SOURCE(RETURN_SOURCE)
  __syncthreads();
#define SET_LENGTH(T) if (threadIdx.x == 0) a.cache.lengths[head_slot * TIERS + T] = T == TARGET ? count : 0;
  EACH_SOURCE(SET_LENGTH)
  if (is_last(a.tickets + 1, gridDim.x) && threadIdx.x == 0) a.cache.counters[1] = *a.returned;
}
