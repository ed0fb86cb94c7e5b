// y = W x for up to COLUMNS rows of x, on tensor cores. The channels are split over the warps of a cluster of blocks, so that each keeps its part of x
// in registers and shared memory is left to weights: a warp streams its channels of 16 rows of W (8 pairs) through a ring of its own, and what the warps
// have found of these rows is added up by one of them. The first copies are under way before the predecessor has ended.
constexpr int TILES = COLUMNS / 8, SLICES = CLUSTER * MMA_WARPS;
constexpr int BLOCKS = INPUTS / 32;  // of channels: two products deep
constexpr int PARTS = (BLOCKS + SLICES * STAGE_BLOCKS - 1) / (SLICES * STAGE_BLOCKS), SLICE = PARTS * STAGE_BLOCKS;
constexpr bool EVEN = SLICES * SLICE == BLOCKS;
// Odd rows stand 64 bytes beyond the place that even ones would leave them, so that neighbours are read from different banks.
constexpr int PIECE = 64 * STAGE_BLOCKS, ODD = 8 * PIECE + 64, STAGE_BYTES = 16 * PIECE + 128;
constexpr int RESULT_BYTES = 512 * TILES, BUFFERS = CLUSTER > 1 ? 1 : 2;  // of a warp, for a group of rows; blocks of a cluster take turns
static_assert(INPUTS % 32 == 0, "whole blocks of channels");

// A warp's channels of groups of rows, part after part. All of it is the same in all lanes, and so held in uniform registers: copying takes few
// instructions.
template <Kind KIND> struct Stream {
  const Linear& a;
  u32 data, barriers;
  int first, blocks, groups, step;  // of channels; groups: of rows
  int group, part, stage;           // of the next copy

  DEV bool ready() const { return group < groups && (EVEN || blocks > 0); }
  DEV void fetch() {
    constexpr int apart = KIND == PLAIN ? 2 : 1;  // rows of neighbouring pairs
    u32 bytes = EVEN ? PIECE : 64 * min_int(STAGE_BLOCKS, blocks - part * STAGE_BLOCKS), to = data + stage * STAGE_BYTES, barrier = barriers + 8 * stage;
    int pairs = min_int(8, a.pairs - 8 * group);
    Rows rows = rows_of<KIND>(a, 8 * group);
    const u8* from = reinterpret_cast<const u8*>(a.weight) + 2 * (static_cast<i64>(rows.first) * INPUTS + 32 * first) + part * PIECE;
    i64 second = 2 * static_cast<i64>(rows.second - rows.first) * INPUTS;
    if (elect()) {
      barrier_expect(barrier, 2 * pairs * bytes);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        if (i >= pairs) break;
        u32 place = to + (i & 1) * ODD + (i >> 1) * PIECE;
        const u8* row = from + 2 * apart * i * INPUTS;
        bulk_copy(place, row, bytes, barrier);
        bulk_copy(place + 4 * PIECE, row + second, bytes, barrier);
      }
    }
    __syncwarp();
    stage = stage + 1 == RING ? 0 : stage + 1;
    part++;
    if (part == PARTS || (!EVEN && part * STAGE_BLOCKS >= blocks)) part = 0, group += step;
  }
};

// This lane's part of x: of row lane / 4 of each tile, eight of each 32 channels. What the first products need comes first.
DEV void load_x(const Linear& a, u32 (&x)[TILES][SLICE][4], int first, int blocks, int lane) {
#pragma unroll
  for (int i = 0; i < SLICE; i++)
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      int row = 8 * n + (lane >> 2);
      uint4 raw = {0, 0, 0, 0};
      if (row < a.rows && (EVEN || i < blocks)) raw = *reinterpret_cast<const uint4*>(a.x + static_cast<i64>(row) * INPUTS + 32 * (first + i) + 8 * (lane & 3));
      x[n][i][0] = raw.x, x[n][i][1] = raw.y, x[n][i][2] = raw.z, x[n][i][3] = raw.w;
    }
}

