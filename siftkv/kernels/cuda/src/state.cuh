// What all three kernels share: the arguments, and the segments that the work consists of.
//
// A segment is (request, kv head, kind): kind 0 is the window, kind 1 + t is tier t. Its tokens stand in blocks: pages, or WINDOW_BLOCK window rows.
// Segments are laid end to end on a line of cost, which is cut into equal shares; a share has the blocks that begin in it, and one team of warps.
constexpr int KINDS = TIERS + 1;

struct Segment {
  int start;   // on the line of cost
  int tokens;
  int slot;
  int logits;  // where this segment's logits go, in tokens; -1 where no scores are due
};

struct Line { int share, total; };

struct Arguments {
  const i64* slots;
  const u16 *q, *k, *v;
  u16* out;
  u8* pages;
  const int *table, *lengths;
  u16 *window_k, *window_v;
  float* window_score;
  const i64 *seen, *window_start, *sinks, *refresh, *horizon;
  const float* signs;   // of the rotation, times its scale
  const float* bias;    // of all layers
  const int *pairs, *rank;
  const uint2* trig;    // [positions, D/2]: fp16 cos and sin, then what their rounding left
  const uint4* near;    // [L, H, NEAR, BIAS_BLOCKS, 4]: by distance, high parts and rest of pair t, then of pair 4 + t
  const u8* runs;       // [L, H, RUN_BYTES]: what shared memory holds of it, see `bias.cuh`
  const float4* turns;  // [L, H, TURN_ROWS, BIAS_BLOCKS, 4]: cos and sin of two pairs at 0 ... TURNS - 1, then at multiples of TURNS
  u32* query;
  float4* bias_query;   // [batch, H, BIAS_BLOCKS, NT, 32]: coefficients of cos and sin of two pairs
  float* query_sum;
  Segment* segments;
  Line* line;
  float *partial_max, *partial_sum, *partial_out;
  float* logits;
  u16* queries;         // [S, L, QUERY_ROWS, query heads, D]
  const u8* page_skip;  // as `table`, where SKIPS
  i64 q_row, k_row, v_row;  // elements from one request to the next
  int layer, batch, teams, logits_room;
};

DEV i64 head_slot(const Arguments& a, int slot, int head) { return (static_cast<i64>(slot) * LAYERS + a.layer) * KV_HEADS + head; }

// Pairs of a request and a kv head are in the order of rows, request after request, or, with a key bias, head after head, so that a multiprocessor, which
// has neighbours, works on few heads: what the bias needs of a head stands in its caches.
constexpr bool HEAD_AFTER_HEAD = BIAS_BLOCKS > 0;
DEV int pair_of(const Arguments& a, int row) { return HEAD_AFTER_HEAD ? row % KV_HEADS * a.batch + row / KV_HEADS : row; }
DEV int head_of(const Arguments& a, int pair) { return HEAD_AFTER_HEAD ? static_cast<u32>(pair) / static_cast<u32>(a.batch) : pair % KV_HEADS; }
DEV int request_of(const Arguments& a, int pair) { return HEAD_AFTER_HEAD ? static_cast<u32>(pair) % static_cast<u32>(a.batch) : pair / KV_HEADS; }

// The window's valid rows are its first `sinks` positions, then the ring from `start` to `now`.
struct Window {
  i64 start;
  int start_row, first, tokens;
  DEV i64 position(int i) const { return i < first ? i : start + (i - first); }
  DEV int row(int i) const {
    int ring = start_row + i - first;
    return i < first ? i : SINK_ROWS + ring - (ring >= RING_ROWS ? RING_ROWS : 0);
  }
};
DEV Window window_of(const Arguments& a, int slot) {
  Window w;
  w.start = a.window_start[slot];
  i64 next = a.seen[slot] + 1, sinks = a.sinks[slot];
  w.start_row = static_cast<u32>(w.start) % RING_ROWS;
  w.first = static_cast<int>(sinks < next ? sinks : next);
  w.tokens = w.first + static_cast<int>(next > w.start ? next - w.start : 0);
  return w;
}
DEV bool is_due(const Arguments& a, int slot) {
  u32 interval = static_cast<u32>(a.refresh[slot]);
  return interval > 0 && static_cast<u32>(a.seen[slot]) % interval == 0;
}
DEV int block_tokens(int kind) { return BLOCK_TOKENS(kind); }
DEV int block_cost(int kind) { return BLOCK_COST(kind); }
DEV bool keeps_scores(int kind) { return KEEPS_SCORES(kind); }

// Where the pages of a tier begin in the page table; they go on by `table_step` (see `siftkv.kernels.state`).
DEV i64 table_start(const Arguments& a, int slot, int head, int tier) {
  i64 row = (head_slot(a, slot, head) * TABLE_ROWS + tier / 2) * TABLE_WIDTH;
  return tier % 2 == 0 ? row : row + TABLE_WIDTH - 1;
}
DEV const int* table_of(const Arguments& a, int slot, int head, int tier) { return a.table + table_start(a, slot, head, tier); }
DEV int table_step(int tier) { return tier % 2 == 0 ? 1 : -1; }
