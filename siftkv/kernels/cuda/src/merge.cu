// After attention: partial results become the output; where a refresh is due, logits become attention and move the stored means.
constexpr int MERGE_THREADS = 256;

struct Parts { int first, count; };
// The warps that wrote a partial result of a head: those whose share holds the beginning of one of its blocks.
DEV Parts parts_of(const Arguments& a, int pair) {
  int share = a.line->share, from = a.segments[pair * KINDS].start, last = from;
#pragma unroll
  for (int kind = 0; kind < KINDS; kind++) {
    int4 s = reinterpret_cast<const int4*>(a.segments)[pair * KINDS + kind];
    if (s.y > 0) last = s.x + (ceil_div(s.y, block_tokens(kind)) - 1) * block_cost(kind);
  }
  int first = from / share;
  return {(pair + first) * TEAM, (last / share - first + 1) * TEAM};
}
// log2 of each query head's sum of exponentials.
DEV void merge_exponents(const Arguments& a, Parts parts, float (&exponent)[GROUP]) {
  int lane = threadIdx.x & 31;
  for (int g = threadIdx.x >> 5; g < GROUP; g += MERGE_THREADS / 32) {
    float m = NEVER, l = 0.f;
    for (int i = lane; i < parts.count; i += 32) m = fmaxf(m, a.partial_max[(parts.first + i) * NT * 8 + g]);
    for (int o = 16; o; o >>= 1) m = fmaxf(m, shuffle_xor(m, o));
    for (int i = lane; i < parts.count; i += 32) {
      int at = (parts.first + i) * NT * 8 + g;
      l += a.partial_sum[at] * exp2_fast(a.partial_max[at] - m);
    }
    for (int o = 16; o; o >>= 1) l += shuffle_xor(l, o);
    if (lane == 0) exponent[g] = m + log2f(l);
  }
  __syncthreads();
}
// A part of a softmax: reference, sum of exponentials, weighted sum of four channels.
struct Sum {
  float m, l;
  float4 o;
  DEV void add(float other_m, float other_l, float4 v) {
    float next = fmaxf(m, other_m), mine = exp2_fast(m - next), other = exp2_fast(other_m - next);
    m = next, l = l * mine + other_l * other;
    o.x = o.x * mine + v.x * other, o.y = o.y * mine + v.y * other, o.z = o.z * mine + v.z * other, o.w = o.w * mine + v.w * other;
  }
  DEV void add(const Sum& other) { add(other.m, other.l, other.o); }
  DEV Sum of_lane_xor(int lanes) const {
    return {shuffle_xor(m, lanes), shuffle_xor(l, lanes), {shuffle_xor(o.x, lanes), shuffle_xor(o.y, lanes), shuffle_xor(o.z, lanes), shuffle_xor(o.w, lanes)}};
  }
};
// Rows of threads share the parts; a row is as wide as there are items, in powers of two, so that rows of one warp add up by shuffles.
DEV void merge_out(const Arguments& a, Parts parts, u16* out) {
  constexpr int all = GROUP * HEAD_DIM / 4;
  __shared__ Sum shelf[MERGE_THREADS];
  int each = ceil_div(all, gridDim.y), from = blockIdx.y * each, items = min_int(each, all - from);
  for (; items > 0; items -= MERGE_THREADS, from += MERGE_THREADS) {
    int count = min_int(items, MERGE_THREADS), bits = count > 1 ? 32 - __clz(count - 1) : 0, wide = 1 << bits;
    int x = threadIdx.x & (wide - 1), g = (from + x) * 4 / HEAD_DIM;
    Sum sum = {NEVER, 0.f, {0.f, 0.f, 0.f, 0.f}};
    if (x < count) {
#pragma unroll 4
      for (int i = threadIdx.x >> bits; i < parts.count; i += MERGE_THREADS >> bits) {
        int at = (parts.first + i) * NT * 8 + g;
        sum.add(a.partial_max[at], a.partial_sum[at], reinterpret_cast<const float4*>(a.partial_out)[static_cast<i64>(parts.first + i) * all + from + x]);
      }
    }
    for (int lanes = wide; lanes < 32; lanes <<= 1) sum.add(sum.of_lane_xor(lanes));
    int together = max_int(wide, 32), row = threadIdx.x / together, place = threadIdx.x % together;
    if (place < wide) shelf[row * wide + place] = sum;
    __syncthreads();
    if (threadIdx.x < count) {
      for (int i = 1; i < MERGE_THREADS / together; i++) sum.add(shelf[i * wide + threadIdx.x]);
      float inverse = 1.f / sum.l;
      uint2 packed = {pack_model(sum.o.x * inverse, sum.o.y * inverse), pack_model(sum.o.z * inverse, sum.o.w * inverse)};
      reinterpret_cast<uint2*>(out)[from + threadIdx.x] = packed;
    }
    __syncthreads();
  }
}

