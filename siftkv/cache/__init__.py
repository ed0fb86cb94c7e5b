"""Pages, free list, head tables, windows and their bookkeeping."""

from siftkv.cache.accounting import CacheUsage
from siftkv.cache.cache import KVCache, SlotRule
from siftkv.cache.conditioning import build_conditioning
from siftkv.cache.spec import CacheSpec, dense_name, merge_tiers

__all__ = ["CacheSpec", "CacheUsage", "KVCache", "SlotRule", "build_conditioning", "dense_name", "merge_tiers"]
