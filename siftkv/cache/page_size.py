"""How large a pool's pages are: the size that loses least for the formats it holds."""

from __future__ import annotations

from functools import lru_cache

from siftkv.formats import TOKEN_QUANTUM, PageLayout, Tier

TYPICAL_TOKENS = 1024
"""Tokens that one head of one tier is taken to keep when page sizes are weighed: half a page a tier is lost to the last
page."""

GPU_PAGE_STEP = 128
"""Bytes. On a GPU pages that start at odd multiples of 64 bytes cost up to 5 % of read bandwidth (H200)."""

GPU_TOKEN_STEP = 16
"""On a GPU tokens a page are a multiple of this in quantised tiers: a tile of 32 has a tail of 16, not of 8."""

GPU_MIN_PAGE = 3584
"""Bytes. Smaller pages are too little work for one bulk copy (H200: not measured below)."""


@lru_cache(maxsize=64)
def choose_page_bytes(tiers: tuple[Tier, ...], head_dim: int, gpu: bool = False) -> int:
    """The page size (bytes, a multiple of 64, on a GPU of 128) that loses least, for the tiers a pool is opened with.

    The loss of a tier is the unused end of a full page plus half a page in `TYPICAL_TOKENS` tokens; the worst tier
    counts. Dense tiers decide only where there is no quantised one.
    """
    deciding = tuple(t for t in tiers if not t.format.dense) or tiers
    smallest = max(PageLayout(t, head_dim, 1 << 24).token_bytes for t in tiers)
    step = GPU_PAGE_STEP if gpu else 64

    def loss(page_bytes: int) -> tuple[int, float]:
        worst, odd = 0.0, 0
        for tier in deciding:
            layout = PageLayout(tier, head_dim, page_bytes)
            worst = max(worst, layout.waste + layout.tokens / 2 / TYPICAL_TOKENS)
            odd += int(gpu and not tier.format.dense and layout.tokens % GPU_TOKEN_STEP != 0)
        return odd, worst

    least = max(smallest * TOKEN_QUANTUM * 2, GPU_MIN_PAGE if gpu else 1024)
    first = -(-least // step) * step
    return min(range(first, first + 16384, step), key=loss)
