// Releasing requests: one block counts and books places in the ring, then a warp a head slot returns its pages, in the order of the tables.
constexpr int COUNT_THREADS = 1024, RETURN_THREADS = 128;

struct Release {
  Cache cache;
  const i64* slots;
  i64* places;   // [B, L, H]: place in the ring of a head slot's first page, unreduced
  int* refused;  // [S], see `append.cu`
  int batch;
};
DEV int pages_held(const Cache& c, i64 head_slot) {
  int held = 0;
#define ADD_PAGES(T) held += ceil_div(c.lengths[head_slot * TIERS + T], Tier<T>::TOKENS);
  EACH_TIER(ADD_PAGES)
  return held;
}
DEV i64 released_head_slot(const Release& a, int index) {
  int each = a.cache.layers * a.cache.heads;
  return a.slots[index / each] * each + index % each;
}
extern "C" __global__ void __launch_bounds__(COUNT_THREADS) count_pages(const __grid_constant__ Release a) {
  __shared__ int sums[32];
  int all = a.batch * a.cache.layers * a.cache.heads, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  i64 place = a.cache.counters[1];
  for (int from = 0; from < all; from += COUNT_THREADS) {
    int i = from + threadIdx.x, own = i < all ? pages_held(a.cache, released_head_slot(a, i)) : 0, sum = own;
#pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      int other = __shfl_up_sync(ALL, sum, o);
      if (lane >= o) sum += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int before = 0, total = 0;
    for (int w = 0; w < 32; w++) {
      if (w < warp) before += sums[w];
      total += sums[w];
    }
    if (i < all) a.places[i] = place + before + sum - own;
    place += total;
  }
  __syncthreads();
  if (threadIdx.x == 0) a.cache.counters[1] = place;
}

template <class F> DEV void return_tier(const Cache& c, i64 head_slot, i64& place) {
  Entries pages = entries_of(c, head_slot, F::INDEX);
  int held = ceil_div(c.lengths[head_slot * TIERS + F::INDEX], F::TOKENS);
  for (int i = threadIdx.x & 31; i < held; i += 32) {
    // The right-hand tier's last page stands leftmost in its row.
    int order = F::INDEX % 2 == 0 ? i : held - 1 - i;
    c.free_ring[(place + order) % c.num_pages] = pages[i];
    pages[i] = -1;
  }
  place += held;
}
extern "C" __global__ void __launch_bounds__(RETURN_THREADS) return_pages(const __grid_constant__ Release a) {
  const Cache& c = a.cache;
  int each = c.layers * c.heads, index = blockIdx.x * (RETURN_THREADS / 32) + threadIdx.x / 32;
  if (index >= a.batch * each) return;
  i64 head_slot = released_head_slot(a, index), place = a.places[index];
#define RETURN_TIER(T) return_tier<Tier<T>>(c, head_slot, place);
  EACH_TIER(RETURN_TIER)
  __syncwarp();
  int lane = threadIdx.x & 31;
  if (lane < TIERS) c.lengths[head_slot * TIERS + lane] = 0;
  if (index % each != 0 || lane != 0) return;
  i64 slot = a.slots[index / each];
  c.seen[slot] = c.window_start[slot] = 0;
  a.refused[slot] = 0;
}
