"""Pages, free list, head tables, windows and their bookkeeping."""

from siftkv.cache.accounting import CacheUsage
from siftkv.cache.cache import KVCache
from siftkv.cache.conditioning import build_conditioning
from siftkv.cache.rules import SlotRule
from siftkv.cache.spec import CacheSpec, dense_name, merge_tiers

__all__ = ["CacheSpec", "CacheUsage", "KVCache", "SlotRule", "build_conditioning", "dense_name", "merge_tiers"]
