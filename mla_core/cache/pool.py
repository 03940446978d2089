"""Caches of many layers that share one page table."""

from __future__ import annotations

import torch

from mla_core.cache.latent import CacheGeometry, LatentCache
from mla_core.cache.layout import Layout, Scales
from mla_core.errors import CacheError

__all__ = ["CachePool"]


class CachePool:
    """One latent cache a layer, all with the same pages, so that one prepared step serves every layer.

    Page p of every layer belongs to the same request. `layers` are the layer indices it holds.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        layers: int | list[int],
        num_pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        scales: Scales = Scales(),
    ) -> None:
        indices = list(range(layers)) if isinstance(layers, int) else layers
        if not indices:
            raise CacheError("a cache pool needs at least one layer")
        self._caches = {
            index: LatentCache.allocate(layout, num_pages, page_size, device, scales=scales, layer_idx=index)
            for index in indices
        }

    def layer(self, layer_idx: int) -> LatentCache:
        """The cache of one layer. Raises CacheError when the pool has none for it."""
        if layer_idx not in self._caches:
            raise CacheError(f"the pool holds layers {sorted(self._caches)}, not layer {layer_idx}")
        return self._caches[layer_idx]

    @property
    def geometry(self) -> CacheGeometry:
        return next(iter(self._caches.values())).geometry

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes in all layers together."""
        return sum(cache.bytes_per_token for cache in self._caches.values())
