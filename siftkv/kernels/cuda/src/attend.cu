// Attention over the segments by teams of TEAM warps. Each team takes an equal share of the line of cost and streams its blocks through a ring of
// STAGES in shared memory, filled by bulk copies: a quantised page at once, dense rows one by one.
constexpr int TEAM_THREADS = 32 * TEAM, BLOCK_THREADS = TEAM_THREADS * TEAMS;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int NOTES_BYTES = STAGES * 32;  // a stage's barrier (8 bytes) and note (16 bytes)

// What stands in a stage: segment, tokens (0: a page that is skipped), and where its logits go (-1: nowhere).
struct Note { int segment, tokens, logits; };

// Walks over a team's blocks.
struct Cursor {
  int low, high;  // the share
  int segment, kind, head, block, stop, slot, tokens, logits;
  int ids, ids_from;  // page ids of 32 blocks, one a lane
  u32 skipped;        // which of the 32 are skipped, where SKIPS
  const int* table;
  const u8* skip;
  Window window;

  // Where every so manieth segment begins, which `find` looks at first: one a lane, so that 32 are in step.
  static DEV int first_look(const Arguments& a) {
    int count = a.batch * KV_HEADS * KINDS, at = (threadIdx.x & 31) * ceil_div(count, 32);
    return at < count ? a.segments[at].start : 0x7fffffff;
  }
  // Stands before the segment in which the share begins.
  DEV void find(const Arguments& a, int start) {
    int count = a.batch * KV_HEADS * KINDS, at = 0, lane = threadIdx.x & 31;
    for (bool first = true; count > 1; first = false) {
      int step = ceil_div(count, 32), probe = at + lane * step;
      bool before = first ? start <= low : lane * step < count && a.segments[probe].start <= low;
      int found = __popc(__ballot_sync(ALL, before)) - 1;
      at += found * step;
      count = min_int(step, count - found * step);
    }
    segment = at - 1;
  }
  DEV bool more() const { return block < stop; }
  // Goes on to the next segment with a block that begins in the share. Where there is none, there are no more blocks.
  DEV void enter(const Arguments& a) {
    int last = a.batch * KV_HEADS * KINDS;
    while (++segment < last) {
      int4 raw = reinterpret_cast<const int4*>(a.segments)[segment];
      if (raw.x >= high) break;
      kind = segment % KINDS, tokens = raw.y, slot = raw.z, logits = raw.w;
      int cost = block_cost(kind), blocks = ceil_div(tokens, block_tokens(kind));
      block = raw.x >= low ? 0 : ceil_div(low - raw.x, cost);
      stop = min_int(blocks, ceil_div(high - raw.x, cost));
      if (block >= stop) continue;
      head = head_of(a, segment / KINDS);
      if (kind == 0) window = window_of(a, slot);
      else {
        table = table_of(a, slot, head, kind - 1);
        if constexpr (SKIPS) skip = a.page_skip + table_start(a, slot, head, kind - 1);
        ids_from = block - 32;
      }
      return;
    }
    block = stop = 0;
  }
  DEV const u8* page(const Arguments& a) {
    if (block - ids_from >= 32) {
      ids_from = block;
      int at = min_int(block + (threadIdx.x & 31), stop - 1);
      ids = table[at * table_step(kind - 1)];
      if constexpr (SKIPS) skipped = __ballot_sync(ALL, skip[at * table_step(kind - 1)] != 0);
    }
    return a.pages + static_cast<i64>(__shfl_sync(ALL, ids, block - ids_from)) * PAGE_BYTES;
  }
};

