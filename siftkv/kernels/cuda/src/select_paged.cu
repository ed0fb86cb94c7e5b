// `select.cu` for Hopper, where all tokens that candidates can be are dense: which tokens of a request its last queries vote for, a block a head slot.
// What the copying warps are told: before a pass over all tiles whether it is the one that votes, the last of a block of rows; where buckets are stored, after it
// whether it was the last, when the ring is theirs again.
DEV void tell(Shared& s, int& passes, bool votes) {
  if (threadIdx.x == 0) {
    if (votes) s.last_pass = passes;
    barrier_arrive(shared_address(&s.decided));
  }
  passes++;
}
DEV void feed_all(const Select& a, const Head& h, const Shared& s, Pipe& pipe, const Every& all, const Sample& some) {
  int pass = 0;
  for (int block = 0; block * ROWS < h.rows; block++) {
    feed(a, h, pipe, some, [] {});
    for (bool voted = false; !voted; pass++) {
      if constexpr (STORED) feed(a, h, pipe, all, [] {}), barrier_wait(shared_address(&s.decided), pass & 1);
      else feed(a, h, pipe, all, [&] { barrier_wait(shared_address(&s.decided), pass & 1); });
      voted = *const_cast<const volatile int*>(&s.last_pass) == pass;
    }
  }
}
DEV Decided select_block(const Select& a, const Head& h, Shared& s, Pipe& pipe, const Every& all, const Sample& some, int block, int& passes) {
  Rows rows;
  Lane lane;
  rows.load(a, h, block * ROWS, pipe.rank);
  if constexpr (OWN_STEPS < STEPS || REACH == 0 && !STORED) copy_queries(a, h, s, block);
  if (threadIdx.x < ROWS) {
    int row = block * ROWS + threadIdx.x;
    s.visible[threadIdx.x] = row < h.rows ? s.of_query[row / GROUP] : h.total;
  }
  clear_counts(s);
  lane.read(s, h, block, pipe.rank);
  survey(a, h, s, pipe, rows, lane, some);
  sync_block();
  place_windows(a, s);
  for (int tries = 0; tries < 24; tries++) {
    clear_counts(s);
    if constexpr (!STORED) tell(s, passes, false);
#if REACHES
    survey_pooled(a, h, s, pipe, rows, lane, all);
#else
    survey(a, h, s, pipe, rows, lane, all);
#endif
    sync_block();
    bool found = find_thresholds(a, h, s, block);
    if (found) break;
    if constexpr (STORED)
      if (tries < 23) tell(s, passes, false);
  }
#if STORES
  write_marks(a, h, s);
  sync_block();
  Decided decided = count_stored_votes(a, h, s, block);
  async_proxy_fence();
#else
  tell(s, passes, true);
  if constexpr (BY_SCORE) find_score_thresholds(a, h, s), count_score_votes(s);
  if constexpr (REACH > 0) copy_queries(a, h, s, block);
  write_bars(a, s);
  sync_block();
  async_proxy_fence();
#if REACHES
  Decided decided = count_pooled_votes(a, h, s, pipe, block, all);
#else
  Decided decided = count_votes(a, h, s, pipe, block, all);
#endif
#endif
  sync_block();
  if constexpr (STORED) tell(s, passes, true);
  return decided;
}

extern "C" __global__ void __launch_bounds__(READERS + COPYING, 1) select(const __grid_constant__ Select a) {
  extern __shared__ __align__(1024) u8 memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  if (threadIdx.x == 0) {
    s.head = head_of(a), s.last_pass = -1;
    barrier_init(shared_address(&s.decided), 1);
  }
#if STORES
  if (threadIdx.x == 32) s.room = take_room(a);
#endif
  if (threadIdx.x < FILLS) barrier_init(shared_address(&s.full[threadIdx.x]), COPIERS), barrier_init(shared_address(&s.empty[threadIdx.x]), TEAM_WARPS);
  async_proxy_fence();
  __syncthreads();
  const Head& h = s.head;
  int warp = threadIdx.x / 32;
  // Every 16th (32nd) tile of the middle and all of either end, where sinks and recent tokens are, say where to count.
  constexpr int sampled = REACH > 0 ? 32 : 16;
  int tiles = ceil_div(h.total + h.pad + REACH, KEYS), last = (h.total + h.pad - h.ring) / KEYS, middle = ceil_div(last - sampled / 2, sampled);
  int run = ceil_div(tiles, TEAMS) | 1;  // with the one before it as many tiles for either of two warpgroups
  Every all = {REACH > 0 ? TEAMS * (run + 1) : max_int(tiles, COPYING_WARPS), run};  // a tile at least for each warp that copies
  Sample some = {tiles, 0, 0, 0};
  if (last >= 24) some = {middle + 1 + tiles - last, middle, sampled, last};
  Pipe pipe = {warp / TEAM_WARPS, warp % TEAM_WARPS, shared_address(s.lines), shared_address(s.full), shared_address(s.empty), shared_address(s.positions), 0};
  bool whole = h.rows == 0 || h.total > MOST_TOKENS, votes = !whole && h.candidates > 0;
  if (threadIdx.x >= READERS) {
    give_registers(true);
    if (votes) feed_all(a, h, s, pipe, all, some);
    return;
  }
  give_registers(false);
  int latest = h.candidates > 0 ? position_of(a, h, h.first + h.candidates - 1) : -1, passes = 0;
  if (threadIdx.x == SELECT_THREADS - 1)
    s.contiguous = h.candidates > 0 && position_of(a, h, h.first + h.candidates - 1) - position_of(a, h, h.first) == h.candidates - 1;
  for (int w = threadIdx.x; w < QUERY_ROWS; w += SELECT_THREADS) s.of_query[w] = w * GROUP < h.rows ? visible_to(a, h, w, latest) : 0;
  sync_block();
  Decided decided = {0.f, 0};
  for (int block = 0; block * ROWS < h.rows && votes; block++) decided = select_block(a, h, s, pipe, all, some, block, passes);
  if (whole) keep_all(a, h);
  else finish_decisions(a, h, s.of_query, s.scratch(), decided, 0);
#if STORES
  if (threadIdx.x == 0) leave_room(a, s.room);
#endif
}
