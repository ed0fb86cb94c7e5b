// Tiles of quantised pages. Codes are used as fp16 subnormals: a mask leaves code * 2^(bits * plane) in the low bits of each half, whose value is
// that integer times 2^-24, and the tensor cores multiply subnormals exactly. Scales of planes are in the query (keys) and in `unit` (values).
//
// Token of row (h, g) of tile u: 8 (g / 2) + 2 (g % 2) + h + 4 u in tiles of 32, 4 (g / 2) + 2 (g % 2) + h in tiles of 16. So a lane's keys are adjacent
// tokens, and the tokens 2 t and 2 t + 1 of the transposed probabilities are bytes 0, 2 (h = 0) and 1, 3 (h = 1) of one word of values.
template <int BITS> DEV constexpr u32 plane_mask(int plane) { return ((1u << BITS) - 1u) * 0x00010001u << (BITS * plane); }
// Codes of bytes 1 and 3, where those of bytes 0 and 2 stand.
template <int BITS> DEV u32 odd_codes(u32 x, u32 mask) { return BITS == 8 ? __byte_perm(x, 0u, 0x4341) : x >> 8 & mask; }

template <class F> struct Quantised {
  static constexpr int VALUE_PLANES = 8 / F::VB, VALUE_ROWS = HEAD_DIM / VALUE_PLANES, BLOCKS = VALUE_ROWS / 8;
  static_assert(VALUE_ROWS % 8 == 0, "an 8-channel block lies in one plane");

  // What an accumulator of channels 8 b .. 8 b + 7 counts in.
  static DEV float unit(int b) { return static_cast<float>(1 << (24 - F::VB * (b / BLOCKS))); }
  static constexpr DEV int value_group(int b) { return b * F::VG / (HEAD_DIM / 8); }

  static DEV void begin(Online& o, const Arguments& a, int pair) {
    constexpr int kind = 1 + F::INDEX;
    o.load_query(a, pair, kind);
    if constexpr (BIAS_BLOCKS > 0) o.terms.begin(a, pair);
    const float* sums = a.query_sum + (pair * KINDS + kind) * NT * 8 * MOST_KEY_GROUPS;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int k = 0; k < F::KG; k++)
#pragma unroll
        for (int c = 0; c < 2; c++) o.query_sum[n][k][c] = sums[(n * 8 + 2 * (threadIdx.x & 3) + c) * F::KG + k];
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) o.acc[n][i][j] *= 1.f / unit(2 * i + j / 2);
    }
  }
  static DEV void end(Online& o) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
      for (int v = 0; v < F::VG; v++)
#pragma unroll
        for (int c = 0; c < 2; c++)
#pragma unroll
          for (int l = 4; l < 32; l <<= 1) o.zero[n][v][c] += shuffle_xor(o.zero[n][v][c], l);
