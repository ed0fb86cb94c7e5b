// The online softmax of one warp over one kv head, all its query heads at once: query head n stands in column n of the tensor cores' tiles.
//
// `m` is a reference and not always the maximum: probabilities are 2^(logit - m) and may reach 2^LIFT, so that the exact maximum is needed only
// when one would pass that. SETTLE leaves room for it: a fresh `m` stands that far below the maximum, which also keeps small products in fp16.
constexpr float LIFT = 9.f, SETTLE = 3.f, WIDE_SCALE = 64.f;

struct Online {
  float acc[NT][HEAD_DIM / 16][4];  // channels 16 i + g and 16 i + 8 + g of columns 2 t and 2 t + 1
  float m[NT][2], l[NT][2];
  float zero[NT][MOST_VALUE_GROUPS][2];  // sum of probability times zero-point
  u32 query[QUERY_WORDS];
  float query_sum[NT][MOST_KEY_GROUPS][2];
  Terms terms;

  DEV void clear() {
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 16; i++) acc[n][i][0] = acc[n][i][1] = acc[n][i][2] = acc[n][i][3] = 0.f;
      m[n][0] = m[n][1] = NEVER;
      l[n][0] = l[n][1] = 0.f;
    }
    clear_zero();
  }
  DEV void clear_zero() {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int i = 0; i < MOST_VALUE_GROUPS; i++) zero[n][i][0] = zero[n][i][1] = 0.f;
  }
  DEV void rise(int n, float top0, float top1) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
      top0 = fmaxf(top0, shuffle_xor(top0, o));
      top1 = fmaxf(top1, shuffle_xor(top1, o));
    }
    float next0 = fmaxf(m[n][0], top0 - SETTLE), next1 = fmaxf(m[n][1], top1 - SETTLE);
    float e0 = exp2_fast(m[n][0] - next0), e1 = exp2_fast(m[n][1] - next1);
    m[n][0] = next0, m[n][1] = next1;
    l[n][0] *= e0, l[n][1] *= e1;
#pragma unroll
    for (int i = 0; i < MOST_VALUE_GROUPS; i++) zero[n][i][0] *= e0, zero[n][i][1] *= e1;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) acc[n][i][0] *= e0, acc[n][i][1] *= e1, acc[n][i][2] *= e0, acc[n][i][3] *= e1;
  }
  // Logits `s` of 2 U tokens a lane; `scale` is the largest value scale of each, by which probabilities will be multiplied in fp16.
  template <int U> DEV void make_room(const float (&s)[NT][U][2][2], const float (&scale)[U][2]) {
    bool high = false;
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int h = 0; h < 2; h++) high |= scale[u][h] > WIDE_SCALE;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        float top = s[n][0][0][c];
#pragma unroll
        for (int u = 0; u < U; u++) top = fmaxf(top, fmaxf(s[n][u][0][c], s[n][u][1][c]));
        high |= top > m[n][c] + LIFT;
      }
    if (!__any_sync(ALL, high)) return;
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float top[2] = {NEVER, NEVER};
#pragma unroll
      for (int u = 0; u < U; u++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float excess = scale[u][h] > WIDE_SCALE ? log2_fast(scale[u][h] / WIDE_SCALE) : 0.f;
          top[0] = fmaxf(top[0], s[n][u][h][0] + excess);
          top[1] = fmaxf(top[1], s[n][u][h][1] + excess);
        }
      rise(n, top[0], top[1]);
    }
  }
  DEV void load_query(const Arguments& a, int pair, int kind) {
    const uint4* from = reinterpret_cast<const uint4*>(a.query + static_cast<i64>(pair * KINDS + kind) * QUERY_WORDS * 32) + (threadIdx.x & 31);
#pragma unroll
    for (int i = 0; i < QUERY_WORDS; i += 4) {
      uint4 x = from[i / 4 * 32];
      query[i] = x.x, query[i + 1] = x.y, query[i + 2] = x.z, query[i + 3] = x.w;
    }
  }
  DEV void store(const Arguments& a, int part) {
    int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        int column = n * 8 + 2 * t + c;
        float sum = l[n][c];
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) sum += shuffle_xor(sum, o);
        if (g == 0) a.partial_max[part * NT * 8 + column] = m[n][c], a.partial_sum[part * NT * 8 + column] = sum;
        if (column >= GROUP) continue;
        float* to = a.partial_out + (static_cast<i64>(part) * GROUP + column) * HEAD_DIM + g;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) to[16 * i] = acc[n][i][c], to[16 * i + 8] = acc[n][i][2 + c];
      }
  }
};

// Logits of a token's query heads, where a refresh is due: `to` is the token's record, null where none is.
DEV void keep_logits(float* to, int n, float s0, float s1) {
  int column = n * 8 + 2 * (threadIdx.x & 3);
  if (column < GROUP) *reinterpret_cast<float2*>(to + column) = {s0, s1};
}
