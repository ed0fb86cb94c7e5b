// Keys of a head slot, streamed through shared memory for Hopper's warpgroups, which read them there.
//
// A stage holds a tile of KEYS tokens in the swizzled layout of wgmma: for each half of 64 channels a line of 128 bytes a token, whose pieces of 16 bytes
// change places within eight lines. The tensor memory accelerator brings pages so; sinks, the ring, and pages at the end of a source are copied piece by piece.
// A warp, or four in turn, a tile each, copy for all the others and are ahead of them, beyond the end of a pass, since the next begins with the same tiles.
using Source = Tier<SOURCE>;
constexpr int HALVES = HEAD_DIM / 64, HALF_BYTES = 128 * KEYS, STAGE_BYTES = HALVES * HALF_BYTES, RING_BYTES = STAGES * STAGE_BYTES;
constexpr int QUERY_HALF_BYTES = 128 * ROWS, QUERY_BYTES = HALVES * QUERY_HALF_BYTES;
constexpr int TILES = KEYS / 8, TILE_PAGES = KEYS / Source::TOKENS;
constexpr int BEFORE = REACH > 0 ? 8 : 0, POSITION_ROW = KEYS + BEFORE;  // tokens before a tile whose positions stand beside it, for pools
constexpr int TILE_LANES = TILE_PAGES + (BEFORE > 0), AHEAD = 32 / TILE_LANES;  // tiles of a copying warp whose pages it looks up at once
constexpr int GROUPS = READERS / 128;  // warpgroups
constexpr int COPYING_WARPS = TEAMS > 1 ? 4 : 1, COPIERS = 32;  // arrivals that fill a stage, as those that empty it are a team's warps
// Barriers of fills, and of stages that are empty again: more than stages, so that the same warps wait at each of them, every time (within a pass, those that read):
// a barrier tells a phase from the next alone.
constexpr int FILLS = STAGES * GROUPS;
static_assert(FILLS % COPYING_WARPS == 0, "a copying warp's own barriers");
static_assert(KEYS == 64 && HELD == 1 && SOURCES == 1 && Source::DENSE && !WEIGHTED && HEAD_DIM % 64 == 0, "what it serves");
static_assert(Source::TOKENS % 8 == 0 && KEYS % Source::TOKENS == 0, "tiles of whole pages, pages of whole groups of eight lines");

