"""The paged latent cache: byte layouts, the cache itself, a pool for many layers, and a page allocator."""

from mla_core.cache.allocator import BlockAllocator
from mla_core.cache.latent import CacheGeometry, LatentCache, SlotTargets
from mla_core.cache.layout import Layout, Scales, layout_for, layout_ids
from mla_core.cache.pool import CachePool

__all__ = [
    "BlockAllocator",
    "CacheGeometry",
    "CachePool",
    "LatentCache",
    "Layout",
    "Scales",
    "SlotTargets",
    "layout_for",
    "layout_ids",
]
