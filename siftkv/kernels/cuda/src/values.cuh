// Two values of the model's type in a word: packed, read, and rounded to.
// Unlike `pack_model`, infinity stays infinity, so that an overflow is seen.
DEV u32 pack_plain(float low, float high) {
#if MODEL_BF16
  return pack_bf16(low, high);
#else
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
#endif
}
DEV float low_value(u32 x) {
#if MODEL_BF16
  return __uint_as_float(x << 16);
#else
  return half_low(x);
#endif
}
DEV float high_value(u32 x) {
#if MODEL_BF16
  return __uint_as_float(x & 0xffff0000u);
#else
  return half_high(x);
#endif
}
DEV float rounded(float x) { return low_value(pack_plain(x, 0.f)); }
