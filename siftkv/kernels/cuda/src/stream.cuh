// Keys of a head slot, streamed through shared memory by teams of warps, and their products with queries.
//
// A stage holds a tile: 16 bytes of each of its keys, then the next 16 bytes of each, so that eight keys' parts are a matrix of 128 bytes, which tensor cores
// read without conflicts; then positions and log-weights. A tile's tokens stand in an order of their own: lane t of a product's column group holds
// LANE_KEYS tokens that follow one another.
constexpr int TILES = KEYS / 8, EACH = KEYS / 32, LANE_KEYS = KEYS / 4, CHUNKS = HEAD_DIM / 8, CHUNK_BYTES = 16 * KEYS + 16;
constexpr int POSITIONS_AT = CHUNKS * CHUNK_BYTES, WEIGHTS_AT = POSITIONS_AT + (REACH > 0 ? 4 * KEYS : 0), STAGE_BYTES = WEIGHTS_AT + (WEIGHTED ? 4 * KEYS : 0);
constexpr int COPIERS = 32;  // arrivals that fill a stage

DEV int token_at(int column) { return column % 8 / 2 * LANE_KEYS + column / 8 * 2 + column % 2; }
constexpr int RING_BYTES = TEAMS * STAGES * STAGE_BYTES;
DEV int first_of(int tile) { return tile * STRIDE - HALO; }
DEV void copy4(u32 to, const u8* from) { asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory"); }
DEV void store_shared(u32 to, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(x) : "memory"); }
DEV void team_sync(int team) { asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(TEAM_THREADS) : "memory"); }

