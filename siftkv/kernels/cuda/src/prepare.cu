// Before attention: new keys and values enter the window, queries become operands of the tensor cores, segments are laid out.
constexpr int PREPARE_THREADS = 256;
constexpr float QUERY_SCALE = LOGIT_SCALE;  // log2(e) / sqrt(D): logits are exponents of two

// Tokens of each kind of one head, and what they add to the line of cost (high half) and to the logits that are due (low half).
struct Head {
  int slot, tokens[KINDS];
  bool due;
  DEV u64 size(int kind) const {
    int cost = tokens[kind] > 0 ? ceil_div(tokens[kind], block_tokens(kind)) * block_cost(kind) + SEGMENT_COST : 0;
    // Behind a head's last block, so that no share between its first and its last is without a block (see `least_share`).
    if (kind == KINDS - 1) cost += HEAD_COST;
    return static_cast<u64>(static_cast<u32>(cost)) << 32 | static_cast<u32>(due && keeps_scores(kind) ? tokens[kind] : 0);
  }
};
DEV Head read_head(const Arguments& a, int pair) {
  Head h;
  h.slot = static_cast<int>(a.slots[request_of(a, pair)]);
  const int* lengths = a.lengths + head_slot(a, h.slot, head_of(a, pair)) * TIERS;
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
    Head h = read_head(a, i);
#pragma unroll
    for (int kind = 0; kind < KINDS; kind++) mine += h.size(kind);
  }
  u64 at = block_scan(mine, all);
  if (threadIdx.x == 0) {
    int total = static_cast<int>(all >> 32);
    a.segments[pairs * KINDS] = {total, 0, 0, -1};
    *a.line = {total <= a.teams * LEAST_SHARE ? LEAST_SHARE : max_int(ceil_div(total, a.teams), PAIR_SHARE), total};
  }
#pragma unroll 2
  for (int i = from; i < to; i++) {
    Head h = read_head(a, i);
#pragma unroll
    for (int kind = 0; kind < KINDS; kind++) {
      i64 logits = static_cast<i64>(at & ALL);
      bool room = h.due && keeps_scores(kind) && logits + h.tokens[kind] <= a.logits_room;
      reinterpret_cast<int4*>(a.segments)[i * KINDS + kind] = {static_cast<int>(at >> 32), h.tokens[kind], h.slot, room ? static_cast<int>(logits) : -1};
      at += h.size(kind);
    }
  }
}

// The new key and value enter the window, and the new queries the ring of the request's last ones.
DEV void append(const Arguments& a, int request, int head, int slot) {
  i64 now = a.seen[slot], row = now < a.sinks[slot] ? now : SINK_ROWS + static_cast<u32>(now) % RING_ROWS;
  i64 to = head_slot(a, slot, head) * (SINK_ROWS + RING_ROWS) + row;
  for (int d = threadIdx.x; d < HEAD_DIM; d += PREPARE_THREADS) {
    a.window_k[to * HEAD_DIM + d] = a.k[request * a.k_row + head * HEAD_DIM + d];
    a.window_v[to * HEAD_DIM + d] = a.v[request * a.v_row + head * HEAD_DIM + d];
  }
  if (threadIdx.x == 0) a.window_score[to] = 0.f;
  if constexpr (QUERY_ROWS > 0) {
    i64 place = (static_cast<i64>(slot) * LAYERS + a.layer) * QUERY_ROWS + static_cast<u32>(now) % QUERY_ROWS;
    u16* queries = a.queries + (place * KV_HEADS + head) * GROUP * HEAD_DIM;
    const u16* from = a.q + request * a.q_row + head * GROUP * HEAD_DIM;
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += PREPARE_THREADS) queries[i] = from[i];
  }
}

// Queries stand in shared memory so that the lanes that write operands meet few banks twice.
constexpr int PLAIN_ROW = HEAD_DIM + 8, TURNED_ROW = (HEAD_DIM + HEAD_DIM / 16 * 2 + 31) / 32 * 32 + 1;
DEV int turned_at(int n, int channel) { return n * TURNED_ROW + channel + (channel >> 4) * 2; }

