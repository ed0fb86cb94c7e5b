// One token in the registers of a warp, and its record in a page: `siftkv.kernels.reference.quantize` and `condition`, operation by operation, so that
// the bytes are the same. Lane `l` holds channels l, l + 32, ... .
constexpr int CHANNELS = (HEAD_DIM + 31) / 32;
constexpr int SHELF_BYTES = 2 * HEAD_DIM;  // a warp's codes of one token, a byte each: keys, then values
#define INF __int_as_float(0x7f800000)
constexpr float SCORE_SCALE = 0x1p15f;

struct Token {
  float k[CHANNELS], v[CHANNELS];
  float score;
  int position;
  u16 votes = 0;
  float weight = 0.f;
};

template <class F> constexpr DEV int value_row() { return HEAD_DIM * F::VB / 8; }

// Calls `f(i, channel)` for each channel of the lane.
template <class Body> DEV void each_channel(Body f) {
#pragma unroll
  for (int i = 0; i < CHANNELS; i++) {
    int c = (threadIdx.x & 31) + 32 * i;
    if (HEAD_DIM % 32 == 0 || c < HEAD_DIM) f(i, c);
  }
}
DEV float warp_min(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x = fminf(x, shuffle_xor(x, o));
  return x;
}
DEV float warp_max(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x = fmaxf(x, shuffle_xor(x, o));
  return x;
}

// In the order of `siftkv.kernels.reference.fit.lane_sum`.
DEV float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x = __fadd_rn(x, shuffle_xor(x, o));
  return x;
}

DEV int half_toward_zero(float x) { return min_int(__float_as_int(__fmul_rn(x, 0x1p-112f)) >> 13, 0x7BFF); }
DEV float half_value(int bits) { return __fmul_rn(__int_as_float(bits << 13), 0x1p112f); }
DEV int half_up(float x) {
  int bits = half_toward_zero(x);
  return min_int(bits + (half_value(bits) < x), 0x7BFF);
}
// Bits of the largest fp16 number that is at most `x`.
DEV int half_down(float x) { return x < 0.f ? half_up(-x) | 0x8000 : half_toward_zero(fabsf(x)); }
DEV float signed_half_value(int bits) { return bits & 0x8000 ? -half_value(bits & 0x7FFF) : half_value(bits); }

DEV float score_value(u32 bits) { return __fmul_rn(half_value(static_cast<int>(bits)), 1.f / SCORE_SCALE); }
DEV u16 score_bits(float score) {
  u32 bits = __float_as_uint(__fmul_rn(__fmul_rn(fminf(fmaxf(score, 0.f), 1.f), SCORE_SCALE), 0x1p-112f));
  return static_cast<u16>((bits + 0xFFFu + (bits >> 13 & 1u)) >> 13);
}

constexpr int FITTED_BITS = 2;  // codes of at most this many bits have fitted levels

// What codes of one group are computed against, and the metadata that says so.
struct Scale {
  float scale, zero;
  u32 stored;
};
template <int BITS> DEV Scale scale_of(float low, float high) {
  constexpr float qmax = (1 << BITS) - 1;
  float excess = fmaxf(__fsub_rn(__fsub_rn(high, low), 65504.f * qmax), 0.f);
  int zero = half_down(__fadd_rn(low, excess * 0.5f));
  float zero_value = signed_half_value(zero);
  int scale = half_up(__fdiv_rn(fmaxf(__fsub_rn(high, zero_value), 0.f), qmax));
  return {half_value(scale), zero_value, static_cast<u32>(scale) | static_cast<u32>(zero) << 16};
}
template <int BITS> DEV void expand_compact(Scale& s, int scale_byte, int centre) {
  constexpr float qmax = (1 << BITS) - 1, unit = ((1 << BITS) - 1) / 254.0;
  s.scale = half_value(scale_byte << 7);
  s.zero = __fmul_rn(s.scale, __fsub_rn(__fmul_rn(static_cast<float>(centre), unit), qmax / 2.f));
}
template <int BITS> DEV Scale compact_scale_of(float low, float high) {
  constexpr float qmax = (1 << BITS) - 1, step = ((1 << BITS) - 1) / 254.0;
  low = fminf(low, 0.f), high = fmaxf(high, 0.f);
  constexpr int rounding = BITS > FITTED_BITS ? 127 : 64;
  int scale_byte = min_int((half_up(__fdiv_rn(__fsub_rn(high, low), qmax)) + rounding) >> 7, 0xF7);
  float unit = __fmul_rn(half_value(scale_byte << 7), step);
  float centre = unit > 0.f ? __fdiv_rn(__fadd_rn(low, high) * 0.5f, unit) : 0.f;
  int rounded = static_cast<int>(fminf(fmaxf(rintf(centre), -127.f), 127.f));
  Scale s;
  expand_compact<BITS>(s, scale_byte, rounded);
  s.stored = static_cast<u32>(scale_byte) | (static_cast<u32>(rounded) & 0xFFu) << 8;
  return s;
}

