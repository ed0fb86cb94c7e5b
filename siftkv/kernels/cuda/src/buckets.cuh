// Votes without a second product: the pass over keys leaves the bucket of every logit in memory, a byte each, and votes are counted from those.
//
// A tile has a word for each two rows, r and r + 8 of a warp's 16, and each two tokens that follow one another: row, row + 8, row, row + 8. A block has room for
// a.room_tiles tiles of a head slot, as long as it runs; there is room for as many blocks as can run at once.
constexpr int PAIRS = KEYS / 2, TILE_BUCKETS = ROWS * KEYS;
static_assert(TOP < 128, "a bit of a byte left for a comparison");
// The first token of the n-th pair of a tile, as lanes hold them.
DEV int token_of_pair(int n) { return REACH > 0 ? 2 * n : 8 * (n / 8 * 2 + n % 2) + n / 2 % 4 * 2; }

DEV int own_multiprocessor() {
  u32 number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return static_cast<int>(number);
}
// As a rule that which the block before left on the same multiprocessor.
DEV Room take_room(const Select& a) {
  int i = own_multiprocessor() % a.rooms;
  while (atomicCAS(a.taken + i, 0u, 1u) != 0u) i = i + 1 == a.rooms ? 0 : i + 1;
  return {i, a.buckets + static_cast<i64>(i) * a.room_tiles * TILE_BUCKETS};
}
DEV void leave_room(const Select& a, const Room& room) {
  __threadfence();
  atomicExch(a.taken + room.number, 0u);
}
// Where a lane's words of a tile go, null where there is no room, for which no candidate's tile is.
DEV u8* words_of_tile(const Select& a, const Room& room, int tile) {
  u32 thread = thread_now();
  if (tile < 0 || tile >= a.room_tiles) return nullptr;
  return room.buckets + (static_cast<u32>(tile) * TILE_BUCKETS + (4 * PAIRS * (thread >> 2 & (ROWS / 2 - 1)) | 8 * (thread & 3)));
}
DEV void store_there(u8* at, u32 first, u32 second) { asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(at), "r"(first), "r"(second) : "memory"); }
DEV void store_words(u8* at, int run, u32 first, u32 second) {
  if (at != nullptr) store_there(at + 32 * run, first, second);
}
// The word of two rows and two tokens, from their buckets' bits.
DEV u32 word_of(u32 first, u32 lower_first, u32 second, u32 lower_second) {
  return __byte_perm(__byte_perm(first, lower_first, 0x0040), __byte_perm(second, lower_second, 0x0040), 0x5410);
}