// One warp a query: `x` as it is, `turned` scaled and, where keys are rotated, after a signed block Hadamard transform: signs (and scale), then the
// butterflies of each block, channels a multiple of 32 apart in one lane.
DEV void load_queries(const Arguments& a, int request, int head, float* x, float* turned) {
  constexpr int pieces = (HEAD_DIM + 31) / 32;
  int lane = threadIdx.x & 31;
  for (int n = threadIdx.x >> 5; n < GROUP; n += PREPARE_THREADS / 32) {
    const u16* from = a.q + request * a.q_row + (head * GROUP + n) * HEAD_DIM;
    float y[pieces];
#pragma unroll
    for (int i = 0; i < pieces; i++) y[i] = lane + 32 * i < HEAD_DIM ? model_to_float(from[lane + 32 * i]) : 0.f;
#pragma unroll
    for (int i = 0; i < pieces; i++) {
      int c = lane + 32 * i;
      if (c >= HEAD_DIM) break;
      x[n * PLAIN_ROW + c] = y[i];
      y[i] *= HADAMARD_BLOCK > 1 ? a.signs[c] * QUERY_SCALE : QUERY_SCALE;
    }
    if constexpr (QUANTISED_TIERS == 0) continue;
#pragma unroll
    for (int half = 1; half < HADAMARD_BLOCK; half *= 2)
#pragma unroll
      for (int i = 0; i < pieces; i++) {
        if (half < 32) {
          float other = shuffle_xor(y[i], half);
          y[i] = lane & half ? other - y[i] : y[i] + other;
        } else if (!(i & half / 32)) {
          float p = y[i], q = y[i + half / 32];
          y[i] = p + q, y[i + half / 32] = p - q;
        }
      }
#pragma unroll
    for (int i = 0; i < pieces; i++)
      if (lane + 32 * i < HEAD_DIM) turned[turned_at(n, lane + 32 * i)] = y[i];
  }
}

// Scale of the channels of a plane: codes of higher planes stand higher in the operand, by `KB` bits a plane.
template <class F> DEV float plane_scale(int plane, int sign = 1) { return __int_as_float((127 + sign * (8 - F::KB * (plane + 1))) << 23); }
template <class F> DEV float key_operand(const float* x, int n, int channel) { return x[turned_at(n, channel)] * plane_scale<F>(channel / F::KEY_ROW); }

