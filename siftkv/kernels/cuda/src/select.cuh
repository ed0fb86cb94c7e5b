// What `select.cu` reads: the tokens of one head slot in order of time (sinks, sources, ring).
//
// TEAMS of warps share a block. A team holds 128 rows (query x query head), HELD tiles of 16 a warp, and takes every TEAMS-th tile of KEYS keys.
constexpr int ROWS = 128, TEAM_WARPS = ROWS / (16 * HELD), TEAM_THREADS = 32 * TEAM_WARPS, READERS = TEAMS * TEAM_THREADS;
constexpr int SELECT_THREADS = READERS + (PAGED ? 0 : 128);  // that go through the block's common parts; beside them PAGED has a warp that copies
constexpr int STEPS = HEAD_DIM / 16;
constexpr int HALO = REACH > 0 && !PAGED ? 4 : 0, STRIDE = KEYS - 2 * HALO;  // keys on either side that a tile reads only for its neighbours' sake
constexpr int MOST_QUERIES = 128, MOST_TOKENS = 65535;             // of counters of 16 bits
static_assert(HEAD_DIM <= 128 && HEAD_DIM % 16 == 0 && REACH <= 4 && (PAGED || REACH <= HALO), "what registers and halos hold");

constexpr int MASS_BITS = 36, VOTE_SHIFT = 48;

DEV void sync_block() {
  if constexpr (PAGED) asm volatile("bar.sync 1, %0;" ::"n"(SELECT_THREADS) : "memory");
  else __syncthreads();
}
DEV bool any_of_block(bool x) {
  if constexpr (!PAGED) return __syncthreads_or(x);
  u32 any;
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, 1, %2, p; selp.u32 %0, 1, 0, q;}" : "=r"(any) : "r"(static_cast<u32>(x)), "n"(SELECT_THREADS) : "memory");
  return any != 0;
}

struct Select {
#if PAGED
  alignas(64) u8 pool_map[128];  // tensor map of the pool: channels, tokens, pages
#endif
  Cache cache;
  const u16* queries;  // [S, L, QUERY_ROWS, query heads, D]
  u8* keep;            // [L, H, columns]
  int* kept;           // [L, H]
  float* covered;      // [L, H]
  u64* tally;          // [L, H, columns]: votes, and mass in units of 2^-MASS_BITS, whose sums do not depend on their order
  u8* buckets;         // [rooms, room_tiles, rows, keys of a tile]
  u32* taken;          // [rooms], 0 where nobody is
  int slot, columns, budget, rooms, room_tiles;
  float p;
};

// Memory for buckets of a head slot's logits (`buckets.cuh`).
struct Room {
  int number;
  u8* buckets;
};

DEV i64 min_i64(i64 a, i64 b) { return a < b ? a : b; }

struct Head {
  int index, layer, head;
  i64 at, start;  // head slot; position of the ring's oldest token
  int first, ring, start_row, rows, candidates, total, pad, lengths[SOURCES];  // pad: places of the first tile before the first token
};
DEV Head head_of(const Select& a) {
  const Cache& c = a.cache;
  Head h;
  h.index = blockIdx.x, h.layer = h.index / c.heads, h.head = h.index % c.heads;
  h.at = static_cast<i64>(a.slot) * c.layers * c.heads + h.index;
  i64 seen = c.seen[a.slot], sinks = c.sinks[a.slot];
  h.start = c.window_start[a.slot];
  h.start_row = static_cast<int>(h.start % c.ring_rows);
  h.first = static_cast<int>(sinks < seen ? sinks : seen);
  h.ring = static_cast<int>(seen > h.start ? seen - h.start : 0);
  h.rows = static_cast<int>(seen < QUERY_ROWS ? seen : QUERY_ROWS) * GROUP;
  h.candidates = 0;
  int number = 0;
#define READ_LENGTH(T) h.candidates += h.lengths[number++] = c.lengths[h.at * TIERS + T];
  EACH_SOURCE(READ_LENGTH)
  h.total = h.first + h.candidates + h.ring;
  h.pad = PAGED ? (KEYS - h.first % KEYS) % KEYS : 0;
  return h;
}
// Calls `window(row, position)` or `paged(tier, entry of the page table, index in the page)` for token `v` in order of time.
template <class Window, class Paged> DEV void locate(const Select& a, const Head& h, int v, Window window, Paged paged) {
  const Cache& c = a.cache;
  if (v < h.first) return window(v, static_cast<i64>(v));
  int i = v - h.first, number = 0;
#define LOCATE(T) \
  if (i < h.lengths[number]) return paged(Tier<T>(), &entries_of(c, h.at, T)[i / Tier<T>::TOKENS], i % Tier<T>::TOKENS); \
  i -= h.lengths[number++];
  EACH_SOURCE(LOCATE)
  int row = h.start_row + i;
  window(c.sink_rows + row - (row >= c.ring_rows ? c.ring_rows : 0), h.start + i);
}
DEV int position_of(const Select& a, const Head& h, int v) {
  int position = 0;
  locate(a, h, v, [&](int, i64 p) { position = static_cast<int>(p); },
         [&](auto tier, const int* page, int index) { position = reinterpret_cast<const int*>(page_at(a.cache, *page) + decltype(tier)::POSITION)[index]; });
  return position;
}
DEV float weight_of(const Select& a, const Head& h, int v) {
  float weight = 0.f;
  locate(a, h, v, [&](int, i64) {},
         [&](auto tier, const int* page, int index) {
           if constexpr (decltype(tier)::WEIGHTS) weight = reinterpret_cast<const float*>(page_at(a.cache, *page) + decltype(tier)::WEIGHT)[index];
         });
  return weight;
}
DEV u32 score_of(const Select& a, const Head& h, int v) {
  u32 bits = 0;
  locate(a, h, v, [&](int row, i64) { bits = score_bits(a.cache.window_score[h.at * (a.cache.sink_rows + a.cache.ring_rows) + row]); },
         [&](auto tier, const int* page, int index) {
           if constexpr (decltype(tier)::SCORES) bits = reinterpret_cast<const u16*>(page_at(a.cache, *page) + decltype(tier)::SCORE)[index];
         });
  return bits;
}
// Tokens whose position is at most that of query row `w`. Positions ascend in order of time; `latest` is that of the last candidate.
DEV int visible_to(const Select& a, const Head& h, int w, int latest) {
  i64 last = a.cache.seen[a.slot] - 1, position = last - (last - w) % QUERY_ROWS;
  if (latest <= position && h.first <= position) return h.total - static_cast<int>(min_i64(h.ring, last - position));
  int low = 0, high = h.total;
  while (low < high) {
    int middle = (low + high) / 2;
    if (position_of(a, h, middle) <= position) low = middle + 1;
    else high = middle;
  }
  return low;
}

// `condition` undone.
DEV void uncondition(const Cache& cache, float (&k)[CHANNELS], int layer, int head, i64 position) {
  if constexpr (HADAMARD_BLOCK > 1) {
    butterflies(k);
    each_channel([&](int i, int c) { k[i] *= cache.signs[c]; });
  }
  if constexpr (HAS_BIAS) {
    float minus[CHANNELS] = {};
    subtract_bias(cache, minus, layer, head, position);
    each_channel([&](int i, int) { k[i] -= minus[i]; });
  }
}
