// What conditioning took out of keys, added to logits: q . RoPE_p(b), the sum over kept pairs j of A_j cos(p w_j) + B_j sin(p w_j), as products of the
// tensor cores: rotary factors of tokens times coefficients of 8 query heads, 8 pairs (16 numbers) at a time, both in two fp16 parts.
//
// Coefficients are turned to the position of a tile's first token, the anchor, and factors are those of the distance from it. Where a tile's positions
// follow each other, distances are always the same: their factors stand in shared memory, and the next tile's coefficients are this one's, turned by as
// many positions as lie between. Else each token takes the row of its distance, of NEAR a head, or, where one is further behind, that of its position.
struct Turn {
  float c0, s0, c1, s1;
  DEV Turn after(const Turn& o) const { return {c0 * o.c0 - s0 * o.s0, s0 * o.c0 + c0 * o.s0, c1 * o.c1 - s1 * o.s1, s1 * o.c1 + c1 * o.s1}; }
};
DEV Turn turn_of(float4 x) { return {x.x, x.y, x.z, x.w}; }

// Coefficients of cosine and sine of the two pairs that a lane has of a block of 8, t and 4 + t, and their fp16 parts.
struct Coefficients {
  float a0, b0, a1, b1;
  DEV Coefficients turned(const Turn& by) const {
    return {a0 * by.c0 + b0 * by.s0, b0 * by.c0 - a0 * by.s0, a1 * by.c1 + b1 * by.s1, b1 * by.c1 - a1 * by.s1};
  }
};
struct Halves {
  u32 high[2], rest[2];
  DEV void split(const Coefficients& x) {
    high[0] = pack_half(x.a0, x.b0), high[1] = pack_half(x.a1, x.b1);
    rest[0] = pack_half(x.a0 - half_low(high[0]), x.b0 - half_high(high[0]));
    rest[1] = pack_half(x.a1 - half_low(high[1]), x.b1 - half_high(high[1]));
  }
};

// Where a head's factors of a run stand in its part of shared memory: for each block high parts, then what rounding left, of two tokens and two pairs a
// lane; behind all blocks, turns by multiples of 16 positions.
constexpr int RUN_PART = RUN_ROWS / 2 * 64, RUN_TURNS = 2 * BIAS_BLOCKS * RUN_PART, RUN_BYTES = RUN_TURNS + RUN_ROWS / 16 * BIAS_BLOCKS * 64;
constexpr bool RUNS = RUN_ROWS > 0, KEEPS = STEADY_TURNS && BIAS_BLOCKS * NT <= 2;
constexpr u32 STEP_SPAN = 512;  // steps stay between multiples of it, and turns over them are exact, so that errors do not add up

// Layer and head of the segment that a warp is at. In shared memory, since registers are few and a division takes long.
DEV int& layer_head() {
  __shared__ int heads[TEAM * TEAMS];
  return heads[threadIdx.x >> 5];
}

// A head's coefficients. Where there are few, they are kept from tile to tile, turned to the anchor.
struct Terms {
  u32 anchor, run;    // its position; where the head's factors of a run stand, 0 where they do not
  int blocks;         // of 8 pairs
  Coefficients exact[KEEPS ? BIAS_BLOCKS * NT : 1];
  Halves kept[KEEPS ? BIAS_BLOCKS * NT : 1];

  DEV void begin(const Arguments& a, int pair) {
    int at = a.layer * KV_HEADS + head_of(a, pair);
    layer_head() = at;
    blocks = ceil_div(a.rank[at], 8);
    anchor = 0x80000000u;
  }
  static DEV Turn turn_to(const Arguments& a, u32 p, int block) {
    const float4* turns = a.turns + (layer_head() * TURN_ROWS * BIAS_BLOCKS + block) * 4 + (threadIdx.x & 3);
    float4 low = turns[p % TURNS * (BIAS_BLOCKS * 4)], high = turns[(TURNS + p / TURNS) * (BIAS_BLOCKS * 4)];
    return turn_of(low).after(turn_of(high));
  }
  static DEV Coefficients coefficients(const Arguments& a, int pair, int block, int n) {
    float4 q = a.bias_query[((static_cast<i64>(pair) * BIAS_BLOCKS + block) * NT + n) * 32 + (threadIdx.x & 31)];
    return {q.x, q.y, q.z, q.w};
  }
  // Blocks that the head has not have coefficients of 0.
  DEV void turn_all(const Arguments& a, int pair, u32 to) {
    anchor = to;
    if constexpr (KEEPS) {
#pragma unroll
      for (int block = 0; block < BIAS_BLOCKS; block++) {
        Turn by = turn_to(a, anchor, block);
#pragma unroll
        for (int n = 0; n < NT; n++) exact[block * NT + n] = coefficients(a, pair, block, n).turned(by);
      }
#pragma unroll
      for (int i = 0; i < BIAS_BLOCKS * NT; i++) kept[i].split(exact[i]);
    }
  }
  // By a multiple of 16 positions, which has a turn of its own.
  DEV void step(u32 sixteens) {
    anchor += 16 * sixteens;
    u32 turns = run + RUN_TURNS + (sixteens - 1) * (BIAS_BLOCKS * 64) + (threadIdx.x & 3) * 16;
#pragma unroll
    for (int block = 0; block < BIAS_BLOCKS; block++) {
      u32 x[4];
      load_words<4, 4>(x, turns + 64 * block);
      Turn turn = {__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3])};
#pragma unroll
      for (int n = 0; n < NT; n++) {
        exact[block * NT + n] = exact[block * NT + n].turned(turn);
        kept[block * NT + n].split(exact[block * NT + n]);
      }
    }
  }
};

