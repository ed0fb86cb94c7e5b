// Products of warpgroups with tiles in shared memory.
// Two teams have registers of the warpgroup that copies.
constexpr int COPYING = TEAMS > 1 ? 128 : 32, READER_REGISTERS = REACH > 0 ? 112 : 104, COPIER_REGISTERS = REACH > 0 ? 32 : 64;
DEV void give_registers(bool copies) {
  if constexpr (COPYING == 32) return;
  if (copies) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPIER_REGISTERS));
  else asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(READER_REGISTERS));
}
DEV u32 operand(u32 address) { return address >> 4 | 1u << 16; }  // of lines swizzled by 128 bytes: the low half of its description
// 16 channels of an operand. Halves are put together here, so that a step is one addition, of what all lanes share.
DEV u64 channels_of(u32 lines, int half_bytes, int s) { return static_cast<u64>(1024 >> 4 | 1u << 30) << 32 | (lines + (s / 4 * half_bytes + s % 4 * 32 >> 4)); }
template <int N> DEV void settle(float (&c)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; n++) asm volatile("" : FOUR(c, n)::"memory");
}
template <int N, class Step> DEV void start(float (&c)[N][4], Step step) {
  settle(c);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (int s = 0; s < STEPS; s++) step(s);
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> DEV void await_products(float (&c)[N][4]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  settle(c);
}
// Line 8 n + 2 t + e of the tile and row (half, g) in c[n][2 half + e].
DEV void start_rows(float (&c)[TILES][4], const Rows& rows, u32 keys, u32 queries) {
  keys = __shfl_sync(ALL, operand(keys), 0);  // which is told to be the same in all lanes
  start(c, [&](int s) {
    u64 y = channels_of(keys, HALF_BYTES, s);
    if (s < OWN_STEPS) multiply_step(c, rows.x[0][s], y, s);
    else multiply_step(c, channels_of(operand(queries), 0, s), y);
  });
}
// Row 8 n + 2 t + e and line 16 w + 8 half + g of the tile, w being the warp, in c[n][2 half + e].
DEV void start_keys(float (&c)[ROWS / 8][4], u32 keys, u32 queries) {
  keys = __shfl_sync(ALL, operand(keys), 0), queries = operand(queries);
  start(c, [&](int s) {
    u64 x = channels_of(keys, HALF_BYTES, s), y = channels_of(queries, QUERY_HALF_BYTES, s);
    asm volatile("{.reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." MODEL_TYPE "." MODEL_TYPE
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                 "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
                 "%64,%65,p,1,1,0,0;}"
                 : FOUR(c, 0), FOUR(c, 1), FOUR(c, 2), FOUR(c, 3), FOUR(c, 4), FOUR(c, 5), FOUR(c, 6), FOUR(c, 7), FOUR(c, 8), FOUR(c, 9), FOUR(c, 10),
                   FOUR(c, 11), FOUR(c, 12), FOUR(c, 13), FOUR(c, 14), FOUR(c, 15) : "l"(x), "l"(y), "r"(s));
  });
}
// Queries of a block of rows as the right operand, lines of 128 bytes in the same layout as keys.
DEV void copy_queries(const Select& a, const Head& h, Shared& s, int block) {
  u32 to = shared_address(s.queries());
  constexpr int pieces = (OWN_STEPS < STEPS ? HEAD_DIM - 16 * OWN_STEPS : HEAD_DIM) / 8;
  for (int i = threadIdx.x; i < ROWS * pieces; i += SELECT_THREADS) {
    int line = i / pieces, piece = HEAD_DIM / 8 - pieces + i % pieces, row = block * ROWS + line;
    i64 query = (static_cast<i64>(a.slot) * a.cache.layers + h.layer) * QUERY_ROWS + row / GROUP;
    const u16* from = a.queries + ((query * a.cache.heads + h.head) * GROUP + row % GROUP) * HEAD_DIM + 8 * piece;
    u32 at = to + (OWN_STEPS < STEPS ? 0 : piece / 8 * QUERY_HALF_BYTES) + line * 128 + ((piece % 8 ^ line % 8) << 4);
    if (row < h.rows) copy16(at, reinterpret_cast<const u8*>(from));
    else asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  async_proxy_fence();
}
