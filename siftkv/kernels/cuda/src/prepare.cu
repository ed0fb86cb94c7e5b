// Before attention: new keys and values enter the window, queries become operands of the tensor cores, segments are laid out.
constexpr int PREPARE_THREADS = 256;
constexpr float QUERY_SCALE = LOGIT_SCALE;  // log2(e) / sqrt(D): logits are exponents of two

// Tokens of each kind of one head, and what they add to the line of cost (high half) and to the logits that are due (low half).
struct Head {
  int slot, tokens[KINDS];
  bool due;
  DEV u64 size(int kind) const {
    if (tokens[kind] == 0) return 0;
    u64 cost = static_cast<u32>(ceil_div(tokens[kind], block_tokens(kind)) * block_cost(kind) + SEGMENT_COST);
    return cost << 32 | static_cast<u32>(due && keeps_scores(kind) ? tokens[kind] : 0);
  }
};
DEV Head head_of(const Arguments& a, int pair) {
  Head h;
  h.slot = static_cast<int>(a.slots[pair / KV_HEADS]);
  const int* lengths = a.lengths + head_slot(a, h.slot, pair % KV_HEADS) * TIERS;
#pragma unroll
  for (int tier = 0; tier < TIERS; tier++) h.tokens[1 + tier] = lengths[tier];
  h.tokens[0] = window_of(a, h.slot).tokens;
  h.due = is_due(a, h.slot);
  return h;
}
// Exclusive sum over the threads of the block; `total` is the sum of all.
DEV u64 block_scan(u64 x, u64& total) {
  __shared__ u64 warps[PREPARE_THREADS / 32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u64 sum = x;
  for (int o = 1; o < 32; o <<= 1) {
    u64 other = __shfl_up_sync(ALL, sum, o);
    if (lane >= o) sum += other;
  }
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  u64 before = 0;
  total = 0;
  for (int i = 0; i < PREPARE_THREADS / 32; i++) {
    if (i < warp) before += warps[i];
    total += warps[i];
  }
  return before + sum - x;
}
DEV void lay_out_segments(const Arguments& a) {
  int pairs = a.batch * KV_HEADS, each = ceil_div(pairs, PREPARE_THREADS);
  int from = min_int(threadIdx.x * each, pairs), to = min_int(from + each, pairs);
  u64 mine = 0, all;
#pragma unroll 4
  for (int i = from; i < to; i++) {
    Head h = head_of(a, i);
#pragma unroll
    for (int kind = 0; kind < KINDS; kind++) mine += h.size(kind);
  }
  u64 at = block_scan(mine, all);
  if (threadIdx.x == 0) {
    int total = static_cast<int>(all >> 32);
    a.segments[pairs * KINDS] = {total, 0, 0, -1};
    *a.line = {max_int(ceil_div(total, a.teams), LEAST_SHARE), total};
  }
#pragma unroll 2
  for (int i = from; i < to; i++) {
    Head h = head_of(a, i);
#pragma unroll
    for (int kind = 0; kind < KINDS; kind++) {
      i64 logits = static_cast<i64>(at & ALL);
      bool room = h.due && keeps_scores(kind) && logits + h.tokens[kind] <= a.logits_room;
      reinterpret_cast<int4*>(a.segments)[i * KINDS + kind] = {static_cast<int>(at >> 32), h.tokens[kind], h.slot, room ? static_cast<int>(logits) : -1};
      at += h.size(kind);
    }
  }
}

DEV void append(const Arguments& a, int request, int head, int slot) {
  i64 now = a.seen[slot], row = now < a.sinks[slot] ? now : SINK_ROWS + static_cast<u32>(now) % RING_ROWS;
  i64 to = head_slot(a, slot, head) * (SINK_ROWS + RING_ROWS) + row;
  for (int d = threadIdx.x; d < HEAD_DIM; d += PREPARE_THREADS) {
    a.window_k[to * HEAD_DIM + d] = a.k[request * a.k_row + head * HEAD_DIM + d];
    a.window_v[to * HEAD_DIM + d] = a.v[request * a.v_row + head * HEAD_DIM + d];
  }
  if (threadIdx.x == 0) a.window_score[to] = 0.f;
}

// The new token's queries enter the ring of the request's last ones.
DEV void append_queries(const Arguments& a, int request, int head, int slot) {
  i64 row = (static_cast<i64>(slot) * LAYERS + a.layer) * QUERY_ROWS + static_cast<u32>(a.seen[slot]) % QUERY_ROWS;
  u16* to = a.queries + (row * KV_HEADS + head) * GROUP * HEAD_DIM;
  const u16* from = a.q + request * a.q_row + head * GROUP * HEAD_DIM;
  for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += PREPARE_THREADS) to[i] = from[i];
}

// Scales queries and, where keys are rotated, applies a signed block Hadamard transform: signs (and scale), then the butterflies of each block.
DEV void rotate(float (&x)[GROUP * HEAD_DIM], const float* signs) {
  for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += PREPARE_THREADS) x[i] *= HADAMARD_BLOCK > 1 ? signs[i % HEAD_DIM] * QUERY_SCALE : QUERY_SCALE;
#pragma unroll
  for (int half = 1; half < HADAMARD_BLOCK; half *= 2) {
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM / 2; i += PREPARE_THREADS) {
      int low = i / half * 2 * half + i % half;
      float p = x[low], q = x[low + half];
      x[low] = p + q;
      x[low + half] = p - q;
    }
  }
  __syncthreads();
}

// Scale of the channels of a plane: codes of higher planes stand higher in the operand, by `KB` bits a plane.
template <class F> DEV float plane_scale(int plane, int sign = 1) { return __int_as_float((127 + sign * (8 - F::KB * (plane + 1))) << 23); }
template <class F> DEV float key_operand(const float* x, int channel) { return x[channel] * plane_scale<F>(channel / F::KEY_ROW); }

