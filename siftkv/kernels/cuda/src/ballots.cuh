// What becomes of votes: they go to the tokens that are candidates.
// Takes votes and masses of a block's rows to the candidates: with the last block they are decided on.
struct Ballots {
  const Select& a;
  const Head& h;
  const int* of_query;
  u64* tally;
  Entries pages;
  int candidates, least;  // tokens before `least` are seen by all queries
  bool first, last;
  Decided decided;
  DEV Ballots(const Select& a, const Head& h, const Shared& s, int block)
      : a(a), h(h), of_query(s.of_query), tally(a.tally + static_cast<i64>(h.index) * a.columns), pages(entries_of(a.cache, h.at, SOURCE)),
        candidates(min_int(h.candidates, a.columns)), least(h.total), first(block == 0), last((block + 1) * ROWS >= h.rows), decided{0.f, 0} {
    for (int w = threadIdx.x & 31; w < h.rows / GROUP; w += 32) least = min_int(least, of_query[w]);
    for (int o = 1; o < 32; o <<= 1) least = min_int(least, shuffle_xor(least, o));
  }
  DEV bool has(int v) const { return v >= h.first && v - h.first < candidates; }
  DEV Beside beside(u8* page, int v) const {
    int index = (v - h.first) % Source::TOKENS;
    Beside b = {nullptr, nullptr};
    if constexpr (Source::VOTES) b.votes = reinterpret_cast<u16*>(page + Source::VOTE) + index;
    if constexpr (Source::SCORES && !BY_SCORE && !STORED) b.score = reinterpret_cast<u16*>(page + Source::SCORE) + index;
    return b;
  }
  // Of a candidate, loaded early: its page, the votes that stand beside it, its score.
  struct Early { u8* page; u32 votes, score; };
  DEV Early early(int v) const {
    Early e = {nullptr, 0, 0};
    if (!has(v) || (!last && !BY_SCORE)) return e;
    e.page = page_at(a.cache, pages[(v - h.first) / Source::TOKENS]);
    Beside at = beside(e.page, v);
    if (at.votes != nullptr) e.votes = *at.votes;
    if constexpr (BY_SCORE) e.score = reinterpret_cast<const u16*>(e.page + Source::SCORE)[(v - h.first) % Source::TOKENS];
    return e;
  }
  DEV void cast(int v, const Early& e, u32 votes, float mass) {
    if (!has(v)) return;
    int i = v - h.first;
    if (!first) votes += votes_of(tally[i]), mass += mass_of(tally[i]);
    if (!last) return void(tally[i] = tally_of(votes, mass));
    u64 rank = decide_token(a, h, i, beside(e.page, v), e.votes, votes, mass, rows_that_see(h, of_query, least, v), decided);
    if (ranks(a, h)) tally[i] = rank;
  }
};