// Where there are pools, RUN tokens of a page stand in such an order that a lane's products are those of four tokens that follow one another: token 4 t + 2 m + e in
// line 8 m + 2 t + e.
constexpr int RUN = 16;
DEV int token_of(int line) { return REACH > 0 ? (line & ~15) | (line & 6) << 1 | (line >> 2 & 2) | (line & 1) : line; }
DEV int line_of(int token) { return REACH > 0 ? (token & ~15) | (token & 2) << 2 | (token >> 1 & 6) | (token & 1) : token; }
static_assert(REACH == 0 || Source::TOKENS % RUN == 0, "pages of whole runs");
DEV int first_of(const Head& h, int tile) { return tile * KEYS - h.pad; }
// Whether a tile's tokens are those of whole pages, and those before it are in a page.
DEV bool is_paged(const Head& h, int from) { return from - BEFORE >= h.first && from + KEYS <= h.first + h.candidates; }
// Told anew, where it is not worth a register.
DEV int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}
struct Pipe {
  int team, rank;
  u32 lines, full, empty, positions;
  int turn;  // tiles that went through the ring before this pass
  DEV u32 number(int n) const { return static_cast<u32>(turn + n); }
  DEV u32 address(int n) const { return lines + number(n) % STAGES * STAGE_BYTES; }
  DEV u32 filled(int n) const { return full + number(n) % FILLS * 8; }
  DEV u32 emptied(int n) const { return empty + number(n) % FILLS * 8; }
  DEV u32 positions_at(int n) const { return positions + number(n) % STAGES * (4 * POSITION_ROW); }
  DEV u32 phase(int n) const { return number(n) / FILLS & 1; }
};
// The tiles of a pass, all of them in turn; with a pool a run of `run` tiles for each team, which begins with the one before it.
struct Every {
  static constexpr bool FIRST = false;
  int count, run;
  DEV int at(int k) const { return REACH > 0 ? k % TEAMS * run + k / TEAMS - 1 : k; }
  DEV int place(int tile, int team) const { return (tile - team * run + 1) * TEAMS + team; }  // where a team has it, or would
};
// Those of a first look: where `middle` is not 0, so many in the middle, `step` apart, and all of either end.
struct Sample {
  static constexpr bool FIRST = true;
  int count, middle, step, last;
  DEV int at(int k) const { return middle == 0 ? k : k < middle ? step / 2 + k * step : k == middle ? 0 : last + k - middle - 1; }
  DEV u32 weight(int tile) const { return middle > 0 && tile > 0 && tile < last ? step : 1; }
};
// Half the channels of what a box of the tensor map holds: with a pool a run of tokens by e, t and m, else a page.
constexpr int BOX_LINES = REACH > 0 ? RUN : Source::TOKENS, PAGE_BOXES = Source::TOKENS / BOX_LINES;
DEV void copy_box(const Select& a, u32 to, int channel, int box, int page, u32 barrier) {
#if REACHES
  asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %3, %5}], [%6];"
               ::"r"(to), "l"(reinterpret_cast<u64>(a.pool_map)), "r"(channel), "r"(0), "r"(box * (RUN / 4)), "r"(page), "r"(barrier) : "memory");
#else
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
               ::"r"(to), "l"(reinterpret_cast<u64>(a.pool_map)), "r"(channel), "r"(0), "r"(page), "r"(barrier) : "memory");