// Of rows r and r + 8 twice: what makes a byte's top bit whether its bucket reaches the row's bar. And of each of them, what makes a byte the bits of a bf16, the
// share of attention that its bucket stands for, twice. Between octaves a straight line stands for the curve, of which `LINE` octaves are the mean excess; what
// has no bucket has a byte of 0 there, all others 128 more.
constexpr float LINE = 0.0574f, NO_BUCKET = 128.f / FINE;
DEV void write_marks(const Select& a, const Head& h, Shared& s) {
  int row = threadIdx.x, pair = row / 16 * 8 + row % 8, half = row % 16 / 8;
  if (row >= ROWS) return;
  int bucket = REACH > 0 ? s.pooled[row] : s.threshold[row];
  bool counts = bucket != NEVER_REACHED, everything = a.p >= 1.f || bucket == 0;
  float exponent = 127.f - LINE - NO_BUCKET + s.low[row] - s.exponent[row];
  u8* reaches = reinterpret_cast<u8*>(&s.reaches[pair]);
  reaches[half] = reaches[2 + half] = static_cast<u8>(!counts ? 0 : everything ? 128 : 128 - bucket);
  s.shares[pair][half] = counts && exponent > 0.f ? static_cast<u32>(exponent * 128.f) * 0x10001u : 0u;
  // What stands below the window, of which only the sum is known, as if every token had its part.
  s.rest[row] = counts ? sum_of(s.below, row) / (sum_of(s.total, row) * static_cast<float>(max_int(1, h.total))) : 0.f;
}
// What tokens of a warp's tile reach, rows a bit each, and their attention, behind those of BEFORE tokens before it.
constexpr int FOUND_PAGES = 96;
struct Found {
  u32 rows[BEFORE + KEYS][4];
  float mass[BEFORE + KEYS];
  int positions[BEFORE + KEYS];
  int pages[FOUND_PAGES];  // entries of the page table
};
constexpr int READING_WARPS = SELECT_THREADS / 32;
DEV u32 add_bf16(u32 x, u32 y) {
  u32 z;
  asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
}
// A warp's words on their way, where keys, queries and the histogram were: chunks of eight lines, each of the pairs of a tile, in turn. What is found comes last.
constexpr int CHUNK_BYTES = 8 * 4 * PAIRS, TILE_CHUNKS = TILE_BUCKETS / CHUNK_BYTES, FOUND_AT = RING_BYTES + OWN_BYTES + 4 * HISTOGRAM_WORDS - READING_WARPS * static_cast<int>(sizeof(Found));
constexpr int CHUNKS = FOUND_AT / (READING_WARPS * CHUNK_BYTES);
static_assert(CHUNKS > 2 && FOUND_AT % 16 == 0, "chunks that are on their way");
struct Chunks {
  const u8* from;  // a lane's part of the next chunk
  u32 lines, at;   // where chunks stand; the one that is read, from them on
  int left;
  DEV void copy(u32 to) {
    if (left-- > 0) copy16(lines + to, from), copy16(lines + to + 512, from + 512);
    from += CHUNK_BYTES;
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  DEV Chunks(Shared& s, const Room& room, int tile, int tiles)
      : from(room.buckets + static_cast<i64>(tile) * TILE_BUCKETS + 16 * (threadIdx.x & 31)), lines(shared_address(s.lines) + threadIdx.x / 32 * (CHUNKS * CHUNK_BYTES) + 16 * (threadIdx.x & 31)),
        at(0), left(tiles * TILE_CHUNKS) {
#pragma unroll
    for (int i = 0; i < CHUNKS - 1; i++) copy(i * CHUNK_BYTES);
  }
  // Calls `f(address of a lane's first word)` with the next chunk, and has another one copied where the one before stood.
  template <class F> DEV void next(F f) {
    asm volatile("cp.async.wait_group %0;" ::"n"(CHUNKS - 2) : "memory");
    __syncwarp();
    copy(at == 0 ? (CHUNKS - 1) * CHUNK_BYTES : at - CHUNK_BYTES);
    f(lines + at - 12 * (thread_now() & 31));
    at = at == (CHUNKS - 1) * CHUNK_BYTES ? 0 : at + CHUNK_BYTES;
  }
};
// The warp's own, told anew each time.
DEV Found& found(Shared& s) { return reinterpret_cast<Found*>(s.lines + FOUND_AT)[thread_now() / 32]; }
// What the next tile reaches.
DEV void find_tile(Shared& s, Chunks& chunks, float rest) {
  constexpr u32 octave = 128 / FINE;
  u32 reaches_at = shared_address(s.reaches), shares_at = shared_address(s.shares);
  float mass[2] = {rest, rest};
#pragma unroll 1
  for (int q = 0; q < 4; q++) {
    u32 reached[2];
#pragma unroll
    for (int half = 0; half < 2; half++)
      chunks.next([&](u32 words) {
        u32 own[8], reach[8], shares[16], sums[2];
        // All at once, before anything waits.
#pragma unroll
        for (int i = 0; i < 8; i++) own[i] = load_shared(words + i * (4 * PAIRS));
        load_words<8, 4>(reach, reaches_at + 4 * (16 * q + 8 * half)), load_words<16, 4>(shares, shares_at + 8 * (16 * q + 8 * half));
#pragma unroll
        for (int i = 0; i < 8; i++) {
          u32 word = own[i], bits = (word + reach[i]) & 0x80808080u;
          reached[half] = i == 0 ? bits : reached[half] >> 1 | bits;
          word |= (word + 0x7F7F7F7Fu) & 0x80808080u;
          u32 share = add_bf16((word & 0xFF00FFu) * octave + shares[2 * i], (word >> 8 & 0xFF00FFu) * octave + shares[2 * i + 1]);
          sums[i / 4] = i % 4 == 0 ? share : add_bf16(sums[i / 4], share);
        }
        u32 sum = add_bf16(sums[0], sums[1]);
        mass[0] += __uint_as_float(sum << 16), mass[1] += __uint_as_float(sum & 0xFFFF0000u);
      });
    auto rows = found(s).rows + BEFORE + token_of_pair(thread_now() & 31);
    rows[0][q] = __byte_perm(reached[0], reached[1], 0x5410), rows[1][q] = __byte_perm(reached[0], reached[1], 0x7632);
  }
  float* masses = found(s).mass + BEFORE + token_of_pair(thread_now() & 31);
  masses[0] = mass[0], masses[1] = mass[1];
}
// Rows 32 q to 32 q + 31 that see a token.
DEV u32 seeing_rows(const Shared& s, int v, int q) {
  u32 rows = 0;
#pragma unroll 1
  for (int i = 0; i < 32; i++) rows |= v >= 0 && v < s.visible[32 * q + i] ? 1u << i : 0u;
  return rows;
}
DEV void find_positions(const Select& a, const Head& h, Found& f, int from, int first) {
  for (int j = first + (threadIdx.x & 31); j < KEYS; j += 32) {
    int v = from + j;
    f.positions[BEFORE + j] = v < 0 ? -(1 << 20) : v >= h.total ? 1 << 30 : position_of(a, h, v);
  }
}
// Of the middle of a pool, which ends at the j-th token of the tile, or of that token: rows that vote for it.
DEV u32 votes_of_token(const Head& h, const Shared& s, const Found& f, int from, int j, int least, bool dense) {
  u32 votes = 0, rows[4] = {0, 0, 0, 0};
#if REACHES
  u32 near = dense ? ALL_NEAR : near_at(shared_address(f.positions), j);
#pragma unroll
  for (int d = 0; d < WIDTH; d++) {
    uint4 x = *reinterpret_cast<const uint4*>(f.rows[BEFORE + j - d]);
    if (near >> d & 1u) rows[0] |= x.x, rows[1] |= x.y, rows[2] |= x.z, rows[3] |= x.w;
  }
#else
  for (int q = 0; q < 4; q++) rows[q] = f.rows[j][q];
#endif
  int v = from + j - REACH;
  bool seen = v < least && v >= 0;
#pragma unroll
  for (int q = 0; q < 4; q++) votes += __popc(seen ? rows[q] : rows[q] & seeing_rows(s, v, q));
  return votes;
}
// A run of tiles a warp, for pools with the tile before it.
DEV Decided count_stored_votes(const Select& a, const Head& h, Shared& s, int block) {
  int warp = threadIdx.x / 32, lane = threadIdx.x & 31, least = seen_by_all(h, s);
  Ballots ballots(a, h, s, block);
  float rest = 0.f;
  for (int r = lane; r < ROWS; r += 32) rest += s.rest[r];
  for (int o = 1; o < 32; o <<= 1) rest += shuffle_xor(rest, o);
  int begin = (h.first + h.pad) / KEYS, end = min_int(a.room_tiles, ceil_div(h.first + h.pad + min_int(h.candidates, a.columns) + REACH, KEYS));
  int run = ceil_div(end - begin, READING_WARPS), tile = begin + warp * run, last = min_int(end, tile + run);
  if (tile >= last) return ballots.decided;
  bool counts = BEFORE == 0 || tile == 0;
  tile -= !counts;
  Chunks chunks(s, s.room, tile, last - tile);
  Dense dense = dense_tiles(h, s, least);
  // Of the run's pages, whose first is number `page`; and where a candidate of them stands.
  int page = max_int(0, first_of(h, tile) - REACH - h.first) / Source::TOKENS, pages = min_int(FOUND_PAGES, ceil_div(h.candidates, Source::TOKENS) - page);
  for (int i = lane; i < pages; i += 32) found(s).pages[i] = ballots.pages[page + i];
  auto page_of = [&](const Found& f, int v) { return page_at(a.cache, f.pages[(v - h.first) / Source::TOKENS - page]); };
  if (lane < BEFORE) {
    Found& f = found(s);
    f.positions[lane] = -(1 << 20), f.mass[lane] = 0.f;
#pragma unroll
    for (int q = 0; q < 4; q++) f.rows[lane][q] = 0;
  }
  __syncwarp();
#pragma unroll 1
  for (; tile < last; tile++, counts = true) {
    int from = first_of(h, tile);
    bool all = dense.has(tile);
    u32 votes[2] = {0, 0};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int v = from + 32 * e + (thread_now() & 31) - REACH;
      if (Source::VOTES && ballots.last && counts && ballots.has(v)) votes[e] = *ballots.beside(page_of(found(s), v), v).votes;
    }
    if (REACH > 0 && !(all && (tile == last - 1 || dense.has(tile + 1)))) find_positions(a, h, found(s), from, all ? KEYS - BEFORE : 0);
    find_tile(s, chunks, rest);
    __syncwarp();
    Found& f = found(s);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      int j = 32 * e + (thread_now() & 31), v = from + j - REACH;
      if (!counts || !ballots.has(v)) continue;
      ballots.cast(v, {page_of(f, v), votes[e], 0}, votes_of_token(h, s, f, from, j, least, all), f.mass[BEFORE + j - REACH]);
    }
    if (BEFORE == 0) continue;
    __syncwarp();
    int lane = thread_now() & 31;
    if (lane < BEFORE) {
      *reinterpret_cast<uint4*>(f.rows[lane]) = *reinterpret_cast<const uint4*>(f.rows[KEYS + lane]);
      f.mass[lane] = f.mass[KEYS + lane], f.positions[lane] = f.positions[KEYS + lane];
    }
    __syncwarp();
  }
  return ballots.decided;
}