// Adds one part of the channels. Which of 16 channels is which of an instruction's does not matter, so a lane takes 16 bytes of a row at once.
DEV void add_part(float (&y)[TILES][2][4], const u32 (&x)[TILES][SLICE][4], int part, int blocks, u32 from) {
#pragma unroll
  for (int i = 0; i < STAGE_BLOCKS; i++) {
    if (!EVEN && part * STAGE_BLOCKS + i >= blocks) break;
    u32 low[4], high[4];
    load_words<4, 4>(low, from + 64 * i);
    load_words<4, 4>(high, from + 4 * PIECE + 64 * i);
    u32 one[4] = {low[0], high[0], low[1], high[1]}, other[4] = {low[2], high[2], low[3], high[3]};
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const u32(&b)[4] = x[n][part * STAGE_BLOCKS + i];
      mma_model(y[n][0], one, b[0], b[1]);
      mma_model(y[n][1], other, b[2], b[3]);
    }
  }
}

DEV void store_words(u32 address, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
// Where a round's results meet in the block that adds them up, and the barriers of their coming and of being done with them.
struct Place { u32 results, full, empty; };
DEV Place place_of(const u8* shared, const u64* full, const u64* empty, int owner, int round) {
  int buffer = round % BUFFERS;
  return {shared_address(shared) + MMA_WARPS * RING * STAGE_BYTES + buffer * SLICES * RESULT_BYTES, shared_address(full + buffer),
          shared_address(empty + owner * BUFFERS + buffer)};
}
// What a warp has found goes to the block that adds up, and the place back to all.
DEV void deliver(int owner, u32 to, u32 full, const float (&y)[4]) {
  if constexpr (CLUSTER > 1)
    send(address_in(owner, to), y, address_in(owner, full));
  else
    store_words(to, y);
}
DEV void give_back(int block, u32 empty) {
  if constexpr (CLUSTER > 1)
    arrive_there(address_in(block, empty));
  else
    barrier_arrive(empty);
}
// Of the block that adds up: all that the cluster's warps find of a tile's worth of rows.
DEV void expect_results(u32 full) {
  if constexpr (CLUSTER > 1) barrier_expect(full, SLICES * RESULT_BYTES);
}

// The sum of what all warps have found, in a fixed order, and what is made of it: the lane has both rows of pair lane / 4 for two rows of x. again:
// whether others wait for the place. They are told only then: a block that waits for nothing more may have ended when it is told.
template <Kind KIND> DEV void conclude(const Linear& a, int group, int tile, const Place& at, int round, bool again, int lane) {
  int pair = 8 * group + (lane >> 2), request = 8 * tile + 2 * (lane & 3);
  Rows rows = rows_of<KIND>(a, pair);
  Terms terms[2];
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (pair < a.pairs && request + i < a.rows) terms[i] = terms_of<KIND>(a, request + i, pair, rows);
  barrier_wait(at.full, round / BUFFERS & 1);
  if (tile == 0 && lane == 0) expect_results(at.full);
  float y[4] = {};
#pragma unroll
  for (int s = 0; s < SLICES; s++) {
    u32 part[4];
    load_words<4, 4>(part, at.results + s * RESULT_BYTES + 512 * tile + 16 * lane);
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] += __uint_as_float(part[i]);
  }
  __syncwarp();
  if (lane < CLUSTER && again) give_back(lane, at.empty);
#pragma unroll
  for (int i = 0; i < 2; i++)
    if (pair < a.pairs && request + i < a.rows) finish<KIND>(a, request + i, pair, rows, terms[i], y[i], y[2 + i]);
  __syncwarp();
}

