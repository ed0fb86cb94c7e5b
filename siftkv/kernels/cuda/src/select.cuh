// What `select.cu` reads: the tokens of one head slot in order of time (sinks, sources, ring), streamed through shared memory, and products with queries.
//
// TEAMS of warps share a block. A team holds 128 rows (query x query head), HELD tiles of 16 a warp, and takes every TEAMS-th tile of 32 keys.
constexpr int ROWS = 128, WARP_ROWS = 16 * HELD, TEAM_WARPS = ROWS / WARP_ROWS, TEAM_THREADS = 32 * TEAM_WARPS, SELECT_THREADS = TEAMS * TEAM_THREADS;
constexpr int KEYS = 32, STEPS = HEAD_DIM / 16, PITCH = 2 * HEAD_DIM + 16;
constexpr int HALO = REACH > 0 ? 4 : 0, STRIDE = KEYS - 2 * HALO;  // keys on either side that a tile reads only for its neighbours' sake
constexpr int MOST_QUERIES = 128, MOST_TOKENS = 65535;             // of counters of 16 bits
static_assert(HEAD_DIM <= 128 && HEAD_DIM % 16 == 0 && REACH <= HALO, "what registers and halos hold");

constexpr int MASS_BITS = 36, VOTE_SHIFT = 48;

struct Select {
  Cache cache;
  const u16* queries;  // [S, L, QUERY_ROWS, query heads, D]
  u8* keep;            // [L, H, columns]
  int* kept;           // [L, H]
  float* covered;      // [L, H]
  u64* tally;          // [L, H, columns], zero before: votes, and mass in units of 2^-MASS_BITS, whose sums do not depend on their order
  int slot, columns, budget;
  float p;
};

DEV i64 min_i64(i64 a, i64 b) { return a < b ? a : b; }