// `rint(x / scale)`. A product with the inverse is off by less than 1e-4 in the range of codes, so that only near ties take a division.
DEV float nearest(float x, float scale, float inverse) {
  float ratio = x * inverse, rounded = rintf(ratio);
  return fabsf(ratio - rounded) < 0.499f || inverse == 0.f ? rounded : rintf(__fdiv_rn(x, scale));
}

// The levels of codes of few bits (`siftkv.kernels.reference.fit`, operation by operation), for a group with the extremes `low` and `high`: what the lowest
// and the highest code should stand for and, in `coded`, what codes are computed against. Returns whether there is a fit.
template <int BITS, int GROUPS> DEV bool fit(const float (&x)[CHANNELS], int group, float& low, float& high, Scale& coded) {
  constexpr int span = HEAD_DIM / GROUPS;
  constexpr float n = span, qmax = (1 << BITS) - 1, normal_step = BITS == 1 ? 1.596f : 0.9957f;
  auto each_value = [&](auto f) {
    each_channel([&](int i, int c) {
      if (GROUPS == 1 || c / span == group) f(x[i]);
    });
  };
  float sum = 0.f, square = 0.f;
  each_value([&](float v) { sum = __fadd_rn(sum, v); });
  float mean = __fdiv_rn(warp_sum(sum), n);
  each_value([&](float v) { square = __fadd_rn(square, __fmul_rn(__fsub_rn(v, mean), __fsub_rn(v, mean))); });
  square = warp_sum(square);
  float step = __fdiv_rn(__fsub_rn(high, low), qmax), spread = 0.f;
  float scale = fminf(__fmul_rn(__fsqrt_rn(__fdiv_rn(square, n)), normal_step), step), zero = __fsub_rn(mean, __fmul_rn(scale, qmax / 2.f));
  for (int turn = 0; turn < 2; turn++) {
    coded.scale = scale, coded.zero = zero;
    float inverse = scale > 0.f ? __frcp_rn(scale) : 0.f, product = 0.f;
    u32 sums = 0;  // of codes, and of their squares in the upper half
    each_value([&](float v) {
      float code = fminf(fmaxf(nearest(__fsub_rn(v, zero), scale, inverse), 0.f), qmax);
      u32 whole = static_cast<u32>(code);
      sums += whole | whole * whole << 16;
      product = __fadd_rn(product, __fmul_rn(__fsub_rn(v, mean), code));
    });
    sums = __reduce_add_sync(ALL, sums), product = warp_sum(product);
    float total = static_cast<float>(sums & 0xFFFFu);
    spread = __fsub_rn(__fmul_rn(static_cast<float>(sums >> 16), n), __fmul_rn(total, total));
    if (!(spread > 0.f && product > 0.f)) return false;
    scale = turn == 0 ? __fdiv_rn(__fmul_rn(product, n), spread) : __fdiv_rn(square, product);
    zero = __fsub_rn(mean, __fdiv_rn(__fmul_rn(scale, total), n));
  }
  float error = __fsub_rn(__fdiv_rn(__fmul_rn(__fmul_rn(scale, scale), spread), n), square);
  if (!(error <= __fdiv_rn(__fmul_rn(__fmul_rn(step, n), step), 12.f) && fabsf(zero) <= 65504.f)) return false;
  low = zero, high = __fadd_rn(zero, __fmul_rn(scale, qmax));
  return true;
}

// Codes of one token's keys or values, a byte each, and its metadata (`META` bytes a group).
template <int BITS, int GROUPS, int META> DEV void quantise(const float (&x)[CHANNELS], u8* codes, u8* meta) {
  constexpr int span = HEAD_DIM / GROUPS;
  constexpr float qmax = (1 << BITS) - 1;
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    float low = INF, high = -INF;
    each_channel([&](int i, int c) {
      if (GROUPS == 1 || c / span == group) low = fminf(low, x[i]), high = fmaxf(high, x[i]);
    });
    low = warp_min(low), high = warp_max(high);
    Scale s, coded;
    bool fitted = false;
    if constexpr (BITS <= FITTED_BITS) fitted = fit<BITS, GROUPS>(x, group, low, high, coded);
    if constexpr (META == 2) s = compact_scale_of<BITS>(low, high);
    else s = scale_of<BITS>(low, high);
    if (fitted) s.scale = coded.scale, s.zero = coded.zero;
    float inverse = s.scale > 0.f ? __frcp_rn(s.scale) : 0.f;
    each_channel([&](int i, int c) {
      if (GROUPS == 1 || c / span == group) codes[c] = static_cast<u8>(fminf(fmaxf(nearest(__fsub_rn(x[i], s.zero), s.scale, inverse), 0.f), qmax));
    });
    if ((threadIdx.x & 31) != 0) continue;
    if constexpr (META == 2) reinterpret_cast<u16*>(meta)[group] = static_cast<u16>(s.stored);
    else reinterpret_cast<u32*>(meta)[group] = s.stored;
  }
}
template <int BITS> DEV u8 planes(const u8* codes, int byte) {
  constexpr int row = HEAD_DIM * BITS / 8;
  u32 x = 0;
#pragma unroll
  for (int plane = 0; plane < 8 / BITS; plane++) x |= static_cast<u32>(codes[byte + plane * row]) << (BITS * plane);
  return static_cast<u8>(x);
}