// Barriers of the warp's ring, of results that have come, and of places that are free again.
DEV void set_up_barriers(u32 ring, const u64* full, const u64* empty, int lane) {
  if (lane == 0)
    for (int i = 0; i < RING; i++) barrier_init(ring + 8 * i, 1);
  if (threadIdx.x == 0) {
    for (int i = 0; i < BUFFERS; i++) barrier_init(shared_address(full + i), CLUSTER > 1 ? 1 : SLICES), expect_results(shared_address(full + i));
    for (int i = 0; i < CLUSTER * BUFFERS; i++) barrier_init(shared_address(empty + i), TILES);
  }
  barriers_fence();
  async_proxy_fence();
  __syncwarp();
}
// The warp's channels of the next group of rows; parity: of the ring's stages.
template <Kind KIND>
DEV void add_group(float (&y)[TILES][2][4], const u32 (&x)[TILES][SLICE][4], Stream<KIND>& stream, u32 from, int blocks, int& stage, int& parity) {
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    if (!EVEN && part * STAGE_BLOCKS >= blocks) break;
    barrier_wait(stream.barriers + 8 * stage, parity);
    add_part(y, x, part, blocks, from + stage * STAGE_BYTES);
    __syncwarp();
    if (stream.ready()) stream.fetch();
    if (++stage == RING) stage = 0, parity ^= 1;
  }
}
DEV void hand_over(const float (&y)[TILES][2][4], const Place& at, int owner, int own, int lane) {
#pragma unroll
  for (int n = 0; n < TILES; n++) {
    float sum[4];
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] = y[n][0][i] + y[n][1][i];
    deliver(owner, at.results + own * RESULT_BYTES + 512 * n + 16 * lane, at.full, sum);
  }
  __syncwarp();
  if (CLUSTER == 1 && lane == 0) barrier_arrive(at.full);
}

template <Kind KIND> DEV void multiply(const Linear& a) {
  extern __shared__ __align__(128) u8 shared[];
  __shared__ u64 arrived[MMA_WARPS * RING], full[BUFFERS], empty[CLUSTER * BUFFERS];
  let_successor_start();
  int warp = __shfl_sync(ALL, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, rank = CLUSTER > 1 ? cluster_rank() : 0;
  int own = rank * MMA_WARPS + warp, first = own * SLICE, blocks = EVEN ? SLICE : max_int(0, min_int(SLICE, BLOCKS - first));
  int groups = ceil_div(a.pairs, 8), step = gridDim.x / CLUSTER, group = blockIdx.x / CLUSTER;
  Stream<KIND> stream = {a, shared_address(shared) + warp * RING * STAGE_BYTES, shared_address(arrived) + 8 * warp * RING, first, blocks, groups, step, group, 0, 0};
  set_up_barriers(stream.barriers, full, empty, lane);
#pragma unroll 1
  for (int i = 0; i < RING && stream.ready(); i++) stream.fetch();
  if constexpr (CLUSTER > 1) cluster_arrive();
  wait_for_predecessor();
  u32 x[TILES][SLICE][4];
  load_x(a, x, first, blocks, lane);
  if constexpr (CLUSTER > 1)
    cluster_wait();
  else
    __syncthreads();
  u32 from = stream.data + (lane >> 2 & 1) * ODD + (lane >> 3) * PIECE + 16 * (lane & 3);
  // A turn's results are added up after the next turn's products, so that nobody waits for the slowest.
  for (int turn = 0, stage = 0, parity = 0;; turn++, group += step) {
    if (group < groups) {
      float y[TILES][2][4] = {};
      add_group(y, x, stream, from, blocks, stage, parity);
      int owner = turn % CLUSTER, round = turn / CLUSTER;
      Place at = place_of(shared, full, empty, owner, round);
      if (round >= BUFFERS) barrier_wait(at.empty, round / BUFFERS - 1 & 1);
      hand_over(y, at, owner, own, lane);
    }
    int owner = (turn - 1) % CLUSTER, round = (turn - 1) / CLUSTER;
    bool again = group + (BUFFERS * CLUSTER - 1) * step < groups;
    if (turn && rank == owner)
#pragma unroll
      for (int n = 0; n < TILES; n++)
        if (warp == (round * TILES + n) % MMA_WARPS) conclude<KIND>(a, group - step, n, place_of(shared, full, empty, owner, round), round, again, lane);
    if (group >= groups) break;
  }
  if constexpr (CLUSTER > 1) cluster_leave();
}
#define LINEAR(NAME, KIND) \
  extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(32 * MMA_WARPS, 1) NAME(const __grid_constant__ Linear a) { multiply<KIND>(a); }
LINEAR(plain, PLAIN)
LINEAR(swiglu, SWIGLU)
LINEAR(rotary, ROTARY)
