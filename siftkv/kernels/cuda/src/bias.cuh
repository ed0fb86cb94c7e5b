// What conditioning took out of keys, added to logits: q . RoPE_p(b), the sum over kept pairs j of A_j cos(p w_j) + B_j sin(p w_j), as products of the
// tensor cores: rotary factors of 16 tokens times coefficients of 8 query heads, 8 pairs (16 numbers) at a time, both in two fp16 parts.
//
// Tokens of a tile are mostly near each other. So coefficients are turned to the first of them, the anchor, and factors are those of the distance from
// it: NEAR rows a head, which stay in the first-level cache. Tokens NEAR or more behind the anchor have another one; where a tile would need more
// than MOST_ANCHORS, factors are those of each token's position.
constexpr u32 NOWHERE = 0xffffffffu;
constexpr int MOST_ANCHORS = 3;

// Cosine and sine of the two pairs of 8 that a lane has: t and 4 + t.
struct Turn {
  float c0, s0, c1, s1;
  DEV Turn after(const Turn& o) const { return {c0 * o.c0 - s0 * o.s0, s0 * o.c0 + c0 * o.s0, c1 * o.c1 - s1 * o.s1, s1 * o.c1 + c1 * o.s1}; }
};

// Two numbers of each of the two pairs, in two fp16 parts.
struct Halves {
  u32 high0, high1, rest0, rest1;
  DEV Halves(float a0, float b0, float a1, float b1) {
    high0 = pack_half(a0, b0), high1 = pack_half(a1, b1);
    rest0 = pack_half(a0 - half_low(high0), b0 - half_high(high0));
    rest1 = pack_half(a1 - half_low(high1), b1 - half_high(high1));
  }
};

// The terms of a tile of 16 U tokens.
template <int U> struct Bias {
  u32 position[U][2];   // of the lane's tokens, NOWHERE where there is none
  int blocks, at;       // blocks of 8 pairs; layer and head
  const float4* query;  // the lane's coefficients of cosines and sines

  // The first position from `from` on that a token of the tile has.
  DEV u32 first_from(u32 from) const {
    u32 first = NOWHERE;
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (position[u][h] >= from && position[u][h] < first) first = position[u][h];
    return least_of_warp(first);
  }
  DEV u32 anchor_after(u32 anchor) const { return first_from(anchor + NEAR); }

  DEV Turn turn_to(const Arguments& a, u32 p, int block) const {
    const float4* turns = a.turns + (at * TURN_ROWS * BIAS_BLOCKS + block) * 4 + (threadIdx.x & 3);
    float4 low = turns[p % NEAR * (BIAS_BLOCKS * 4)], high = turns[(NEAR + p / NEAR) * (BIAS_BLOCKS * 4)];
    return Turn{low.x, low.y, low.z, low.w}.after({high.x, high.y, high.z, high.w});
  }
  // Factors of the two tokens (h = 0, 1) of a tile of 16, high parts and rest of two pairs, times coefficients.
  static DEV void add_products(float (&s)[2][2], const uint4 (&row)[2], const Halves& q) {
    float sum[4] = {s[0][0], s[0][1], s[1][0], s[1][1]};
    mma_half(sum, row[0].x, row[1].x, row[0].y, row[1].y, q.high0, q.high1);
    mma_half(sum, row[0].z, row[1].z, row[0].w, row[1].w, q.high0, q.high1);
    mma_half(sum, row[0].x, row[1].x, row[0].y, row[1].y, q.rest0, q.rest1);
    s[0][0] = sum[0], s[0][1] = sum[1], s[1][0] = sum[2], s[1][1] = sum[3];
  }
  // Of tokens less than NEAR behind the anchor.
  DEV void add_near(float (&s)[NT][U][2][2], const Arguments& a, u32 anchor) const {
    const uint4* near = a.near + at * NEAR * BIAS_BLOCKS * 4 + (threadIdx.x & 3);
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
      Turn turn = turn_to(a, anchor, block);
#pragma unroll
      for (int n = 0; n < NT; n++) {
        float4 q = query[(block * NT + n) * 32];
        Halves turned(q.x * turn.c0 + q.y * turn.s0, q.y * turn.c0 - q.x * turn.s0, q.z * turn.c1 + q.w * turn.s1, q.w * turn.c1 - q.z * turn.s1);
#pragma unroll
        for (int u = 0; u < U; u++) {
          uint4 row[2];
#pragma unroll
          for (int h = 0; h < 2; h++) {
            u32 behind = position[u][h] - anchor;
            row[h] = {0u, 0u, 0u, 0u};
            if (behind < NEAR) row[h] = near[(behind * BIAS_BLOCKS + block) * 4];
          }
          add_products(s[n][u], row, turned);
        }
      }
    }
  }
  // Of every token by its own position.
  DEV void add_each(float (&s)[NT][U][2][2], const Arguments& a) const {
    const int* pairs = a.pairs + at * PAIRS;
    int t = threadIdx.x & 3;
#pragma unroll 1
    for (int block = 0; block < blocks; block++) {
      int j0 = pairs[min_int(block * 8 + t, PAIRS - 1)], j1 = pairs[min_int(block * 8 + 4 + t, PAIRS - 1)];
#pragma unroll
      for (int u = 0; u < U; u++) {
        uint4 row[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint2* factors = a.trig + static_cast<i64>(position[u][h] < ROTARY_POSITIONS ? position[u][h] : 0) * (HEAD_DIM / 2);
          uint2 one = factors[j0], other = factors[j1];
          row[h] = {one.x, other.x, one.y, other.y};
        }
#pragma unroll
        for (int n = 0; n < NT; n++) {
          float4 q = query[(block * NT + n) * 32];
          add_products(s[n][u], row, Halves(q.x, q.y, q.z, q.w));
        }
      }
    }
  }
  DEV void add(float (&s)[NT][U][2][2], const Arguments& a) const {
    if constexpr (!STEADY_TURNS) return add_each(s, a);
    u32 first = first_from(0);
    int anchors = 0;
#pragma unroll 1
    for (u32 anchor = first; anchor != NOWHERE && anchors <= MOST_ANCHORS; anchor = anchor_after(anchor)) anchors++;
    if (anchors > MOST_ANCHORS) return add_each(s, a);
#pragma unroll 1
    for (u32 anchor = first; anchor != NOWHERE; anchor = anchor_after(anchor)) add_near(s, a, anchor);
  }
};