template <class F> DEV void write_state(u8* page, int token, const Token& x) {
  if ((threadIdx.x & 31) != 0) return;
  if constexpr (F::SCORES) reinterpret_cast<u16*>(page + F::SCORE)[token] = score_bits(x.score);
  if constexpr (F::POSITIONS) reinterpret_cast<int*>(page + F::POSITION)[token] = x.position;
  if constexpr (F::VOTES) reinterpret_cast<u16*>(page + F::VOTE)[token] = x.votes;
  if constexpr (F::WEIGHTS) reinterpret_cast<float*>(page + F::WEIGHT)[token] = x.weight;
}
// Encode a token into a page, which may stand in shared memory. `shelf` is the warp's own.
template <class F> DEV void write_token(u8* page, int token, const Token& x, u8* shelf) {
  if constexpr (F::DENSE) {
    u16 *k = reinterpret_cast<u16*>(page + F::KEY) + token * HEAD_DIM, *v = reinterpret_cast<u16*>(page + F::VALUE) + token * HEAD_DIM;
    each_channel([&](int i, int c) {
      u32 pair = pack_model(x.k[i], x.v[i]);
      k[c] = static_cast<u16>(pair), v[c] = static_cast<u16>(pair >> 16);
    });
  } else {
    constexpr int key_meta = 4 * F::KG, value_meta = (F::COMPACT ? 2 : 4) * F::VG, row = value_row<F>();
    quantise<F::KB, F::KG, 4>(x.k, shelf, page + F::KEY_META + token * key_meta);
    quantise<F::VB, F::VG, F::COMPACT ? 2 : 4>(x.v, shelf + HEAD_DIM, page + F::VALUE_META + token * value_meta);
    __syncwarp();
    for (int i = threadIdx.x & 31; i < F::KEY_ROW; i += 32) page[F::KEY + token * F::KEY_ROW + i] = planes<F::KB>(shelf, i);
    for (int i = threadIdx.x & 31; i < row; i += 32) page[F::VALUE + i * F::TOKENS + token] = planes<F::VB>(shelf + HEAD_DIM, i);
    __syncwarp();
  }
  write_state<F>(page, token, x);
}

template <class F> DEV Scale key_scale(const u8* page, int token, int group) {
  u32 raw = reinterpret_cast<const u32*>(page + F::KEY_META)[token * F::KG + group];
  return {half_low(raw), half_high(raw), raw};
}
template <class F> DEV Scale value_scale(const u8* page, int token, int group) {
  if constexpr (F::COMPACT) {
    u32 raw = reinterpret_cast<const u16*>(page + F::VALUE_META)[token * F::VG + group];
    Scale s;
    expand_compact<F::VB>(s, raw & 0xFF, static_cast<signed char>(raw >> 8));
    return s;
  } else {
    u32 raw = reinterpret_cast<const u32*>(page + F::VALUE_META)[token * F::VG + group];
    return {half_low(raw), half_high(raw), raw};
  }
}
DEV float dequantise(u32 code, const Scale& s) { return __fadd_rn(__fmul_rn(static_cast<float>(code), s.scale), s.zero); }