template <class F> DEV void write_query(const Arguments& a, const float (&x)[GROUP * HEAD_DIM], int pair) {
  if constexpr (F::DENSE) return;
  constexpr int words = NT * F::KEY_WORDS * F::KEY_PLANES * 2;
  u32* to = a.query + static_cast<i64>(pair * KINDS + 1 + F::INDEX) * QUERY_WORDS * 32;
  for (int i = threadIdx.x; i < words * 32; i += PREPARE_THREADS) {
    int lane = i & 31, r = i >> 5, g = lane >> 2, t = lane & 3;
    int half = r & 1, plane = r / 2 % F::KEY_PLANES, w = r / 2 / F::KEY_PLANES % F::KEY_WORDS, n = r / 2 / F::KEY_PLANES / F::KEY_WORDS * 8 + g;
    int byte = 4 * (t * F::KEY_WORDS + w) + half, channel = byte + plane * F::KEY_ROW;
    bool inside = n < GROUP && byte < F::KEY_ROW;
    const float* row = x + n * HEAD_DIM;
    to[(r / 4 * 32 + lane) * 4 + r % 4] = inside ? pack_half(key_operand<F>(row, channel), key_operand<F>(row, channel + 2)) : 0u;
  }
  // Sums of what was stored, so that the zero-point's product has the same rounding.
  constexpr int span = HEAD_DIM / F::KG;
  for (int i = threadIdx.x >> 5; i < NT * 8 * F::KG; i += PREPARE_THREADS / 32) {
    int n = i / F::KG, first = i % F::KG * span;
    float sum = 0.f;
    for (int c = first + (threadIdx.x & 31); n < GROUP && c < first + span; c += 32)
      sum += half_low(pack_half(key_operand<F>(x + n * HEAD_DIM, c), 0.f)) * plane_scale<F>(c / F::KEY_ROW, -1);
    for (int o = 16; o; o >>= 1) sum += shuffle_xor(sum, o);
    if ((threadIdx.x & 31) == 0) a.query_sum[(pair * KINDS + 1 + F::INDEX) * NT * 8 * MOST_KEY_GROUPS + i] = sum;
  }
}
DEV void write_plain_query(const Arguments& a, const float (&x)[GROUP * HEAD_DIM], int pair) {
  u32* to = a.query + static_cast<i64>(pair * KINDS) * QUERY_WORDS * 32;
  for (int i = threadIdx.x; i < NT * HEAD_DIM / 8 * 32; i += PREPARE_THREADS) {
    int lane = i & 31, r = i >> 5, n = r / (HEAD_DIM / 8) * 8 + (lane >> 2), d = r % (HEAD_DIM / 8) * 8 + 2 * (lane & 3);
    const float* row = x + n * HEAD_DIM + d;
    to[(r / 4 * 32 + lane) * 4 + r % 4] = n < GROUP ? pack_model(row[0], row[1]) : 0u;
  }
}
// q . RoPE_p(bias) = sum over pairs of A cos + B sin. Coefficients in two fp16 parts each.
DEV void write_bias_query(const Arguments& a, const float (&x)[GROUP * HEAD_DIM], int pair, int head) {
  const float* bias = a.bias + (a.layer * KV_HEADS + head) * HEAD_DIM;
  int at = a.layer * KV_HEADS + head, rank = a.rank[at];
  for (int i = threadIdx.x; i < BIAS_BLOCKS * NT * 64; i += PREPARE_THREADS) {
    int half = i & 1, lane = i / 2 & 31, n = i / 64 % NT * 8 + (lane >> 2), block = i / 64 / NT;
    int j = block * 8 + half * 4 + (lane & 3);
    float cosine = 0.f, sine = 0.f;
    if (n < GROUP && j < rank) {
      int d = a.pairs[at * PAIRS + j];
      float q0 = x[n * HEAD_DIM + d] * QUERY_SCALE, q1 = x[n * HEAD_DIM + d + HEAD_DIM / 2] * QUERY_SCALE;
      float b0 = bias[d], b1 = bias[d + HEAD_DIM / 2];
      cosine = q0 * b0 + q1 * b1;
      sine = q1 * b0 - q0 * b1;
    }
    u32 high = pack_half(cosine, sine);
    u32* to = a.bias_query + ((static_cast<i64>(pair) * BIAS_BLOCKS * NT + i / 64) * 32 + lane) * 4 + half;
    to[0] = high;
    to[2] = pack_half(cosine - half_low(high), sine - half_high(high));
  }
}
DEV void prepare_head(const Arguments& a, int pair) {
  __shared__ float x[GROUP * HEAD_DIM];
  int request = pair / KV_HEADS, head = pair % KV_HEADS;
  append(a, request, head, static_cast<int>(a.slots[request]));
  if constexpr (QUERY_ROWS > 0) append_queries(a, request, head, static_cast<int>(a.slots[request]));
  for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += PREPARE_THREADS)
    x[i] = model_to_float(a.q[request * a.q_row + head * GROUP * HEAD_DIM + i]);
  __syncthreads();
  write_plain_query(a, x, pair);
  if constexpr (BIAS_BLOCKS > 0) write_bias_query(a, x, pair, head);
  __syncthreads();
  if constexpr (QUANTISED_TIERS > 0) rotate(x, a.signs);
#define WRITE_TIER(T) write_query<Tier<T>>(a, x, pair);
  EACH_TIER(WRITE_TIER)
}
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare(const __grid_constant__ Arguments a) {
  let_successor_start();
  if (blockIdx.x == 0) lay_out_segments(a);
  else prepare_head(a, blockIdx.x - 1);
}
