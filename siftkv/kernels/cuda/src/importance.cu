// Importance of prompt tokens (`siftkv.kernels.reference.prompt`): which attention sampled query rows give each key, without the matrix of it.
//
// Prompts of a batch share launches: each block finds its prompt and its place there in a list.
// `pad`:       once a batch, the measured rows of each prompt with an end that counts for nothing, and the weights that follow each.
// `exponents`: a block takes some (query row, head) pairs of one kv head and a part of the keys, and finds log2 of the sum of their exponentials; where
// attention has left these sums it is not launched.
// `attention` sums probabilities, or with POWER 2 their squares, of rows that follow a key by more than the prompt's `lag`.
// `combine`:   joins the parts of a row. `attention`: a block takes some keys and a part of the rows; since 2^x grows with x, the maximum over a group's
// heads is taken of exponents, so that one exponential serves the group. `finish`: joins the parts of a key and divides by the rows that follow it.
// Each sum has one owner and a fixed order, so that results do not differ between runs.
// The softmax of the rows of one lane, in exponents of two: reference and sum.
struct Sums {
  float top[TILES][2], sum[TILES][2];
  DEV void clear() {
#pragma unroll
    for (int m = 0; m < TILES; m++) top[m][0] = top[m][1] = NEVER, sum[m][0] = sum[m][1] = 0.f;
  }
  DEV void add(const float (&c)[TILES][KEYS / 8][4]) {
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        float high = c[m][0][2 * h];
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++) high = fmaxf(high, fmaxf(c[m][n][2 * h], c[m][n][2 * h + 1]));
        high = fmaxf(high, shuffle_xor(high, 1));
        high = fmaxf(high, shuffle_xor(high, 2));
        float next = fmaxf(top[m][h], high * LOGIT_SCALE), more[2] = {0.f, 0.f};
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int j = 0; j < 2; j++) more[j] += exp2_fast(c[m][n][2 * h + j] * LOGIT_SCALE - next);
        sum[m][h] = sum[m][h] * exp2_fast(top[m][h] - next) + more[0] + more[1];
        top[m][h] = next;
      }
  }
};
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM) exponents(const __grid_constant__ Importance a) {
  __shared__ __align__(16) u8 lines[LINES * PITCH];
  u32 at = shared_address(lines);
  int2 work = a.exponents_work[blockIdx.x];
  const Prompt& p = a.prompts[work.x];
  const i64* rows = a.rows + p.first_row;
  int pairs = p.count * GROUP, head = blockIdx.y, part = work.y / p.pair_tiles, lane = threadIdx.x & 31;
  // Long rows first: they take longest.
  int first = (p.pair_tiles - 1 - work.y % p.pair_tiles) * HELD, last = min_int(first + HELD, pairs) - 1, low = part * a.keys_a_part;
  int shortest = static_cast<int>(rows[first / GROUP]), visible = static_cast<int>(rows[last / GROUP]) + 1;
  int high = min_int(low + a.keys_a_part, min_int(visible, p.length));
  float* out = parts_of(a, p) + (static_cast<i64>(part) * a.heads + head) * pairs;
  if (low >= high) {
    for (int i = first + threadIdx.x; i <= last; i += THREADS) out[i] = -INF;
    return;
  }
  clear_edges(at);
  Held held;
  hold(held, [&](int i) {
    int pair = min_int(first + i, last);
    return a.q + (p.start + rows[pair / GROUP]) * a.q_token + (head * GROUP + pair % GROUP) * a.q_head;
  });
  int mine = first + threadIdx.x / 32 * TILES * 16 + (lane >> 2), row[TILES][2];
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) row[i / 2][i % 2] = static_cast<int>(rows[min_int(mine + 8 * i, last) / GROUP]);
  const u16* keys = a.k + p.start * a.k_token + head * a.k_head;
  auto fetch = [&](int from, int stage) {
    if (from < high) copy_rows<KEYS>(at + stage * KEYS * PITCH, [&](int i) { return keys + min_int(from + i, high - 1) * a.k_token; });
    copies_end();
  };
  Sums sums;
  sums.clear();
  for (int i = 0; i < KEY_STAGES; i++) fetch(low + i * KEYS, i);
  for (int from = low, stage = 0; from < high; from += KEYS, stage = (stage + 1) % KEY_STAGES) {
    copies_done<KEY_STAGES - 1>();
    __syncthreads();
    float c[TILES][KEYS / 8][4];
    multiply(c, held, at + stage * KEYS * PITCH);
    __syncthreads();
    fetch(from + KEY_STAGES * KEYS, stage);
    if (from + KEYS > min_int(shortest + 1, high)) {
#pragma unroll
      for (int m = 0; m < TILES; m++)
#pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            int key = from + 8 * n + 2 * (lane & 3) + (j & 1);
            if (key > row[m][j / 2] || key >= high) c[m][n][j] = -INF;
          }
    }
    sums.add(c);
  }
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    float sum = sums.sum[i / 2][i % 2];
    sum += shuffle_xor(sum, 1);
    sum += shuffle_xor(sum, 2);
    if ((lane & 3) == 0 && mine + 8 * i <= last) out[mine + 8 * i] = sums.top[i / 2][i % 2] + log2_fast(sum);
  }
}