// The next three are `siftkv.kernels.reference.scores` and the stored form of scores, operation by operation.
DEV float updated_mean(float mean, float attention, i64 position, i64 now, i64 interval, i64 horizon) {
  i64 later = now > position ? now - position : 0, known = later < horizon ? later : horizon, counted = known < interval ? known : interval;
  float weight = __fdiv_rn(static_cast<float>(counted), static_cast<float>(known > 1 ? known : 1));
  return __fadd_rn(mean, __fmul_rn(__fadd_rn(attention, -mean), weight));
}
DEV u32 rounding_noise(i64 position, i64 now) {
  u32 h = static_cast<u32>(position) * 0x9E3779B1u ^ static_cast<u32>(now) * 0x85EBCA77u;
  h = (h ^ (h >> 15)) * 0x2C1B3C6Du;
  return ((h ^ (h >> 12)) >> 7) & 0x1FFFu;
}
DEV float score_value(u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 13) * 0x1p112f * 0x1p-15f; }
DEV u16 score_bits(float score, i64 position, i64 now) {
  u32 bits = __float_as_uint(fminf(fmaxf(score, 0.f), 1.f) * 0x1p15f * 0x1p-112f);
  return static_cast<u16>((bits + rounding_noise(position, now)) >> 13);
}

struct Refresh {
  i64 now, interval, horizon;
  const float* exponent;  // log2 of the sum of exponentials, a query head each
  DEV float attention(const float* logits) const {
    float best = 0.f;
    for (int g = 0; g < GROUP; g++) best = fmaxf(best, exp2_fast(logits[g] - exponent[g]));
    return best;
  }
};
template <class F> DEV void refresh_tier(const Arguments& a, const Refresh& r, Segment s, int head) {
  const int* table = table_of(a, s.slot, head, F::INDEX);
  const u8* skip = a.page_skip + (SKIPS ? table_start(a, s.slot, head, F::INDEX) : 0);
#pragma unroll 4
  for (int i = blockIdx.y * MERGE_THREADS + threadIdx.x; i < s.tokens; i += gridDim.y * MERGE_THREADS) {
    if (SKIPS && skip[i / F::TOKENS * table_step(F::INDEX)]) continue;
    u8* page = a.pages + static_cast<i64>(table[i / F::TOKENS * table_step(F::INDEX)]) * PAGE_BYTES;
    u16* score = reinterpret_cast<u16*>(page + F::SCORE) + i % F::TOKENS;
    i64 position = 0;
    if constexpr (F::POSITIONS) position = reinterpret_cast<const int*>(page + F::POSITION)[i % F::TOKENS];
    float mean = updated_mean(score_value(*score), r.attention(a.logits + static_cast<i64>(s.logits + i) * LOGIT_ROW), position, r.now, r.interval, r.horizon);
    *score = score_bits(mean, position, r.now);
  }
}
DEV void refresh_window(const Arguments& a, const Refresh& r, Segment s, int head) {
  Window w = window_of(a, s.slot);
  float* scores = a.window_score + head_slot(a, s.slot, head) * (SINK_ROWS + RING_ROWS);
  for (int i = blockIdx.y * MERGE_THREADS + threadIdx.x; i < s.tokens; i += gridDim.y * MERGE_THREADS) {
    float* score = scores + w.row(i);
    *score = updated_mean(*score, r.attention(a.logits + static_cast<i64>(s.logits + i) * LOGIT_ROW), w.position(i), r.now, r.interval, r.horizon);
  }
}
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) merge(const __grid_constant__ Arguments a) {
  __shared__ float exponent[GROUP];
  int row = blockIdx.x, head = row % KV_HEADS, pair = pair_of(a, row);
  // What `prepare` wrote stands already: `attend` waited for it before it let this kernel start.
  Parts parts = parts_of(a, pair);
  int slot = a.segments[pair * KINDS].slot;
  bool due = is_due(a, slot);
  wait_for_predecessor();
  merge_out(a, parts, a.out + static_cast<i64>(row) * GROUP * HEAD_DIM);
  if (!due) return;
  merge_exponents(a, parts, exponent);
  Refresh r = {a.seen[slot], a.refresh[slot], a.horizon[slot], exponent};
  Segment window = a.segments[pair * KINDS];
  if (window.logits >= 0) refresh_window(a, r, window, head);
#define REFRESH_TIER(T) \
  if constexpr (Tier<T>::SCORES) { \
    Segment s = a.segments[pair * KINDS + 1 + T]; \
    if (s.logits >= 0) refresh_tier<Tier<T>>(a, r, s, head); \
  }
  EACH_TIER(REFRESH_TIER)
}