struct Head {
  int index, layer, head;
  i64 at, start;  // head slot; position of the ring's oldest token
  int first, ring, start_row, rows, candidates, total, lengths[SOURCES];
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

DEV void team_sync(int team) { asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(TEAM_THREADS) : "memory"); }
// Where a key stands: a page and the offset in it, a row of the window (page IN_WINDOW), or nowhere as the model made it (NO_KEY).
struct Spot { int page, offset; };
constexpr int IN_WINDOW = -1, NO_KEY = -2;
DEV Spot spot_of(const Select& a, const Head& h, int v) {
  Spot s = {NO_KEY, 0};
  if (v < 0 || v >= h.total) return s;
  locate(a, h, v, [&](int row, i64) { s = {IN_WINDOW, row}; },
         [&](auto tier, const int* page, int index) {
           using F = decltype(tier);
           if constexpr (F::DENSE) s = {*page, F::KEY + index * 2 * HEAD_DIM};
         });
  return s;
}
// A team's ring of stages. `full` fills with a tile's copies, `empty` when its four warps are done with the tile. Turns count tiles and never start again.
struct Pipe {
  int team, rank, used;
  u32 lines, full, empty;  // shared memory of the team
  DEV u32 line(int turn) const { return lines + turn % STAGES * KEYS * PITCH; }
  DEV u32 filled(int turn) const { return full + turn % STAGES * 8; }
  DEV u32 emptied(int turn) const { return empty + turn % STAGES * 8; }
  DEV int parity(int turn) const { return turn / STAGES & 1; }
};
DEV int first_of(int tile) { return tile * STRIDE - HALO; }
// Copies the keys of the lanes in `plain` to their lines, without bulk copies: neighbouring lanes take neighbouring pieces.
DEV void copy_keys(u32 lines, const u8* key, u32 plain, u32 barrier) {
  constexpr int pieces = HEAD_DIM / 8;
#pragma unroll 4
  for (int i = threadIdx.x & 31; i < KEYS * pieces; i += 32) {
    const u8* from = reinterpret_cast<const u8*>(__shfl_sync(ALL, reinterpret_cast<u64>(key), i / pieces));
    if (plain >> (i / pieces) & 1u) copy16(lines + i / pieces * PITCH + i % pieces * 16, from + i % pieces * 16);
  }
  arrive_with_copies(barrier);
}
// One warp starts the copies of a tile, a key a lane, when the stage is free.
DEV void issue(const Select& a, const Head& h, const Pipe& pipe, int turn, Spot spot) {
  int lane = threadIdx.x & 31;
  if (turn >= STAGES) barrier_wait(pipe.emptied(turn - STAGES), pipe.parity(turn - STAGES));
  u32 plain = __ballot_sync(ALL, spot.page != NO_KEY);
  if constexpr (BULK) {
    if (lane == 0) barrier_expect(pipe.filled(turn), __popc(plain) * 2 * HEAD_DIM);
    __syncwarp();
    if (spot.page == NO_KEY) return;
  }
  const u8* key = reinterpret_cast<const u8*>(a.cache.window_k + (h.at * (a.cache.sink_rows + a.cache.ring_rows) + spot.offset) * HEAD_DIM);
  if (spot.page != IN_WINDOW) key = page_at(a.cache, spot.page) + spot.offset;
  if constexpr (BULK) bulk_copy(pipe.line(turn) + lane * PITCH, key, 2 * HEAD_DIM, pipe.filled(turn));
  else copy_keys(pipe.line(turn), key, plain, pipe.filled(turn));
}
DEV bool has_quantised(const Head& h, int tile) {
  bool any = false;
  int from = h.first, number = 0;
#define LOOK(T) \
  any |= !Tier<T>::DENSE && first_of(tile) < from + h.lengths[number] && first_of(tile) + KEYS > from; \
  from += h.lengths[number++];
  EACH_SOURCE(LOOK)
  return any;
}
DEV void decode_keys(const Select& a, const Head& h, const Pipe& pipe, int tile) {
  for (int i = pipe.rank; i < KEYS; i += TEAM_WARPS) {
    int v = first_of(tile) + i;
    if (v < 0 || v >= h.total) continue;
    locate(a, h, v, [](int, i64) {},
           [&](auto tier, const int* page, int index) {
             using F = decltype(tier);
             if constexpr (!F::DENSE) {
               Token x = read_token<F>(page_at(a.cache, *page), index);
               uncondition(a.cache, x.k, h.layer, h.head, max_int(0, min_int(x.position, a.cache.positions - 1)));
               u32 line = pipe.line(pipe.used) + i * PITCH;
               each_channel([&](int j, int c) {
                 asm volatile("st.shared.u16 [%0], %1;" ::"r"(line + 2 * c), "h"(static_cast<u16>(pack_model(x.k[j], 0.f))) : "memory");
               });
             }
           });
  }
  async_proxy_fence();
  team_sync(pipe.team);
}
// The team's tiles among `from`, `from + step`, ... below `to`: `body(tile, keys)` by each of its warps, which need not keep step with one another. The
// warps take turns at starting copies, two tiles ahead, and look up where their next tile stands long before they need it.
template <class Body> DEV void stream(const Select& a, const Head& h, Pipe& pipe, int from, int to, int step, Body body) {
  constexpr int ahead = STAGES - 1;
  int jump = TEAMS * step, first = from + pipe.team * step, start = pipe.used, lane = threadIdx.x & 31;
  int mine = start + ((pipe.rank - start) & (TEAM_WARPS - 1));  // the next turn whose copies this warp starts
  auto tile_of = [&](int turn) { return first + (turn - start) * jump; };
  auto look_up = [&](int turn) { return tile_of(turn) < to ? spot_of(a, h, first_of(tile_of(turn)) + lane) : Spot{NO_KEY, 0}; };
  Spot spot = look_up(mine);
  auto start_up_to = [&](int turn) {
    if (mine > turn) return;
    if (tile_of(mine) < to) issue(a, h, pipe, mine, spot);
    mine += TEAM_WARPS;
    spot = look_up(mine);
  };
  start_up_to(start + ahead - 1);
  for (int tile = first; tile < to; tile += jump) {
    start_up_to(pipe.used + ahead);
    barrier_wait(pipe.filled(pipe.used), pipe.parity(pipe.used));
    if (has_quantised(h, tile)) decode_keys(a, h, pipe, tile);
    body(tile, pipe.line(pipe.used));
    __syncwarp();
    if (lane == 0) barrier_arrive(pipe.emptied(pipe.used));
    pipe.used++;
  }
}

// A warp's rows as the left operand: tile m, half h, lane group g hold row 16 m + 8 h + g.
struct Rows {
  u32 x[HELD][STEPS][4];
  DEV void load(const Select& a, const Head& h, int first) {
    int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < HELD; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = first + 16 * m + 8 * half + (lane >> 2);
        bool inside = row < h.rows;
        i64 query = (static_cast<i64>(a.slot) * a.cache.layers + h.layer) * QUERY_ROWS + (inside ? row / GROUP : 0);
        const u32* from = reinterpret_cast<const u32*>(a.queries + ((query * a.cache.heads + h.head) * GROUP + (inside ? row % GROUP : 0)) * HEAD_DIM) + (lane & 3);
#pragma unroll
        for (int s = 0; s < STEPS; s++) x[m][s][half] = inside ? from[8 * s] : 0u, x[m][s][2 + half] = inside ? from[8 * s + 4] : 0u;
      }
  }
};
// Products of a tile: tokens 8 n + 2 t + e of rows (m, half, g) stand in c[m][n][2 half + e].
DEV void multiply(float (&c)[HELD][KEYS / 8][4], const Rows& rows, u32 keys) {
  int lane = threadIdx.x & 31;
  u32 from = keys + ((lane >> 4) * 8 + (lane & 7)) * PITCH + (lane >> 3 & 1) * 16;
#pragma unroll
  for (int m = 0; m < HELD; m++)
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.f;
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
      u32 b[4];
      ldmatrix(b, from + 16 * n * PITCH + 32 * s);
#pragma unroll
      for (int m = 0; m < HELD; m++) mma_model(c[m][2 * n], rows.x[m][s], b[0], b[1]), mma_model(c[m][2 * n + 1], rows.x[m][s], b[2], b[3]);
    }
}
