// Queries in registers, and products of warpgroups.
// A warp's rows as the left operand: tile m, half h, lane group g hold row 8 h + g of its 16 rows there.
DEV int row_of(int rank, int m, int half) { return 16 * (TEAM_WARPS * m + rank) + 8 * half + ((threadIdx.x & 31) >> 2); }
// Steps of 16 channels that registers hold; the others are in shared memory, where registers are wanted for more.
constexpr int OWN_STEPS = STORED && REACH > 0 && HEAD_DIM == 128 ? STEPS / 2 : STEPS;
struct Rows {
  u32 x[HELD][OWN_STEPS][4];
  DEV void load(const Select& a, const Head& h, int first, int rank) {
#pragma unroll
    for (int m = 0; m < HELD; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int row = first + row_of(rank, m, half);
        bool inside = row < h.rows;
        i64 query = (static_cast<i64>(a.slot) * a.cache.layers + h.layer) * QUERY_ROWS + (inside ? row / GROUP : 0);
        const u32* from = reinterpret_cast<const u32*>(a.queries + ((query * a.cache.heads + h.head) * GROUP + (inside ? row % GROUP : 0)) * HEAD_DIM) + (threadIdx.x & 3);
#pragma unroll
        for (int s = 0; s < OWN_STEPS; s++) x[m][s][half] = inside ? from[8 * s] : 0u, x[m][s][2 + half] = inside ? from[8 * s + 4] : 0u;
      }
  }
};
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#if MODEL_BF16
#define MODEL_TYPE "bf16"
#else
#define MODEL_TYPE "f16"
#endif
#define FOUR(c, n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
// Columns of a warpgroup's 64 rows times 16 channels of all keys of a tile, added to `c` if `more`.
template <int N> DEV void multiply_step(float (&c)[N][4], const u32 (&a)[4], u64 b, int more) {
  static_assert(N == 4 || N == 8, "keys of a tile");
  if constexpr (N == 4)
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." MODEL_TYPE "." MODEL_TYPE
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},{%16,%17,%18,%19},%20,p,1,1,0;}"
                 : FOUR(c, 0), FOUR(c, 1), FOUR(c, 2), FOUR(c, 3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
  else
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." MODEL_TYPE "." MODEL_TYPE
                 " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
                 "{%32,%33,%34,%35},%36,p,1,1,0;}"
                 : FOUR(c, 0), FOUR(c, 1), FOUR(c, 2), FOUR(c, 3), FOUR(c, 4), FOUR(c, 5), FOUR(c, 6), FOUR(c, 7)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}
// The same with rows in shared memory, too.
DEV void multiply_step(float (&c)[8][4], u64 a, u64 b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." MODEL_TYPE "." MODEL_TYPE
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
               "%32,%33,p,1,1,0,0;}"
               : FOUR(c, 0), FOUR(c, 1), FOUR(c, 2), FOUR(c, 3), FOUR(c, 4), FOUR(c, 5), FOUR(c, 6), FOUR(c, 7) : "l"(a), "l"(b));
}
#endif