// Two adjacent operands of a lane, as `Quantised::key_products` takes them.
template <class F> DEV u32 query_word(const float* x, int r, int lane) {
  int g = lane >> 2, t = lane & 3, half = r & 1, plane = r / 2 % F::KEY_PLANES, w = r / 2 / F::KEY_PLANES % F::KEY_WORDS;
  int n = r / 2 / F::KEY_PLANES / F::KEY_WORDS * 8 + g, byte = 4 * (t * F::KEY_WORDS + w) + half, channel = byte + plane * F::KEY_ROW;
  if (n >= GROUP || byte >= F::KEY_ROW) return 0u;
  return pack_half(key_operand<F>(x, n, channel), key_operand<F>(x, n, channel + 2));
}
template <class F> DEV void write_query(const Arguments& a, const float* x, int pair) {
  if constexpr (F::DENSE) return;
  constexpr int words = NT * F::KEY_WORDS * F::KEY_PLANES * 2;
  uint4* to = reinterpret_cast<uint4*>(a.query + static_cast<i64>(pair * KINDS + 1 + F::INDEX) * QUERY_WORDS * 32);
  for (int i = threadIdx.x; i < (words + 3) / 4 * 32; i += PREPARE_THREADS) {
    int lane = i & 31, r = i / 32 * 4;
    to[i] = {query_word<F>(x, r, lane), query_word<F>(x, r + 1, lane), query_word<F>(x, r + 2, lane), query_word<F>(x, r + 3, lane)};
  }
  // Sums of what was stored, so that the zero-point's product has the same rounding.
  constexpr int span = HEAD_DIM / F::KG;
  for (int i = threadIdx.x >> 5; i < NT * 8 * F::KG; i += PREPARE_THREADS / 32) {
    int n = i / F::KG, first = i % F::KG * span;
    float sum = 0.f;
    if (n < GROUP) {
      for (int c = first + (threadIdx.x & 31); c < first + span; c += 32)
        sum += half_low(pack_half(key_operand<F>(x, n, c), 0.f)) * plane_scale<F>(c / F::KEY_ROW, -1);
      for (int o = 16; o; o >>= 1) sum += shuffle_xor(sum, o);
    }
    if ((threadIdx.x & 31) == 0) a.query_sum[(pair * KINDS + 1 + F::INDEX) * NT * 8 * MOST_KEY_GROUPS + i] = sum;
  }
}
DEV u32 plain_word(const float* x, int r, int lane) {
  int n = r / (HEAD_DIM / 8) * 8 + (lane >> 2), d = r % (HEAD_DIM / 8) * 8 + 2 * (lane & 3);
  return n < GROUP ? pack_model(x[n * PLAIN_ROW + d], x[n * PLAIN_ROW + d + 1]) : 0u;
}
DEV void write_plain_query(const Arguments& a, const float* x, int pair) {
  uint4* to = reinterpret_cast<uint4*>(a.query + static_cast<i64>(pair * KINDS) * QUERY_WORDS * 32);
  for (int i = threadIdx.x; i < (NT * HEAD_DIM / 8 + 3) / 4 * 32; i += PREPARE_THREADS) {
    int lane = i & 31, r = i / 32 * 4;
    to[i] = {plain_word(x, r, lane), plain_word(x, r + 1, lane), plain_word(x, r + 2, lane), plain_word(x, r + 3, lane)};
  }
}
// q . RoPE_p(bias) = sum over pairs of A cos + B sin: the coefficients, of the pairs that each lane of `Bias` has.
DEV void write_bias_query(const Arguments& a, const float* x, int pair, int head) {
  const float* bias = a.bias + (a.layer * KV_HEADS + head) * HEAD_DIM;
  int at = a.layer * KV_HEADS + head, rank = a.rank[at];
  float2* to = reinterpret_cast<float2*>(a.bias_query + static_cast<i64>(pair) * BIAS_BLOCKS * NT * 32);
  for (int i = threadIdx.x; i < BIAS_BLOCKS * NT * 64; i += PREPARE_THREADS) {
    int half = i & 1, lane = i / 2 & 31, n = i / 64 % NT * 8 + (lane >> 2), block = i / 64 / NT;
    int j = block * 8 + half * 4 + (lane & 3);
    float2 term = {0.f, 0.f};
    if (n < GROUP && j < rank) {
      int d = a.pairs[at * PAIRS + j];
      float q0 = x[n * PLAIN_ROW + d] * QUERY_SCALE, q1 = x[n * PLAIN_ROW + d + HEAD_DIM / 2] * QUERY_SCALE;
      float b0 = bias[d], b1 = bias[d + HEAD_DIM / 2];
      term = {q0 * b0 + q1 * b1, q1 * b0 - q0 * b1};
    }
    to[i] = term;
  }
}
DEV void prepare_head(const Arguments& a, int row) {
  __shared__ float x[GROUP * PLAIN_ROW], turned[GROUP * TURNED_ROW];
  int request = row / KV_HEADS, head = row % KV_HEADS, pair = pair_of(a, row), slot = static_cast<int>(a.slots[request]);
  load_queries(a, request, head, x, turned);
  append(a, request, head, slot);
  __syncthreads();
  write_plain_query(a, x, pair);
  if constexpr (BIAS_BLOCKS > 0) write_bias_query(a, x, pair, head);
#define WRITE_TIER(T) write_query<Tier<T>>(a, turned, pair);
  EACH_TIER(WRITE_TIER)
}
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS, 6) prepare(const __grid_constant__ Arguments a) {
  let_successor_start();
  if (blockIdx.x == 0) lay_out_segments(a);
  else prepare_head(a, blockIdx.x - 1);
}