extern "C" __global__ void __launch_bounds__(FINISH_THREADS) pad(const __grid_constant__ Importance a) {
  __shared__ float sums[FINISH_THREADS];
  const Prompt p = a.prompts[blockIdx.x];
  int each = ceil_div(p.padded, FINISH_THREADS), from = min_int(threadIdx.x * each, p.padded), to = min_int(from + each, p.padded);
  float sum = 0.f;
  for (int m = from; m < to; m++) {
    bool inside = m < p.count;
    float weight = inside ? a.weight[p.first_row + m] : 0.f;
    a.padded_rows[p.first_padded + m] = inside ? static_cast<int>(a.rows[p.first_row + m]) : 0x7FFFFFFF;
    a.padded_weight[p.first_padded + m] = weight;
    sum += weight;
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  float after = 0.f;
  for (int i = FINISH_THREADS - 1; i > static_cast<int>(threadIdx.x); i--) after += sums[i];
  for (int m = to - 1; m >= from; m--) a.followers[p.first_padded + m] = after += a.padded_weight[p.first_padded + m];
}
extern "C" __global__ void __launch_bounds__(FINISH_THREADS) combine(const __grid_constant__ Importance a) {
  let_successor_start();
  int i = blockIdx.x * FINISH_THREADS + threadIdx.x, at = i % a.padded, query = i / a.padded;
  if (query >= a.heads * GROUP) return;
  const Prompt& p = a.prompts[a.owners[at / ROW_QUANTUM]];
  int m = at - p.first_padded;
  float value = INF;  // of rows that are not there: they attend to nothing
  if (m < p.count && a.lse != nullptr) value = a.lse[query * a.lse_head + p.start + a.rows[p.first_row + m]] * 1.44269504f;
  else if (m < p.count) {
    int pairs = p.count * GROUP, parts = ceil_div(static_cast<int>(a.rows[p.first_row + m]) + 1, a.keys_a_part);
    const float* from = parts_of(a, p) + query / GROUP * pairs + m * GROUP + query % GROUP;
    i64 step = static_cast<i64>(a.heads) * pairs;
    float top = NEVER, sum = 0.f;
    for (int part = 0; part < parts; part++) top = fmaxf(top, from[part * step]);
    for (int part = 0; part < parts; part++) sum += exp2_fast(from[part * step] - top);
    value = top + log2_fast(sum);
  }
  a.exponent[i] = value;
}

// The first of the rows beyond `token`.
DEV int first_after(const int* rows, int count, int token) {
  int low = 0, high = count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (rows[middle] > token) high = middle;
    else low = middle + 1;
  }
  return low;
}
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_AN_SM) attention(const __grid_constant__ Importance a) {
  __shared__ __align__(16) u8 lines[LINES * PITCH];
  u32 at = shared_address(lines);
  let_successor_start();
  wait_for_predecessor();
  int2 work = a.attention_work[blockIdx.x];
  const Prompt& p = a.prompts[work.x];
  const int* padded_rows = a.padded_rows + p.first_padded;
  const float *weights = a.padded_weight + p.first_padded, *exponents = a.exponent + p.first_padded;
  int head = blockIdx.y, part = work.y / p.key_tiles, lane = threadIdx.x & 31, lag = p.lag;
  int first = work.y % p.key_tiles * HELD, mine = first + threadIdx.x / 32 * TILES * 16 + (lane >> 2), length = p.length;
  int low = max_int(part * p.rows_a_part, first_after(padded_rows, p.count, first + lag) / ROWS * ROWS), high = min_int((part + 1) * p.rows_a_part, p.padded);
  float sum[TILES][2] = {};
  if (low < high) {
    const u16 *keys = a.k + p.start * a.k_token + head * a.k_head, *queries = a.q + p.start * a.q_token + head * GROUP * a.q_head;
    clear_edges(at);
    Held held;
    hold(held, [&](int i) { return keys + min_int(first + i, length - 1) * a.k_token; });
    // A stage is the queries of one head at ROWS rows; heads of a group follow each other.
    int stages = (high - low) / ROWS * GROUP;
    auto fetch = [&](int i) {
      const int* rows = padded_rows + low + i / GROUP * ROWS;
      const u16* query = queries + i % GROUP * a.q_head;
      if (i < stages) copy_rows<ROWS>(at + i % ROW_STAGES * ROWS * PITCH, [&](int r) { return query + min_int(rows[r], length - 1) * a.q_token; });
      copies_end();
    };
    for (int i = 0; i < ROW_STAGES - 1; i++) fetch(i);
    for (int i = 0; i < stages;) {
      int from = low + i / GROUP * ROWS;
      float best[TILES][ROWS / 8][4];
#pragma unroll 1
      for (int g = 0; g < GROUP; g++, i++) {
        copies_done<ROW_STAGES - 2>();
        __syncthreads();
        fetch(i + ROW_STAGES - 1);
        float2 exponent[ROWS / 8];
#pragma unroll
        for (int n = 0; n < ROWS / 8; n++)
          exponent[n] = *reinterpret_cast<const float2*>(exponents + static_cast<i64>(head * GROUP + g) * a.padded + from + 8 * n + 2 * (lane & 3));
        float c[TILES][ROWS / 8][4];
        multiply(c, held, at + i % ROW_STAGES * ROWS * PITCH);
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
          for (int n = 0; n < ROWS / 8; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
              float x = c[m][n][j] * LOGIT_SCALE - (j & 1 ? exponent[n].y : exponent[n].x);
              best[m][n][j] = g == 0 ? x : fmaxf(best[m][n][j], x);
            }
      }
      bool edge = padded_rows[from] <= first + HELD - 1 + lag;
#pragma unroll
      for (int n = 0; n < ROWS / 8; n++) {
        float2 weight = *reinterpret_cast<const float2*>(weights + from + 8 * n + 2 * (lane & 3));
        int2 row = *reinterpret_cast<const int2*>(padded_rows + from + 8 * n + 2 * (lane & 3));
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            float x = exp2_fast(POWER * best[m][n][j]) * (j & 1 ? weight.y : weight.x);
            bool later = !edge || mine + lag + 16 * m + 8 * (j / 2) < (j & 1 ? row.y : row.x);
            sum[m][j / 2] += later ? x : 0.f;
          }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * TILES; i++) {
    float x = sum[i / 2][i % 2];
    x += shuffle_xor(x, 1);
    x += shuffle_xor(x, 2);
    int key = mine + 8 * i;
    if ((lane & 3) == 0 && key < length) sums_of(a, p)[(static_cast<i64>(part) * a.heads + head) * length + key] = x;
  }
}
extern "C" __global__ void __launch_bounds__(FINISH_THREADS) finish(const __grid_constant__ Importance a) {
  wait_for_predecessor();
  int2 work = a.finish_work[blockIdx.x];
  const Prompt& p = a.prompts[work.x];
  int key = work.y * FINISH_THREADS + threadIdx.x, head = blockIdx.y;
  if (key >= p.length) return;
  int after = first_after(a.padded_rows + p.first_padded, p.count, key);
  const float* sums = sums_of(a, p) + static_cast<i64>(head) * p.length + key;
  float sum = 0.f;
  for (int part = 0; part < p.row_parts; part++) sum += sums[static_cast<i64>(part) * a.heads * p.length];
  float followers = after < p.count ? fmaxf(a.followers[p.first_padded + after], 1.17549435e-38f) : INF;
  a.out[static_cast<i64>(head) * a.tokens + p.start + key] = __fdiv_rn(sum, followers);
}