#pragma unroll
      for (int i = 0; i < HEAD_DIM / 16; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          int b = 2 * i + j / 2;
          o.acc[n][i][j] = o.acc[n][i][j] * unit(b) + o.zero[n][value_group(b)][j & 1];
        }
    }
    o.clear_zero();
  }

  template <int U> static DEV int token_of(int u, int h) {
    int g = (threadIdx.x & 31) >> 2;
    return (U == 2 ? 8 * (g >> 1) + 4 * u : 4 * (g >> 1)) + 2 * (g & 1) + h;
  }
  // dot[n][u][group]: products of query and codes, in units of 2^-(16 + KB). After each step of KEY_STEPS, `between` is called.
  template <int U> static constexpr int KEY_STEPS = U * F::KEY_WORDS * F::KEY_PLANES;
  template <int U, class Between> static DEV void key_products(float (&dot)[NT][U][F::KG][4], const Online& o, u32 page, int base, Between between) {
    u32 rows = page + F::KEY + base * F::KEY_ROW + (threadIdx.x & 3) * F::KEY_WORDS * 4;
#pragma unroll
    for (int u = 0; u < U; u++) {
      u32 low[F::KEY_WORDS], high[F::KEY_WORDS];
      load_words<F::KEY_WORDS, F::KEY_WIDE>(low, rows + token_of<U>(u, 0) * F::KEY_ROW);
      load_words<F::KEY_WORDS, F::KEY_WIDE>(high, rows + token_of<U>(u, 1) * F::KEY_ROW);
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int k = 0; k < F::KG; k++) dot[n][u][k][0] = dot[n][u][k][1] = dot[n][u][k][2] = dot[n][u][k][3] = 0.f;
#pragma unroll
      for (int w = 0; w < F::KEY_WORDS; w++)
#pragma unroll
        for (int p = 0; p < F::KEY_PLANES; p++) {
          u32 mask = plane_mask<F::KB>(p), a0 = low[w] & mask, a1 = high[w] & mask, a2 = odd_codes<F::KB>(low[w], mask), a3 = odd_codes<F::KB>(high[w], mask);
#pragma unroll
          for (int n = 0; n < NT; n++) {
            int r = ((n * F::KEY_WORDS + w) * F::KEY_PLANES + p) * 2;
            mma_half(dot[n][u][p * F::KG / F::KEY_PLANES], a0, a1, a2, a3, o.query[r], o.query[r + 1]);
          }
          between((u * F::KEY_WORDS + w) * F::KEY_PLANES + p);
        }
    }
  }
  // Scales and zero-points of the two tokens (h = 0, 1) of tile u: raw fp16 pairs.
  template <int GROUPS> static DEV void load_meta(u32 (&meta)[2][GROUPS], u32 address) {
    u32 x[2 * GROUPS];
    load_words<2 * GROUPS, GROUPS == 1 ? 2 : 4>(x, address);
#pragma unroll
    for (int k = 0; k < GROUPS; k++) meta[0][k] = x[k], meta[1][k] = x[GROUPS + k];
  }
  static DEV void load_value_meta(float (&scale)[2][F::VG], float (&zero)[2][F::VG], u32 address) {
    if constexpr (F::COMPACT) {
      constexpr float step = ((1 << F::VB) - 1) / 254.f, half = ((1 << F::VB) - 1) / 2.f;
      u32 x[F::VG];
      load_words<F::VG, 1>(x, address);
#pragma unroll
      for (int i = 0; i < 2 * F::VG; i++) {
        u32 pair = x[i / 2] >> (16 * (i & 1));
        float s = half_low((pair & 0xff) << 7);
        scale[i / F::VG][i % F::VG] = s;
        zero[i / F::VG][i % F::VG] = s * (static_cast<float>(static_cast<signed char>(pair >> 8)) * step - half);
      }
    } else {
      u32 meta[2][F::VG];
      load_meta<F::VG>(meta, address);
#pragma unroll
      for (int i = 0; i < 2 * F::VG; i++) {
        scale[i / F::VG][i % F::VG] = half_low(meta[i / F::VG][i % F::VG]);
        zero[i / F::VG][i % F::VG] = half_high(meta[i / F::VG][i % F::VG]);
      }
    }
  }

  // Products of keys and, into `bias`, the terms of what conditioning removed, which in a run stand between those.
  template <int U> static DEV void key_terms(float (&dot)[NT][U][F::KG][4], Bias<U>& bias, Online& o, const Arguments& a, int pair, u32 page, int base, int count) {
    auto token = [](int u) { return token_of<U>(u, 0); };
    bias.clear();
    if (o.terms.blocks > 0) {
      bias.find(page + F::POSITION + 4 * base, count - base, o.terms, token);
      bias.turn(o.terms, a, pair);
      if constexpr (RUNS && KEEPS)
        if (bias.run) {
          u32 rows[BIAS_BLOCKS][2][U][4];
#pragma unroll
          for (int block = 0; block < BIAS_BLOCKS; block++) bias.load_block(rows[block], o.terms, block, token);
          key_products<U>(dot, o, page, base, [&](int step) {
            constexpr int products = Bias<U>::PRODUCTS, steps = KEY_STEPS<U>;
#pragma unroll
            for (int i = step * products / steps; i < (step + 1) * products / steps; i++) bias.add_kept(o.terms, rows, i);
          });
          return;
        }
      bias.add(o.terms, a, pair, token);
    }
    key_products<U>(dot, o, page, base, [](int) {});
  }

  template <int U> static DEV void add_weights(float (&s)[NT][U][2][2], u32 page, int base) {
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float weight = __uint_as_float(load_shared(page + F::WEIGHT_STAGE + 4 * (base + token_of<U>(u, h)))) * LOG2_E;
#pragma unroll
        for (int n = 0; n < NT; n++) s[n][u][h][0] += weight, s[n][u][h][1] += weight;
      }
  }

  template <int U> static DEV void add_values(Online& o, const u32 (&weight)[NT][F::VG][U][2], u32 page, int base) {
    int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    u32 v[BLOCKS][U], rows = page + F::VALUE + g * F::TOKENS + base + 4 * U * t;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) load_words<U, U>(v[b], rows + 8 * b * F::TOKENS);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 16; j++) {
      // Tiles that share words stand together, so that few words are alive at a time.
      constexpr int shared = BLOCKS % 2 == 0 ? VALUE_PLANES : 1;
      int i = j / shared + j % shared * (HEAD_DIM / 16 / shared), b0 = 2 * i, b1 = 2 * i + 1;
      u32 mask0 = plane_mask<F::VB>(b0 / BLOCKS), mask1 = plane_mask<F::VB>(b1 / BLOCKS);
#pragma unroll
      for (int u = 0; u < U; u++) {
        u32 x = v[b0 % BLOCKS][u], y = v[b1 % BLOCKS][u];
#pragma unroll
        for (int n = 0; n < NT; n++)
          mma_half(o.acc[n][i], x & mask0, y & mask1, odd_codes<F::VB>(x, mask0), odd_codes<F::VB>(y, mask1), weight[n][value_group(b0)][u][0],
                   weight[n][value_group(b0)][u][1]);
      }
    }
  }

  template <int U> static DEV void tile(Online& o, const Arguments& a, u32 page, int base, int count, float* logits, int pair) {
    constexpr float code = 1 << (16 + F::KB);
    float dot[NT][U][F::KG][4], s[NT][U][2][2], scale[U][2][F::VG], zero[U][2][F::VG], widest[U][2];
    Bias<U> bias;
    if constexpr (BIAS_BLOCKS > 0) key_terms<U>(dot, bias, o, a, pair, page, base, count);
    else key_products<U>(dot, o, page, base, [](int) {});
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int u = 0; u < U; u++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int c = 0; c < 2; c++) s[n][u][h][c] = BIAS_BLOCKS > 0 ? bias.sum[n][u][2 * h + c] : 0.f;
#pragma unroll
    for (int u = 0; u < U; u++) {
      int first = base + token_of<U>(u, 0);
      u32 meta[2][F::KG];
      load_meta<F::KG>(meta, page + F::KEY_META + first * 4 * F::KG);
      load_value_meta(scale[u], zero[u], page + F::VALUE_META + first * (F::COMPACT ? 2 : 4) * F::VG);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        widest[u][h] = scale[u][h][0];
#pragma unroll
        for (int v = 1; v < F::VG; v++) widest[u][h] = fmaxf(widest[u][h], scale[u][h][v]);
#pragma unroll
        for (int k = 0; k < F::KG; k++) {
          float key_scale = half_low(meta[h][k]) * code, key_zero = half_high(meta[h][k]);
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int c = 0; c < 2; c++) s[n][u][h][c] = fmaf(dot[n][u][k][2 * h + c], key_scale, fmaf(key_zero, o.query_sum[n][k][c], s[n][u][h][c]));
        }
      }
    }
    if constexpr (F::WEIGHTS) add_weights<U>(s, page, base);
    if (base + 16 * U > count) {
#pragma unroll
      for (int u = 0; u < U; u++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          if (base + token_of<U>(u, h) >= count) {
            widest[u][h] = 0.f;
#pragma unroll
            for (int v = 0; v < F::VG; v++) scale[u][h][v] = zero[u][h][v] = 0.f;
#pragma unroll
            for (int n = 0; n < NT; n++) s[n][u][h][0] = s[n][u][h][1] = -__int_as_float(0x7f800000);
          }
    }
    if (logits != nullptr) {
#pragma unroll
      for (int u = 0; u < U; u++)
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
          for (int n = 0; n < NT; n++)
            if (base + token_of<U>(u, h) < count) keep_logits(logits + (base + token_of<U>(u, h)) * LOGIT_ROW, n, s[n][u][h][0], s[n][u][h][1]);
    }
    o.make_room<U>(s, widest);
    u32 weight[NT][F::VG][U][2];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int u = 0; u < U; u++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          float p0 = exp2_fast(s[n][u][h][0] - o.m[n][0]), p1 = exp2_fast(s[n][u][h][1] - o.m[n][1]);
          o.l[n][0] += p0, o.l[n][1] += p1;
#pragma unroll
          for (int v = 0; v < F::VG; v++) {
            o.zero[n][v][0] += p0 * zero[u][h][v], o.zero[n][v][1] += p1 * zero[u][h][v];
            weight[n][v][u][h] = transpose(pack_half(p0 * scale[u][h][v], p1 * scale[u][h][v]));
          }
        }
    add_values<U>(o, weight, page, base);
  }
  static DEV void attend(Online& o, const Arguments& a, u32 page, int count, float* logits, int pair, int rank) {
    constexpr int rest = F::TOKENS % 32;
    for (int base = 32 * rank; base < count; base += 32 * TEAM) {
      if (rest != 0 && rest <= 16 && F::TOKENS - base == rest) tile<1>(o, a, page, base, count, logits, pair);
      else tile<2>(o, a, page, base, count, logits, pair);
    }
  }
};
