// Built-in types and PTX only: the run-time compiler has no toolkit headers.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEV __device__ __forceinline__
constexpr u32 ALL = 0xffffffffu;
constexpr float NEVER = -1e30f;

DEV u32 shared_address(const void* p) {
  u64 generic = reinterpret_cast<u64>(p), a;
  asm("cvta.to.shared.u64 %0, %1;" : "=l"(a) : "l"(generic));
  return static_cast<u32>(a);
}
DEV float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float log2_fast(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float half_low(u32 x) {
  float y;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(y) : "r"(x));
  return y;
}
DEV float half_high(u32 x) {
  float y;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(y) : "r"(x));
  return y;
}
// Round to nearest even and saturate: a value beyond fp16 becomes its largest number, never infinity.
DEV u32 pack_half(float low, float high) {
  u32 y;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEV u32 pack_bf16(float low, float high) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
DEV float model_to_float(u16 x) {
#if MODEL_BF16
  return __uint_as_float(static_cast<u32>(x) << 16);
#else
  return half_low(x);
#endif
}
DEV u32 pack_model(float low, float high) {
#if MODEL_BF16
  return pack_bf16(low, high);
#else
  return pack_half(low, high);
#endif
}

DEV void mma_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEV void mma_model(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if MODEL_BF16
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  mma_half(c, a[0], a[1], a[2], a[3], b0, b1);
#endif
}
DEV u32 transpose(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}
DEV void ldmatrix(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}
DEV void ldmatrix_trans(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(address) : "memory");
}

DEV u32 load_shared(u32 address) {
  u32 x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
// WORDS consecutive 32-bit words with the widest loads that their alignment allows.
template <int WORDS, int WIDE>
DEV void load_words(u32 (&x)[WORDS], u32 address) {
  static_assert(WORDS % WIDE == 0, "words in whole loads");
#pragma unroll
  for (int i = 0; i < WORDS; i += WIDE) {
    if constexpr (WIDE == 4)
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(x[i]), "=r"(x[i + 1]), "=r"(x[i + 2]), "=r"(x[i + 3]) : "r"(address + 4 * i) : "memory");
    else if constexpr (WIDE == 2)
      asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(x[i]), "=r"(x[i + 1]) : "r"(address + 4 * i) : "memory");
    else
      x[i] = load_shared(address + 4 * i);
  }
}

DEV void store_words(u32 address, int x, int y, int z, int w) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

DEV void barrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
DEV void barrier_arrive(u32 barrier) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0];}" ::"r"(barrier) : "memory");
}
DEV void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("{.reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1;}" ::"r"(barrier), "r"(bytes) : "memory");
}
DEV void barrier_expect_more(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Whether a phase has ended.
DEV bool barrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done != 0;
}
DEV void barrier_wait(u32 barrier, u32 parity) {
  u32 done;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#else
    asm volatile(
        "{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#endif
  } while (!done);
}
// What fills a stage of a ring. From compute capability 9.0 on one thread starts bulk copies, of which a barrier expects the bytes. Before (not BULK)
// all threads of a warp or team copy pieces of 16 bytes, and then each arrives with its copies, whose end the barrier waits for.
constexpr bool BULK = __CUDA_ARCH__ >= 900;
// What is copied is read once a step, so it shall leave the second-level cache first.
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull;  // what `createpolicy.fractional.L2::evict_first` gives for all of it
DEV void bulk_copy(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier), "l"(EVICT_FIRST) : "memory");
}
DEV void copy16(u32 to, const u8* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
template <int THREADS> DEV void copy_together(u32 to, const u8* from, int bytes, int thread) {
#pragma unroll 4
  for (int i = 16 * thread; i < bytes; i += 16 * THREADS) copy16(to + i, from + i);
}
// Rows of BYTES each; `to(row)` and `from(row)` give their addresses.
template <int BYTES, int THREADS, class To, class From> DEV void copy_rows_together(int rows, int thread, To to, From from) {
  constexpr int pieces = BYTES / 16;
#pragma unroll 4
  for (int i = thread; i < rows * pieces; i += THREADS) copy16(to(i / pieces) + i % pieces * 16, from(i / pieces) + i % pieces * 16);
}
// The arrival that counts is an ordinary one, so that what the thread stored before is seen behind the barrier; the other adds itself to those expected.
DEV void arrive_with_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(barrier) : "memory");
  barrier_arrive(barrier);
}
// Between what threads store and bulk copies.
DEV void async_proxy_fence() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

template <class T> DEV T shuffle_xor(T x, int lanes) { return __shfl_xor_sync(ALL, x, lanes); }
DEV u32 least_of_warp(u32 x) {
  u32 y;
  asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
}
DEV int ceil_div(int a, int b) { return (a + b - 1) / b; }
DEV int min_int(int a, int b) { return a < b ? a : b; }
DEV int max_int(int a, int b) { return a > b ? a : b; }
// Programmatic launches: a kernel may start before its predecessor ends, and waits here before it reads what that wrote. Before compute capability 9.0
// it starts when its predecessor has ended.
DEV void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void let_successor_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