// The terms of a tile of 16 U tokens: `sum` as the tensor cores leave them.
template <int U> struct Bias {
  u32 behind[U][2];  // positions from the tile's first token to the lane's
  u32 start, ahead;  // that one's position, and how far it lies from the anchor
  bool run, near;    // whether positions follow each other, and whether all lie less than NEAR behind the first
  float sum[NT][U][4];

  // Positions stand in shared memory from `first` on; a lane's are those of tokens `token(u)` and the next. Where there are but `count` tokens, the
  // others go on as in a run.
  template <class Token> DEV void find(u32 first, int count, const Terms& terms, Token token) {
    start = load_shared(first);
#pragma unroll
    for (int u = 0; u < U; u++) {
      load_words<2, 2>(behind[u], first + 4 * token(u));
      behind[u][0] -= start, behind[u][1] -= start;
    }
    if (count < 16 * U) {
#pragma unroll
      for (int u = 0; u < U; u++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          if (token(u) + h >= count) behind[u][h] = token(u) + h;
    }
    u32 apart = 0;
#pragma unroll
    for (int u = 0; u < U; u++) apart |= (behind[u][0] ^ token(u)) | (behind[u][1] ^ (token(u) + 1));
    run = RUNS && __all_sync(ALL, apart == 0) && terms.run != 0;
  }
  // Coefficients to where the tile needs them.
  DEV void turn(Terms& terms, const Arguments& a, int pair) {
    near = STEADY_TURNS && (run || all_near());
    if (!near) return;
    ahead = start - terms.anchor;
    u32 sixteens = __funnelshift_r(ahead, ahead, 4);  // huge where that is no multiple
    if (run && sixteens <= static_cast<u32>(RUN_ROWS / 16 - U)) return;
    if (KEEPS && run && sixteens <= RUN_ROWS / 16 && (start ^ terms.anchor) < STEP_SPAN) terms.step(sixteens);
    else if (ahead != 0) terms.turn_all(a, pair, start);
    ahead = 0;
  }

  // Factors of a run: high parts, and what rounding left.
  template <class Token> DEV void load_block(u32 (&x)[2][U][4], const Terms& terms, int block, Token token) const {
    u32 from = terms.run + ahead * 32 + (threadIdx.x & 3) * 16 + block * (2 * RUN_PART);
#pragma unroll
    for (int part = 0; part < 2; part++)
#pragma unroll
      for (int u = 0; u < U; u++) load_words<4, 4>(x[part][u], from + token(u) * 32 + part * RUN_PART);
  }
  DEV void add_product(int n, int u, const u32 (&x)[4], const u32 (&q)[2]) { mma_half(sum[n][u], x[0], x[1], x[2], x[3], q[0], q[1]); }
  // A run's products where coefficients are kept, by number, so that they may stand between others.
  static constexpr int PRODUCTS = 3 * U * NT * BIAS_BLOCKS;
  template <int B> DEV void add_kept(const Terms& terms, const u32 (&x)[B][2][U][4], int number) {
    int u = number % U, part = number / U % 3, n = number / (3 * U) % NT, block = number / (3 * U * NT);
    const Halves& q = terms.kept[block * NT + n];
    add_product(n, u, x[block][part == 2][u], part == 1 ? q.rest : q.high);
  }

  // Else a token has two rows of a tile, its factors' high parts in one and what their rounding left in the other, so that a lane's 16 bytes of a table
  // are an operand as they are.
  DEV void add_rows(const u32 (&x)[U][2][4], const Halves& q, int n) {
    float twice[U][2][4] = {};
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        mma_half(twice[u][h], x[u][h][0], x[u][h][1], x[u][h][2], x[u][h][3], q.high[0], q.high[1]);
        mma_half(twice[u][h], x[u][h][0], x[u][h][1], x[u][h][2], x[u][h][3], q.rest[0], q.rest[1]);
      }
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int c = 0; c < 2; c++) sum[n][u][2 * h + c] += twice[u][h][c] + twice[u][h][2 + c];
  }
  DEV Halves halves(const Terms& terms, const Arguments& a, int pair, const Turn& by, int block, int n) const {
    Halves q;
    if constexpr (KEEPS) q = terms.kept[block * NT + n];
    else q.split(Terms::coefficients(a, pair, block, n).turned(by));
    return q;
  }
  DEV void add_near(const Terms& terms, const Arguments& a, int pair, int block) {
    const uint4* near = a.near + (layer_head() * NEAR * BIAS_BLOCKS + block) * 4 + (threadIdx.x & 3);
    u32 x[U][2][4];
#pragma unroll
    for (int u = 0; u < U; u++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        uint4 y = near[behind[u][h] * (BIAS_BLOCKS * 4)];
        x[u][h][0] = y.x, x[u][h][1] = y.y, x[u][h][2] = y.z, x[u][h][3] = y.w;
      }
    Turn by;
    if constexpr (!KEEPS) by = Terms::turn_to(a, terms.anchor, block);
#pragma unroll
    for (int n = 0; n < NT; n++) add_rows(x, halves(terms, a, pair, by, block, n), n);
  }
  // A block of a run, where coefficients are not kept.
  template <class Token> DEV void add_run(const Terms& terms, const Arguments& a, int pair, int block, Token token) {
    u32 x[2][U][4];
    load_block(x, terms, block, token);
    Turn by = Terms::turn_to(a, terms.anchor, block);
#pragma unroll
    for (int n = 0; n < NT; n++) {
      Halves q = halves(terms, a, pair, by, block, n);
#pragma unroll
      for (int i = 0; i < 3 * U; i++) add_product(n, i % U, x[i / U == 2][i % U], i / U == 1 ? q.rest : q.high);
    }
  }
  DEV void add_each(const Terms& terms, const Arguments& a, int pair) {
    const int* pairs = a.pairs + layer_head() * PAIRS;
    int t = threadIdx.x & 3;
#pragma unroll 1
    for (int block = 0; block < terms.blocks; block++) {
      int j0 = pairs[min_int(block * 8 + t, PAIRS - 1)], j1 = pairs[min_int(block * 8 + 4 + t, PAIRS - 1)];
      u32 x[U][2][4];
#pragma unroll
      for (int u = 0; u < U; u++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const uint2* factors = a.trig + static_cast<i64>(min(start + behind[u][h], ROTARY_POSITIONS - 1u)) * (HEAD_DIM / 2);
          uint2 one = factors[j0], other = factors[j1];
          x[u][h][0] = one.x, x[u][h][1] = one.y, x[u][h][2] = other.x, x[u][h][3] = other.y;
        }
#pragma unroll
      for (int n = 0; n < NT; n++) {
        Halves q;
        q.split(Terms::coefficients(a, pair, block, n));
        add_rows(x, q, n);
      }
    }
  }
  // Of a tile that is no run, or whose coefficients are not kept.
  template <class Token> DEV void add(const Terms& terms, const Arguments& a, int pair, Token token) {
    if (!near) add_each(terms, a, pair);
    else if (RUNS && !KEEPS && run) {
#pragma unroll 1
      for (int block = 0; block < terms.blocks; block++) add_run(terms, a, pair, block, token);
    } else if constexpr (KEEPS) {
#pragma unroll
      for (int block = 0; block < BIAS_BLOCKS; block++)
        if (block < terms.blocks) add_near(terms, a, pair, block);
    } else {
#pragma unroll 1
      for (int block = 0; block < terms.blocks; block++) add_near(terms, a, pair, block);
    }
  }
  DEV bool all_near() const {
    u32 most = 0;
#pragma unroll
    for (int u = 0; u < U; u++) most = max(most, max(behind[u][0], behind[u][1]));
    return __all_sync(ALL, most < NEAR);
  }
  DEV void clear() {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int u = 0; u < U; u++) sum[n][u][0] = sum[n][u][1] = sum[n][u][2] = sum[n][u][3] = 0.f;
  }
};