// A team's ring of stages, as one of its warps goes through it: `full` fills with a tile's copies, `empty` when the team's warps are done with the tile.
struct Pipe {
  int team, rank;  // rank FEEDER: the warp that copies the team's tiles, ahead of those that read them
  u32 lines, full, empty;  // shared memory of the team
  int stage;
  u32 phase;
  DEV u32 address() const { return lines + stage * STAGE_BYTES; }
  DEV u32 filled() const { return full + stage * 8; }
  DEV u32 emptied() const { return empty + stage * 8; }
  DEV void advance() {
    bool last = stage == STAGES - 1;
    stage = last ? 0 : stage + 1, phase ^= last;
  }
};
constexpr int FEEDER = -1;
// Where a token stands: a page, its tier and index there; a row of the window (page IN_WINDOW); nowhere.
struct Spot { int page, at; };
constexpr int IN_WINDOW = -1, NOWHERE = -2, TIER_SHIFT = 24;
DEV Spot spot_of(const Select& a, const Head& h, int v) {
  Spot s = {NOWHERE, 0};
  if (v < 0 || v >= h.total) return s;
  locate(a, h, v, [&](int row, i64) { s = {IN_WINDOW, row}; },
         [&](auto tier, const int* page, int index) { s = {*page, decltype(tier)::INDEX << TIER_SHIFT | index}; });
  return s;
}
// A key as the model made it, null where there is none.
DEV const u8* key_at(const Select& a, const Head& h, const Spot& s) {
  if (s.page == NOWHERE) return nullptr;
  if (s.page == IN_WINDOW) return reinterpret_cast<const u8*>(a.cache.window_k + (h.at * (a.cache.sink_rows + a.cache.ring_rows) + s.at) * HEAD_DIM);
  const u8* key = nullptr;
#define KEY_OF(T) if constexpr (Tier<T>::DENSE) if (s.at >> TIER_SHIFT == T) key = page_at(a.cache, s.page) + Tier<T>::KEY + (s.at & ((1 << TIER_SHIFT) - 1)) * 2 * HEAD_DIM;
  EACH_SOURCE(KEY_OF)
  return key;
}
DEV int window_position(const Select& a, const Head& h, int row) {
  int ring = row - a.cache.sink_rows;
  if (ring < 0) return row;
  ring -= h.start_row;
  return static_cast<int>(h.start) + ring + (ring < 0 ? a.cache.ring_rows : 0);
}
// Positions and log-weights that pooling and logits take.
DEV void copy_beside(const Select& a, const Head& h, const Spot& s, u32 stage, int token) {
  u32 position = stage + POSITIONS_AT + 4 * token, weight = stage + WEIGHTS_AT + 4 * token;
  if (s.page < 0) {
    if constexpr (REACH > 0) store_shared(position, s.page == IN_WINDOW ? window_position(a, h, s.at) : 0);
    if constexpr (WEIGHTED) store_shared(weight, 0);
    return;
  }
  const u8* page = page_at(a.cache, s.page);
  int index = s.at & ((1 << TIER_SHIFT) - 1);
#define COPY_BESIDE(T) \
  if (s.at >> TIER_SHIFT == T) { \
    if constexpr (REACH > 0) copy4(position, page + Tier<T>::POSITION + 4 * index); \
    if constexpr (WEIGHTED && Tier<T>::WEIGHTS) copy4(weight, page + Tier<T>::WEIGHT + 4 * index); \
    if constexpr (WEIGHTED && !Tier<T>::WEIGHTS) store_shared(weight, 0); \
  }
  EACH_SOURCE(COPY_BESIDE)
}
// Starts the copies of a tile when the stage is free: eight lanes a key, a line of memory at a time.
DEV void issue(const Select& a, const Head& h, const Pipe& pipe, const Spot (&spots)[EACH]) {
  int lane = threadIdx.x & 31, part = lane & 7;
  barrier_wait(pipe.emptied(), pipe.phase ^ 1);
  u32 stage = pipe.address(), to = stage + part * CHUNK_BYTES + (lane >> 3) * 16;
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    if constexpr (REACH > 0 || WEIGHTED) copy_beside(a, h, spots[e], stage, token_at(32 * e + lane));
    u64 key = reinterpret_cast<u64>(key_at(a, h, spots[e]));
#pragma unroll
    for (int g = 0; g < 8; g++) {
      const u8* from = reinterpret_cast<const u8*>(__shfl_sync(ALL, key, 4 * g + (lane >> 3)));
      if (from == nullptr) continue;
#pragma unroll
      for (int i = 0; i < CHUNKS; i += 8)
        if (CHUNKS % 8 == 0 || i + part < CHUNKS) copy16(to + (32 * e + 4 * g) * 16 + i * CHUNK_BYTES, from + (i + part) * 16);
    }
  }
  arrive_with_copies(pipe.filled());
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
    int v = first_of(tile) + token_at(i);
    if (v < 0 || v >= h.total) continue;
    locate(a, h, v, [](int, i64) {},
           [&](auto tier, const int* page, int index) {
             using F = decltype(tier);
             if constexpr (!F::DENSE) {
               Token x = read_token<F>(page_at(a.cache, *page), index);
               uncondition(a.cache, x.k, h.layer, h.head, max_int(0, min_int(x.position, a.cache.positions - 1)));
               u32 key = pipe.address() + 16 * i;
               each_channel([&](int j, int c) {
                 asm volatile("st.shared.u16 [%0], %1;" ::"r"(key + c / 8 * CHUNK_BYTES + c % 8 * 2), "h"(static_cast<u16>(pack_model(x.k[j], 0.f))) : "memory");
               });
             }
           });
  }
  async_proxy_fence();
  team_sync(pipe.team);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
