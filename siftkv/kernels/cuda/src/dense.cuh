// Tiles of 16 tokens in the model's dtype: window rows and dense pages, token-major. Rows are copied to shared memory 16 bytes apart from being
// adjacent, so that `ldmatrix` meets no bank twice; log-weights stand behind them.
constexpr int DENSE_ROW = 2 * HEAD_DIM + 16;
// Arrivals that a stage's barrier waits for: where bulk copies fill it, one thread's, who says how many bytes to expect.
constexpr int ARRIVALS = BULK && QUANTISED_TIERS > 0 ? 1 : 32 * TEAM;

template <int TOKENS, bool WEIGHTS = false> struct Dense {
  static DEV void begin(Online& o, const Arguments& a, int pair) { o.load_query(a, pair, 0); }

  // Copies `count` tokens by the threads of a team; `rows(token, is_value)` gives the address of a row. A bulk copy a row where pages are quantised; where
  // all rows are dense, pieces that each fetch 128 bytes into the second-level cache are faster.
  template <class Rows> static DEV void copy(u32 stage, u32 barrier, int count, int thread, Rows rows) {
    if constexpr (!BULK || QUANTISED_TIERS == 0) {
      copy_rows_together<2 * HEAD_DIM, 32 * TEAM>(
          2 * count, thread, [=](int i) { return stage + (i < count ? i : i - count + TOKENS) * DENSE_ROW; },
          [&](int i) { return rows(i < count ? i : i - count, i >= count); });
      return arrive_with_copies(barrier);
    }
    if (thread == 0) barrier_expect(barrier, count * 4 * HEAD_DIM);
    for (int i = thread; i < 2 * count; i += 32 * TEAM) {
      int is_value = i >= count, token = i - is_value * count;
      bulk_copy(stage + (token + is_value * TOKENS) * DENSE_ROW, rows(token, is_value), 2 * HEAD_DIM, barrier);
    }
  }
  // log2(e) times the log-weight of a row's token, 0 where the tier has none.
  static DEV float weight(u32 stage, int token) {
    if constexpr (!WEIGHTS) return 0.f;
    return __uint_as_float(load_shared(stage + 2 * TOKENS * DENSE_ROW + 4 * token)) * LOG2_E;
  }
  static DEV void tile(Online& o, u32 stage, int base, int count, float* logits) {
    int lane = threadIdx.x & 31, g = lane >> 2;
    // Rows beyond the last token are read from the last token, whose numbers are sound.
    int key_token = min_int(base + (lane & 15), count - 1), value_token = min_int(base + (lane & 7) + 8 * (lane >> 4), count - 1);
    u32 keys = stage + key_token * DENSE_ROW + 16 * (lane >> 4), values = stage + (TOKENS + value_token) * DENSE_ROW + 16 * (lane >> 3 & 1);
    float s[NT][1][2][2], dot[NT][4] = {}, more[2];
#pragma unroll
    for (int h = 0; h < 2; h++) more[h] = weight(stage, min_int(base + g + 8 * h, count - 1));
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
      u32 x[4];
      ldmatrix(x, keys + 32 * i);
#pragma unroll
      for (int n = 0; n < NT; n++) mma_model(dot[n], x, o.query[(n * (HEAD_DIM / 16) + i) * 2], o.query[(n * (HEAD_DIM / 16) + i) * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        bool inside = base + g + 8 * h < count;
#pragma unroll
        for (int c = 0; c < 2; c++) s[n][0][h][c] = inside ? dot[n][2 * h + c] * LOGIT_SCALE + more[h] : -__int_as_float(0x7f800000);
        if (logits != nullptr && inside) keep_logits(logits + (base + g + 8 * h) * LOGIT_ROW, n, s[n][0][h][0], s[n][0][h][1]);
      }
    const float one[1][2] = {{1.f, 1.f}};
    o.make_room<1>(s, one);
    u32 weight[NT][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float p0 = exp2_fast(s[n][0][h][0] - o.m[n][0]), p1 = exp2_fast(s[n][0][h][1] - o.m[n][1]);
        o.l[n][0] += p0, o.l[n][1] += p1;
        weight[n][h] = transpose(pack_model(p0, p1));
      }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
      u32 x[4];
      ldmatrix_trans(x, values + 32 * i);
#pragma unroll
      for (int n = 0; n < NT; n++) mma_model(o.acc[n][i], x, weight[n][0], weight[n][1]);
    }
  }
  static DEV void end(Online&) {}
  static DEV void attend(Online& o, const Arguments&, u32 stage, int count, float* logits, int, int rank) {
    for (int base = 16 * rank; base < count; base += 16 * TEAM) tile(o, stage, base, count, logits);
  }
};