template <class F> DEV Token read_token(const u8* page, int token) {
  Token x;
  each_channel([&](int i, int c) {
    if constexpr (F::DENSE) {
      x.k[i] = model_to_float(reinterpret_cast<const u16*>(page + F::KEY)[token * HEAD_DIM + c]);
      x.v[i] = model_to_float(reinterpret_cast<const u16*>(page + F::VALUE)[token * HEAD_DIM + c]);
    } else {
      constexpr int row = value_row<F>();
      u32 key = page[F::KEY + token * F::KEY_ROW + c % F::KEY_ROW] >> (F::KB * (c / F::KEY_ROW)) & ((1u << F::KB) - 1u);
      u32 value = page[F::VALUE + c % row * F::TOKENS + token] >> (F::VB * (c / row)) & ((1u << F::VB) - 1u);
      x.k[i] = dequantise(key, key_scale<F>(page, token, c * F::KG / HEAD_DIM));
      x.v[i] = dequantise(value, value_scale<F>(page, token, c * F::VG / HEAD_DIM));
    }
  });
  x.score = 0.f, x.position = 0;
  if constexpr (F::SCORES) x.score = score_value(reinterpret_cast<const u16*>(page + F::SCORE)[token]);
  if constexpr (F::POSITIONS) x.position = reinterpret_cast<const int*>(page + F::POSITION)[token];
  if constexpr (F::VOTES) x.votes = reinterpret_cast<const u16*>(page + F::VOTE)[token];
  if constexpr (F::WEIGHTS) x.weight = reinterpret_cast<const float*>(page + F::WEIGHT)[token];
  return x;
}

DEV void copy_bytes(u8* to, const u8* from, int count, int stride) {
  for (int i = threadIdx.x & 31; i < count; i += 32) to[i * stride] = from[i * stride];
}
template <class F> DEV void copy_token(u8* to, int target, const u8* from, int source) {
  constexpr int value_stride = F::DENSE ? 1 : F::TOKENS, value_bytes = value_row<F>();
  copy_bytes(to + F::KEY + target * F::KEY_ROW, from + F::KEY + source * F::KEY_ROW, F::KEY_ROW, 1);
  int value_start = F::DENSE ? value_bytes : 1;
  copy_bytes(to + F::VALUE + target * value_start, from + F::VALUE + source * value_start, value_bytes, value_stride);
  if constexpr (!F::DENSE) {
    constexpr int key_meta = 4 * F::KG, value_meta = (F::COMPACT ? 2 : 4) * F::VG;
    copy_bytes(to + F::KEY_META + target * key_meta, from + F::KEY_META + source * key_meta, key_meta, 1);
    copy_bytes(to + F::VALUE_META + target * value_meta, from + F::VALUE_META + source * value_meta, value_meta, 1);
  }
  if constexpr (F::SCORES) copy_bytes(to + F::SCORE + 2 * target, from + F::SCORE + 2 * source, 2, 1);
  if constexpr (F::POSITIONS) copy_bytes(to + F::POSITION + 4 * target, from + F::POSITION + 4 * source, 4, 1);
  if constexpr (F::VOTES) copy_bytes(to + F::VOTE + 2 * target, from + F::VOTE + 2 * source, 2, 1);
  if constexpr (F::WEIGHTS) copy_bytes(to + F::WEIGHT + 4 * target, from + F::WEIGHT + 4 * source, 4, 1);
}

// `(k - RoPE_p(b)) @ rotation`: the bias by the reference's own operations, the rotation as butterflies (sums in another order than a product's).
DEV void subtract_bias(const Cache& cache, float (&k)[CHANNELS], int layer, int head, i64 position) {
  constexpr int half = HEAD_DIM / 2;
  const float* b = cache.bias + (layer * cache.heads + head) * HEAD_DIM;
  const float *cos = cache.cos + position * half, *sin = cache.sin + position * half;
  each_channel([&](int i, int c) {
    bool low = c < half;
    int pair = low ? c : c - half;
    float own = __fmul_rn(b[c], cos[pair]), other = __fmul_rn(b[low ? c + half : pair], sin[pair]);
    k[i] = __fsub_rn(k[i], low ? __fsub_rn(own, other) : __fadd_rn(own, other));
  });
}
DEV void butterflies(float (&k)[CHANNELS]) {
#pragma unroll
  for (int half = 1; half < HADAMARD_BLOCK && half < 32; half *= 2) {
    bool upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < CHANNELS; i++) {
      float other = shuffle_xor(k[i], half);
      k[i] = upper ? other - k[i] : k[i] + other;
    }
  }
#pragma unroll
  for (int half = 1; half < HADAMARD_BLOCK / 32; half *= 2)
#pragma unroll
    for (int i = 0; i < CHANNELS; i++)
      if ((i & half) == 0) {
        float low = k[i], high = k[i + half];
        k[i] = low + high, k[i + half] = low - high;
      }
}
DEV void rotate(const Cache& cache, float (&k)[CHANNELS]) {
  each_channel([&](int i, int c) { k[i] *= cache.signs[c]; });
  butterflies(k);
}
DEV void condition(const Cache& cache, float (&k)[CHANNELS], int layer, int head, i64 position) {
  if constexpr (HAS_BIAS) subtract_bias(cache, k, layer, head, position);
  if constexpr (HADAMARD_BLOCK > 1) rotate(cache, k);
}