struct Stage {
  u32 data, note, barrier;
  DEV Note read() const {
    u32 x[4];
    load_words<4, 4>(x, note);
    return {static_cast<int>(x[0]), static_cast<int>(x[1]), static_cast<int>(x[2])};
  }
};
template <class F> DEV void fetch_page(const Stage& s, const u8* page, int count, int thread) {
  if constexpr (F::DENSE) {
    if constexpr (!BULK && F::WEIGHTS) copy_together<TEAM_THREADS>(s.data + F::WEIGHT_STAGE, page + F::WEIGHT, F::WEIGHT_BYTES, thread);
    else if (F::WEIGHTS && thread == 0) {
      barrier_expect_more(s.barrier, F::WEIGHT_BYTES);
      bulk_copy(s.data + F::WEIGHT_STAGE, page + F::WEIGHT, F::WEIGHT_BYTES, s.barrier);
    }
    Dense<F::TOKENS>::copy(s.data, s.barrier, count, thread, [=](int token, int is_value) { return page + (is_value ? F::VALUE : F::KEY) + token * 2 * HEAD_DIM; });
  } else {
    if constexpr (!BULK) {
      copy_together<TEAM_THREADS>(s.data, page, F::COPIED_BYTES, thread);
      if constexpr (F::WEIGHTS) copy_together<TEAM_THREADS>(s.data + F::WEIGHT_STAGE, page + F::WEIGHT, F::WEIGHT_BYTES, thread);
      arrive_with_copies(s.barrier);
    } else if (thread == 0) {
      barrier_expect(s.barrier, F::COPIED_BYTES + (F::WEIGHTS ? F::WEIGHT_BYTES : 0));
      bulk_copy(s.data, page, F::COPIED_BYTES, s.barrier);
      if constexpr (F::WEIGHTS) bulk_copy(s.data + F::WEIGHT_STAGE, page + F::WEIGHT, F::WEIGHT_BYTES, s.barrier);
    }
  }
}
DEV void fetch_window(const Arguments& a, const Cursor& c, const Stage& s, int count, int thread) {
  i64 first = head_slot(a, c.slot, c.head) * (SINK_ROWS + RING_ROWS);
  const u8 *keys = reinterpret_cast<const u8*>(a.window_k + first * HEAD_DIM), *values = reinterpret_cast<const u8*>(a.window_v + first * HEAD_DIM);
  int from = c.block * WINDOW_BLOCK;
  Dense<WINDOW_BLOCK>::copy(s.data, s.barrier, count, thread,
                            [&](int token, int is_value) { return (is_value ? values : keys) + c.window.row(from + token) * 2 * HEAD_DIM; });
}
DEV void fetch(const Arguments& a, Cursor& c, const Stage& s, int thread) {
  int each = block_tokens(c.kind), from = c.block * each, count = min_int(each, c.tokens - from);
  const u8* page = c.kind > 0 ? c.page(a) : nullptr;
  bool skipped = SKIPS && c.kind > 0 && (c.skipped >> (c.block - c.ids_from) & 1u);
  if (thread == 0) store_words(s.note, c.segment, skipped ? 0 : count, c.logits < 0 ? -1 : c.logits + from, 0);
  if (skipped) {
    if (ARRIVALS > 1 || thread == 0) barrier_arrive(s.barrier);
  } else if (c.kind == 0) fetch_window(a, c, s, count, thread);
  else {
#define FETCH_TIER(T) if (c.kind == 1 + T) fetch_page<Tier<T>>(s, page, count, thread);
    EACH_TIER(FETCH_TIER)
  }
  c.block++;
}

// The body of a tier's tiles: dense or quantised.
template <class F, bool DENSE = F::DENSE> struct Tiles : Quantised<F> {};
template <class F> struct Tiles<F, true> : Dense<F::TOKENS, F::WEIGHTS> {};
using WindowTiles = Dense<WINDOW_BLOCK>;

DEV void begin_segment(Online& o, const Arguments& a, int segment) {
  int pair = segment / KINDS, kind = segment % KINDS;
  if (kind == 0) WindowTiles::begin(o, a, pair);
#define BEGIN_TIER(T) if (kind == 1 + T) Tiles<Tier<T>>::begin(o, a, pair);
  EACH_TIER(BEGIN_TIER)
}
DEV void end_segment(Online& o, int segment) {
#define END_TIER(T) if (segment % KINDS == 1 + T) Tiles<Tier<T>>::end(o);
  EACH_TIER(END_TIER)
}
DEV void attend_block(Online& o, const Arguments& a, u32 data, const Note& note, int rank) {
  int kind = note.segment % KINDS, pair = note.segment / KINDS;
  float* logits = note.logits < 0 ? nullptr : a.logits + static_cast<i64>(note.logits) * LOGIT_ROW;
  if (kind == 0) WindowTiles::attend(o, a, data, note.tokens, logits, pair, rank);
#define ATTEND_TIER(T) if (kind == 1 + T) Tiles<Tier<T>>::attend(o, a, data, note.tokens, logits, pair, rank);
  EACH_TIER(ATTEND_TIER)
}
DEV void team_sync(int team) {
  if constexpr (TEAM == 1) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(TEAM_THREADS) : "memory");
}

