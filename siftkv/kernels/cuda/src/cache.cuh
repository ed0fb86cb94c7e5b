// The cache's tensors (`siftkv.kernels.state`) and where things stand in them. Sizes that only addresses depend on are arguments, so that caches of
// one model and one set of formats share their machine code.
struct Cache {
  u8* pages;
  int* free_ring;
  i64* counters;
  int *table, *lengths;
  u16 *window_k, *window_v;
  float* window_score;
  i64 *seen, *window_start;
  const i64 *sinks, *window, *catch_up;
  const float *alpha, *cap_share;
  const int* cap;
  const float *cos, *sin, *bias, *signs;
  i64 num_pages;
  int layers, heads, width, sink_rows, ring_rows, positions;
};

constexpr int TABLE_ROWS = (TIERS + 1) / 2;

DEV i64 window_row(const Cache& c, i64 head_slot, int slot, i64 position) {
  i64 row = position < c.sinks[slot] ? position : c.sink_rows + position % c.ring_rows;
  return head_slot * (c.sink_rows + c.ring_rows) + row;
}

// One tier's entries in a row of the page table: from the left for even tiers, from the right for odd ones.
struct Entries {
  int* first;
  int step;
  DEV int& operator[](int index) const { return first[index * step]; }
};
DEV Entries entries_of(const Cache& c, i64 head_slot, int tier) {
  int* row = c.table + (head_slot * TABLE_ROWS + tier / 2) * c.width;
  if (tier % 2 == 0) return {row, 1};
  return {row + c.width - 1, -1};
}
DEV u8* page_at(const Cache& c, int page) { return c.pages + static_cast<i64>(page) * PAGE_BYTES; }
