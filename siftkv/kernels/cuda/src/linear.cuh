// What linear layers of few rows have in common: pairs of rows of W, and what follows their products elementwise, rounding where separate operations
// round.
struct Linear {
  const u16 *x, *weight, *bias;
  const float *cos, *sin;  // [requests, dim]
  u16* out;
  int size, pairs, dim, turned, rows;  // pairs: of rows of W; turned: of them, those that are rotated; rows: of x
};
// The two rows of a pair, and where their results stand.
struct Rows { int first, second; };

enum Kind { PLAIN, SWIGLU, ROTARY };
template <Kind KIND> DEV Rows rows_of(const Linear& a, int pair) {
  if constexpr (KIND == PLAIN) return {2 * pair, 2 * pair + 1};
  if constexpr (KIND == SWIGLU) return {pair, pair + a.pairs};
  int half = a.dim / 2, first = pair / half * a.dim + pair % half;
  return {first, first + half};
}
// What a pair's results meet, of the request: loaded before they are there.
struct Terms { float first = 0, second = 0, c = 1, s = 0; };  // biases, cosine, sine

template <Kind KIND> DEV Terms terms_of(const Linear& a, int request, int pair, Rows rows) {
  Terms terms;
  if (a.bias) terms.first = model_to_float(a.bias[rows.first]), terms.second = model_to_float(a.bias[rows.second]);
  if (KIND == ROTARY && pair < a.turned) {
    int half = a.dim / 2, i = pair % half;
    terms.c = a.cos[request * a.dim + i], terms.s = a.sin[request * a.dim + half + i];
  }
  return terms;
}
template <Kind KIND> DEV void finish(const Linear& a, int request, int pair, Rows rows, Terms terms, float y0, float y1) {
  y0 += terms.first, y1 += terms.second;
  i64 columns = KIND == SWIGLU ? a.pairs : 2 * a.pairs;
  u16* out = a.out + request * columns;
  if constexpr (KIND == PLAIN) *reinterpret_cast<u32*>(out + rows.first) = pack_plain(y0, y1);
  if constexpr (KIND == SWIGLU) {
    float gate = rounded(y0), up = rounded(y1);
    out[pair] = static_cast<u16>(pack_plain(rounded(gate / (1.0f + exp2_fast(-1.44269504f * gate))) * up, 0.f));
  }
  if constexpr (KIND == ROTARY) {
    if (pair < a.turned) {
      float low = rounded(y0), high = rounded(y1);
      y0 = low * terms.c - high * terms.s;
      y1 = high * terms.c + low * terms.s;
    }
    u32 both = pack_plain(y0, y1);
    out[rows.first] = static_cast<u16>(both), out[rows.second] = static_cast<u16>(both >> 16);
  }
}