#endif
}
// One lane of the warp, of which the compiler knows that it is one: else it makes a loop of every copy.
DEV bool elected() {
  u32 own;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(own)::"memory");
  return own != 0;
}
DEV const u8* key_at(const Select& a, const Head& h, int v) {
  const u8* key = nullptr;
  if (v < 0 || v >= h.total) return key;
  locate(a, h, v, [&](int row, i64) { key = reinterpret_cast<const u8*>(a.cache.window_k + (h.at * (a.cache.sink_rows + a.cache.ring_rows) + row) * HEAD_DIM); },
         [&](auto, const int* page, int index) { key = page_at(a.cache, *page) + Source::KEY + index * 2 * HEAD_DIM; });
  return key;
}
// Waits, at a barrier, for what the thread has copied so far.
DEV void arrive_after_copies(u32 barrier) { asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(barrier) : "memory"); }
DEV int copying_warp() { return COPYING_WARPS > 1 ? (threadIdx.x - READERS) / 32 : 0; }
// Eight lanes copy a line of a token, four tokens at a time.
DEV void copy_tokens(const Select& a, const Head& h, u32 stage, int from) {
  int lane = threadIdx.x & 31, piece = lane & 7;
#pragma unroll
  for (int e = 0; e < KEYS; e += 32) {
    u64 key = reinterpret_cast<u64>(key_at(a, h, from + e + lane));
#pragma unroll
    for (int g = 0; g < 32; g += 4) {
      int row = e + g + (lane >> 3);
      const u8* line = reinterpret_cast<const u8*>(__shfl_sync(ALL, key, g + (lane >> 3)));
      if (line == nullptr) continue;
#pragma unroll
      for (int half = 0; half < HALVES; half++) copy16(stage + half * HALF_BYTES + line_of(row) * 128 + ((piece ^ (line_of(row) & 7)) << 4), line + half * 128 + piece * 16);
    }
  }
}
DEV void copy_positions(const Select& a, const Head& h, u32 to, int from) {
  for (int j = threadIdx.x & 31; j < POSITION_ROW; j += 32) {
    int v = from - BEFORE + j, position = v < 0 ? -(1 << 20) : v >= h.total ? 1 << 30 : position_of(a, h, v);
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to + 4 * j), "r"(position) : "memory");
  }
}
// Pages of a warp's next AHEAD tiles, TILE_LANES lanes a tile: where positions matter, first the page before it.
template <class Tiles> DEV int look_up(const Select& a, const Head& h, const Tiles& tiles, int n) {
  int lane = threadIdx.x & 31, own = n + lane / TILE_LANES * COPYING_WARPS;
  if (lane >= AHEAD * TILE_LANES || own >= tiles.count) return 0;
  int from = first_of(h, tiles.at(own));
  return is_paged(h, from) ? entries_of(a.cache, h.at, SOURCE)[(from - h.first) / Source::TOKENS + lane % TILE_LANES - (BEFORE > 0)] : 0;
}
// Positions beside a tile of pages, 16 bytes a lane: `pages` are those of look_up, the tile's from the lane `first` on.
DEV void copy_page_positions(const Select& a, u32 to, int pages, int first) {
  int piece = threadIdx.x & 31, token = 4 * piece - BEFORE, nth = token < 0 ? 0 : 1 + token / Source::TOKENS;
  int page = __shfl_sync(ALL, pages, (first + nth) & 31), index = (token + Source::TOKENS) % Source::TOKENS;
  if (piece < POSITION_ROW / 4) copy16(to + 16 * piece, page_at(a.cache, page) + Source::POSITION + 4 * index);
}
DEV void copy_tile(const Select& a, const Head& h, const Pipe& pipe, int n, int from, int pages, int first) {
  constexpr int boxes = KEYS / BOX_LINES;
  u32 stage = pipe.address(n), full = pipe.filled(n);
  if (pipe.turn + n >= STAGES) barrier_wait(pipe.emptied(n - STAGES), pipe.phase(n - STAGES));
  if (!is_paged(h, from)) {
    copy_tokens(a, h, stage, from);
    if constexpr (BEFORE > 0) copy_positions(a, h, pipe.positions_at(n), from);
    return arrive_with_copies(full);
  }
  int page[TILE_PAGES];
#pragma unroll
  for (int i = 0; i < TILE_PAGES; i++) page[i] = __shfl_sync(ALL, pages, (first + (BEFORE > 0) + i) & 31);
  if (elected()) {
    barrier_expect_more(full, STAGE_BYTES);
#pragma unroll
    for (int i = 0; i < boxes * HALVES; i++) {
      int half = i % HALVES, box = i / HALVES;
      copy_box(a, stage + half * HALF_BYTES + box * BOX_LINES * 128, 64 * half, box % PAGE_BOXES, page[box / PAGE_BOXES], full);
    }
  }
  if constexpr (BEFORE > 0) {
    copy_page_positions(a, pipe.positions_at(n), pages, first);
    arrive_after_copies(full);
  }
  barrier_arrive(full);
}
// A warp's tiles. `before_last()` is called before the last of them is copied, which readers cannot do without.
template <class Tiles, class F> DEV void feed(const Select& a, const Head& h, Pipe& pipe, const Tiles& tiles, F before_last) {
  constexpr int step = COPYING_WARPS * AHEAD;
  int own = static_cast<int>(static_cast<u32>(copying_warp() - pipe.turn) % COPYING_WARPS), pages = look_up(a, h, tiles, own);
  for (int from = own; from < tiles.count; from += step) {
    int next = look_up(a, h, tiles, from + step);
    for (int i = 0; i < AHEAD; i++) {
      int n = from + i * COPYING_WARPS;
      if (n >= tiles.count) break;
      if (n + COPYING_WARPS >= tiles.count) before_last();
      copy_tile(a, h, pipe, n, first_of(h, tiles.at(n)), pages, i * TILE_LANES);
    }
    pages = next;
  }
  pipe.turn += tiles.count;
}
