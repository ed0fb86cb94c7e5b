// What the passes of `importance.cu` share: a block holds rows of one side in registers and streams rows of the other through shared memory.
constexpr int TEAM_WARPS = 4, BLOCKS_AN_SM = 3, THREADS = 32 * TEAM_WARPS, FINISH_THREADS = 256;
constexpr int TILES = HEAD_DIM <= 128 ? 2 : 1;  // of 16 rows, held in registers by a warp
constexpr int HELD = TEAM_WARPS * TILES * 16;   // rows a block holds
constexpr int KEYS = 32 * TILES, KEY_STAGES = 2;  // keys a stage in `exponents`
constexpr int ROWS = 16 * TILES, ROW_STAGES = 4;  // query rows a stage in `attention`
constexpr int ROW_QUANTUM = 32;                   // measured rows of a prompt are padded to a multiple of it
constexpr int STEPS = (HEAD_DIM + 15) / 16, PITCH = 2 * HEAD_DIM + 16;  // a line is a row and 16 bytes, so that `ldmatrix` meets no bank twice
constexpr int LINES = KEYS * KEY_STAGES;
static_assert(LINES == ROWS * ROW_STAGES, "both passes stream through the same lines");
#define INF __int_as_float(0x7f800000)

// One prompt of a batch; its sizes depend on no other.
struct __align__(16) Prompt {
  int start, length;           // its rows of q and k
  int first_row, count;        // its measured rows, M
  int first_padded, padded;    // the same with an end that counts for nothing
  int rows_a_part, row_parts;  // of `attention`
  int parts, sums;             // where its partial results begin, in units of [H, group] and [H]
  int key_tiles, pair_tiles;   // blocks that hold all keys, all (row, head) pairs
  int lag, unused[3];          // a row counts for keys that are more than `lag` positions before it
};

struct Importance {
  const u16 *q, *k;
  const i64* rows;       // of all prompts, ascending in each, positions in the prompt
  const float* weight;
  const float* lse;      // [H * group, tokens]: logarithms of the rows' sums, or null
  const Prompt* prompts;
  const int* owners;     // the prompt of each `ROW_QUANTUM` padded rows
  const int2 *exponents_work, *attention_work, *finish_work;  // (prompt, index in it) of each block
  float* parts;          // [key parts, H, M * group] of each prompt
  float* exponent;       // [H, group, padded]
  float *padded_weight, *followers;  // [padded]: weights, and weights of the prompt's rows from here on
  int* padded_rows;
  float* sums;           // [row parts, H, length] of each prompt
  float* out;            // [H, tokens]
  i64 q_token, q_head, k_token, k_head, lse_head;
  int tokens, heads, padded, keys_a_part;
};
DEV float* parts_of(const Importance& a, const Prompt& p) { return a.parts + static_cast<i64>(p.parts) * a.heads * GROUP; }
DEV float* sums_of(const Importance& a, const Prompt& p) { return a.sums + static_cast<i64>(p.sums) * a.heads; }

// Start copying `COUNT` rows to lines; `from(i)` gives row i's address. Groups of copies end in order.
template <int COUNT, class From> DEV void copy_rows(u32 to, From from) {
  constexpr int chunks = HEAD_DIM / 8;
#pragma unroll
  for (int i = threadIdx.x; i < COUNT * chunks; i += THREADS)
    copy16(to + i / chunks * PITCH + i % chunks * 16, reinterpret_cast<const u8*>(from(i / chunks) + i % chunks * 8));
}
DEV void copies_end() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int BEHIND> DEV void copies_done() { asm volatile("cp.async.wait_group %0;" ::"n"(BEHIND) : "memory"); }

// Columns of lines beyond HEAD_DIM, where it is no multiple of 16.
DEV void clear_edges(u32 lines) {
  if constexpr (HEAD_DIM % 16 != 0)
    for (int i = threadIdx.x; i < LINES * 4; i += THREADS)
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(lines + i / 4 * PITCH + 2 * HEAD_DIM + i % 4 * 4), "r"(0) : "memory");
}
// The warp's rows as the left operand; `from(i)` gives the address of the block's row i.
struct Held { u32 x[TILES][STEPS][4]; };
template <class From> DEV void hold(Held& h, From from) {
  int lane = threadIdx.x & 31, first = threadIdx.x / 32 * TILES * 16 + (lane >> 2);
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32* row = reinterpret_cast<const u32*>(from(first + 16 * m + 8 * half)) + (lane & 3);
#pragma unroll
      for (int s = 0; s < STEPS; s++) {
        h.x[m][s][half] = row[8 * s];
        h.x[m][s][2 + half] = 16 * s + 8 < HEAD_DIM ? row[8 * s + 4] : 0u;
      }
    }
}
// Products of the held rows and 8 N streamed ones.
template <int N> DEV void multiply(float (&c)[TILES][N][4], const Held& h, u32 lines) {
  int lane = threadIdx.x & 31;
  u32 from = lines + ((lane >> 4) * 8 + (lane & 7)) * PITCH + (lane >> 3 & 1) * 16;
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int n = 0; n < N; n++) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.f;
  // The next step's operands are on their way while this one's are multiplied.
  u32 b[2][N / 2][4];
#pragma unroll
  for (int n = 0; n < N / 2; n++) ldmatrix(b[0][n], from + 16 * n * PITCH);
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
#pragma unroll
    for (int n = 0; n < N / 2 && s + 1 < STEPS; n++) ldmatrix(b[~s & 1][n], from + 16 * n * PITCH + 32 * (s + 1));
#pragma unroll
    for (int n = 0; n < N / 2; n++)
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        mma_model(c[m][2 * n], h.x[m][s], b[s & 1][n][0], b[s & 1][n][1]);
        mma_model(c[m][2 * n + 1], h.x[m][s], b[s & 1][n][2], b[s & 1][n][3]);
      }
  }
}
