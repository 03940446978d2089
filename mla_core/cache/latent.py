"""One layer's paged latent cache, and its official reader and writer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_core.cache.layout import Layout, Scales
from mla_core.errors import CacheError

__all__ = ["CacheGeometry", "LatentCache", "SlotTargets"]


@dataclass(frozen=True)
class CacheGeometry:
    """What planning may know about a cache: everything but its bytes."""

    layout: Layout
    page_size: int
    num_pages: int
    device: torch.device


@dataclass(frozen=True)
class SlotTargets:
    """A slot mapping split into page and offset; `rows` picks the tokens that are stored, None means all.

    `slots` is the mapping itself, [T] int64, for kernels that skip -1 on their own.
    """

    pages: Tensor
    offsets: Tensor
    rows: Tensor | None
    slots: Tensor

    @classmethod
    def split(cls, slot_mapping: Tensor, geometry: CacheGeometry, *, fixed: bool = False) -> SlotTargets:
        """Drop the slots that say "do not write" (-1). Raises CacheError for any other slot outside the
        cache.

        fixed: keep one target per row, for graphs; rows that store nothing repeat the first one that does.
        """
        limit = geometry.num_pages * geometry.page_size
        slots = slot_mapping.long()
        rows = None
        if slots.numel():
            low, high = (int(bound) for bound in torch.aminmax(slots))
            if low < -1 or high >= limit:
                wrong = high if high >= limit else low
                raise CacheError(
                    f"slot {wrong} is outside the cache: {geometry.num_pages} pages of {geometry.page_size} "
                    f"tokens have slots 0 to {limit - 1}, and -1 means do not write"
                )
            if low < 0 or fixed:
                rows = (slots >= 0).nonzero().squeeze(1)
        every = slots
        if fixed:
            if rows is None or rows.numel() == 0:
                raise CacheError("a graph step must store at least one token, but every slot is -1")
            rows = torch.where(slots >= 0, torch.arange(slots.numel(), device=slots.device), rows[0])
        if rows is not None:
            slots = slots[rows]
        return cls(slots // geometry.page_size, slots % geometry.page_size, rows, every)

    @classmethod
    def at(cls, pages: Tensor, offsets: Tensor, page_size: int) -> SlotTargets:
        """Targets that are all stored or read."""
        return cls(pages, offsets, None, pages * page_size + offsets)


@dataclass(eq=False)
class LatentCache:
    """Pages of latent rows for one layer. `data` is the raw tensor, possibly strided: [num_pages, page_size,
    row], or [num_pages, page_size * row] where the layout keeps planes.

    `layer_idx` names the layer it was made for, None for any. `weights_version` is the version of the
    weights that wrote the newest rows.
    """

    data: Tensor
    layout: Layout
    scales: Scales = Scales()
    layer_idx: int | None = None
    weights_version: int | None = None

    def __post_init__(self) -> None:
        page_size = self.layout.page_size_of(self.data)
        if page_size < 1:
            raise CacheError(f"page_size must be at least 1, got {page_size}")
        self.geometry = CacheGeometry(self.layout, page_size, self.data.shape[0], self.data.device)

    @classmethod
    def allocate(
        cls,
        layout: Layout,
        num_pages: int,
        page_size: int,
        device: torch.device | str,
        *,
        scales: Scales = Scales(),
        layer_idx: int | None = None,
    ) -> LatentCache:
        """A zeroed cache of `num_pages` pages of `page_size` tokens."""
        if num_pages < 0 or page_size < 1:
            raise CacheError(
                f"a cache needs num_pages >= 0 and page_size >= 1, got {num_pages} and {page_size}"
            )
        return cls(layout.allocate(num_pages, page_size, device), layout, scales, layer_idx)

    @classmethod
    def from_tensor(
        cls, data: Tensor, layout: Layout, page_size: int, *, scales: Scales = Scales()
    ) -> LatentCache:
        """A cache over the caller's own, possibly strided, tensor of the layout's shape, without a copy."""
        cache = cls(data, layout, scales)
        if cache.page_size != page_size:
            raise CacheError(f"page_size={page_size} but the tensor has pages of {cache.page_size} tokens")
        return cache

    @property
    def page_size(self) -> int:
        return self.geometry.page_size

    @property
    def num_pages(self) -> int:
        return self.geometry.num_pages

    @property
    def bytes_per_token(self) -> int:
        return self.layout.bytes_per_token

    def write(self, slot_mapping: Tensor, latent_TL: Tensor, k_rope_TR: Tensor) -> None:
        """Store normed latents and rotated rope keys at their slots; slot -1 stores nothing."""
        self.write_targets(SlotTargets.split(slot_mapping, self.geometry), latent_TL, k_rope_TR)

    def write_targets(self, targets: SlotTargets, latent_TL: Tensor, k_rope_TR: Tensor) -> None:
        """`write` with the slot mapping already split, as an engine step does once for all layers."""
        if targets.rows is not None:
            latent_TL, k_rope_TR = latent_TL[targets.rows], k_rope_TR[targets.rows]
        rows = self.layout.pack(latent_TL, k_rope_TR, self.scales)
        self.layout.write(self.data, targets.pages, targets.offsets, rows)

    def read(
        self, block_table: Tensor, length: int, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """The first `length` tokens of one request (block_table: its row of page ids): (latent_SL,
        k_rope_SR). Raises CacheError when the row is too short or names a page that does not exist.
        """
        where = torch.arange(length, device=self.data.device)
        pages = self._pages(block_table, length)[where // self.page_size]
        return self.read_targets(
            SlotTargets.at(pages, where % self.page_size, self.page_size), dtype or self._value_dtype()
        )

    def _pages(self, block_table: Tensor, length: int) -> Tensor:
        """The page ids that `length` tokens need; what the row holds beyond them does not matter."""
        needed = -(-length // self.page_size)
        pages = block_table.to(self.data.device).long().reshape(-1)[:needed]
        if pages.numel() < needed:
            raise CacheError(
                f"{length} tokens need {needed} pages of {self.page_size}, but the row has {pages.numel()}"
            )
        wrong = pages[(pages < 0) | (pages >= self.num_pages)]
        if wrong.numel():
            raise CacheError(
                f"page {int(wrong[0])} is outside the cache, which has pages 0 to {self.num_pages - 1}"
            )
        return pages

    def read_targets(self, targets: SlotTargets, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Decoded rows at (page, offset): (latent_SL, k_rope_SR) of `dtype`."""
        rows = self.layout.read(self.data, targets.pages, targets.offsets)
        values = self.layout.unpack(rows, dtype, self.scales)
        return values[..., : self.layout.latent], values[..., self.layout.latent :]

    def _value_dtype(self) -> torch.dtype:
        storage = self.layout.storage
        return storage if storage.is_floating_point and storage.itemsize >= 2 else torch.float32