DEV void settle(float (&c)[HELD][TILES][4]) {
#pragma unroll
  for (int m = 0; m < HELD; m++)
#pragma unroll
    for (int n = 0; n < TILES; n++) asm volatile("" : FOUR(c[m], n)::"memory");
}
// Starts the products of a tile: token LANE_KEYS t + 2 n + e of rows (m, half, g) will stand in c[m][n][2 half + e].
DEV void start_products(float (&c)[HELD][TILES][4], const Rows& rows, u32 keys) {
  constexpr u64 strides = static_cast<u64>(CHUNK_BYTES >> 4) << 16 | static_cast<u64>(128 >> 4) << 32;
  keys = __shfl_sync(ALL, keys, 0);  // which is told to be the same in all lanes
  async_proxy_fence();
  settle(c);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int m = 0; m < HELD; m++) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) multiply_step(c[m], rows.x[m][s], (keys >> 4) + s * 2 * (CHUNK_BYTES >> 4) | strides, s);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }
}
// Products of the m-th rows are there, those that follow may not be.
template <int LATER> DEV void await_products(float (&c)[TILES][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
#pragma unroll
  for (int n = 0; n < TILES; n++) asm volatile("" : FOUR(c, n)::"memory");
}
#else
// Products of a tile: token LANE_KEYS t + 2 n + e of rows (m, half, g) stands in c[m][n][2 half + e].
DEV void start_products(float (&c)[HELD][TILES][4], const Rows& rows, u32 keys) {
  int lane = threadIdx.x & 31;
  u32 from = keys + (lane >> 3 & 1) * CHUNK_BYTES + ((lane >> 4) * 8 + (lane & 7)) * 16;
#pragma unroll
  for (int m = 0; m < HELD; m++)
#pragma unroll
    for (int n = 0; n < TILES; n++) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.f;
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++) {
      u32 b[4];
      ldmatrix(b, from + 256 * n + 2 * s * CHUNK_BYTES);
#pragma unroll
      for (int m = 0; m < HELD; m++) mma_model(c[m][2 * n], rows.x[m][s], b[0], b[1]), mma_model(c[m][2 * n + 1], rows.x[m][s], b[2], b[3]);
    }
}
template <int LATER> DEV void await_products(float (&)[TILES][4]) {}
#endif
// Which tiles to go through: `count` from `from` on, or, where `middle` is not 0, so many in the middle, `step` apart, and all of either end.
struct Tiles {
  int from, count, middle, step, last;
  DEV int at(int k) const { return middle == 0 ? from + k : k < middle ? step / 2 + k * step : k == middle ? 0 : last + k - middle - 1; }
  DEV u32 weight(int tile) const { return middle > 0 && tile > 0 && tile < last ? step : 1; }
};
// What a team's feeder does: it looks up where the next tile stands while the present one's stage becomes free.
DEV void feed(const Select& a, const Head& h, Pipe& pipe, const Tiles& tiles) {
  int lane = threadIdx.x & 31;
  auto look_up = [&](Spot (&spots)[EACH], int n) {
    int tile = n < tiles.count ? tiles.at(n) : -1;
#pragma unroll
    for (int e = 0; e < EACH; e++) spots[e] = tile >= 0 ? spot_of(a, h, first_of(tile) + token_at(32 * e + lane)) : Spot{NOWHERE, 0};
  };
  Spot now[EACH], next[EACH];
  look_up(now, pipe.team);
  for (int n = pipe.team; n < tiles.count; n += TEAMS) {
    look_up(next, n + TEAMS);
    issue(a, h, pipe, now);
    pipe.advance();
#pragma unroll
    for (int e = 0; e < EACH; e++) now[e] = next[e];
  }
}
// What its other warps do: `body(tile, stage, c, ready)`, where `ready(m)` waits for products `c[m]`; the last leaves the stage to the feeder. They need not
// keep step with one another.
template <class Body> DEV void take(const Select& a, const Head& h, Pipe& pipe, const Rows& rows, const Tiles& tiles, Body body) {
  int lane = threadIdx.x & 31;
  for (int n = pipe.team; n < tiles.count; n += TEAMS) {
    int tile = tiles.at(n);
    barrier_wait(pipe.filled(), pipe.phase);
    if (has_quantised(h, tile)) decode_keys(a, h, pipe, tile);
    float c[HELD][TILES][4];
    start_products(c, rows, pipe.address());
    body(tile, pipe.address(), c, [&] {
      __syncwarp();
      if (lane == 0) barrier_arrive(pipe.emptied());
    });
    pipe.advance();
  }
}
// Registers are the readers' while tiles go through.
constexpr int READER_REGISTERS = 152, FEEDER_REGISTERS = 56, OWN_REGISTERS = 128;
constexpr bool GIVES_REGISTERS = SELECT_THREADS == 512;  // of 65,536; with fewer threads there are enough
DEV void give_registers(bool feeds) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (!GIVES_REGISTERS) return;
  if (feeds) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FEEDER_REGISTERS));
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(READER_REGISTERS));
#endif
}
DEV void return_registers(bool feeds) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  if constexpr (!GIVES_REGISTERS) return;
  asm volatile("bar.sync %0, 128;" ::"r"(8 + threadIdx.x / 128) : "memory");  // between two changes of a warpgroup
  if (feeds) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(OWN_REGISTERS));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(OWN_REGISTERS));
#endif
}
// A pass over tiles: `read` by the readers of every team, who leave when the last tile is done.
template <class Read> DEV void stream(const Select& a, const Head& h, Pipe& pipe, const Tiles& tiles, Read read) {
  if (pipe.rank == FEEDER) {
    give_registers(true);
    if (pipe.team < TEAMS) feed(a, h, pipe, tiles);
    return_registers(true);
  } else {
    give_registers(false);
    read();
    return_registers(false);
  }
  __syncthreads();
}