// Factors of runs, of the RUN_HEADS heads from `head` on, to shared memory, by one warp.
DEV void fetch_runs(const Arguments& a, u32 to, u32 barrier, int head) {
  int lane = threadIdx.x & 31, bytes = min_int(RUN_HEADS, KV_HEADS - head) * RUN_BYTES;
  const u8* from = a.runs + static_cast<i64>(a.layer * KV_HEADS + head) * RUN_BYTES;
  if constexpr (!BULK) {
    copy_together<32>(to, from, bytes, lane);
    arrive_with_copies(barrier);
  } else if (lane == 0) {
    barrier_expect(barrier, bytes);
    bulk_copy(to, from, bytes, barrier);
  }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) attend(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(128) u8 shared[];
  int team = threadIdx.x / TEAM_THREADS, thread = threadIdx.x % TEAM_THREADS, rank = thread / 32;
  u32 notes = shared_address(shared) + team * NOTES_BYTES;
  u32 ring = shared_address(shared + TEAMS * NOTES_BYTES) + team * RING_BYTES;
  auto stage_at = [&](int i) { return Stage{ring + i * STAGE_BYTES, notes + 32 * i, notes + 32 * i + 16}; };
  __shared__ u64 runs_barrier;
  __shared__ int first_head;
  u32 runs = shared_address(shared) + TEAMS * (NOTES_BYTES + RING_BYTES), runs_come = shared_address(&runs_barrier);
  if (RUNS && threadIdx.x == 0) barrier_init(runs_come, BULK ? 1 : 32);
  if (thread == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(stage_at(i).barrier, ARRIVALS);
    async_proxy_fence();
  }
  if constexpr (RUNS) __syncthreads();
  else team_sync(team);
  wait_for_predecessor();
  let_successor_start();
  int look = Cursor::first_look(a);
  // Where there is less work than teams, it is spread over all multiprocessors.
  int worker = a.line->share <= PAIR_SHARE ? team * gridDim.x + blockIdx.x : blockIdx.x * TEAMS + team;
  Cursor cursor;
  cursor.low = worker * a.line->share;
  cursor.high = min_int(cursor.low + a.line->share, a.line->total);
  if (cursor.low >= cursor.high) return;  // and so do all warps behind
  cursor.find(a, look);
  cursor.enter(a);
  int segment = cursor.more() ? cursor.segment : -1;
  if (RUNS && threadIdx.x < 32) {
    int head = cursor.more() ? cursor.head : 0;
    if (threadIdx.x == 0) first_head = head;
    fetch_runs(a, runs, runs_come, head);
  }
  int issued = 0;
  auto issue = [&](int stage) {
    fetch(a, cursor, stage_at(stage), thread);
    issued++;
    if (!cursor.more()) cursor.enter(a);
  };
  for (int i = 0; i < STAGES && cursor.more(); i++) issue(i);

  Online o;
  o.clear();
  auto find_run = [&]() {
    int head = head_of(a, segment / KINDS) - first_head;
    o.terms.run = head >= 0 && head < RUN_HEADS ? runs + head * RUN_BYTES : 0;
  };
  if (segment >= 0) begin_segment(o, a, segment);
  if constexpr (RUNS) {
    barrier_wait(runs_come, 0);
    find_run();
  }
  auto finish = [&]() {
    end_segment(o, segment);
    o.store(a, (segment / KINDS + worker) * TEAM + rank);
  };
  for (int i = 0; i < issued; i++) {
    Stage s = stage_at(i % STAGES);
    barrier_wait(s.barrier, i / STAGES & 1);
    Note note = s.read();
    if (note.segment != segment) {
      if (note.segment / KINDS != segment / KINDS) {
        finish();
        o.clear();
      } else end_segment(o, segment);
      segment = note.segment;
      begin_segment(o, a, segment);
      if constexpr (RUNS) find_run();
    }
    attend_block(o, a, s.data, note, rank);
    team_sync(team);
    if (cursor.more()) issue(i % STAGES);
  }
  if (segment >= 0) finish();
}
