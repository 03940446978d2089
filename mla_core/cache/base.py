"""How one token's latent row lies in memory: the interface that every layout implements.

A layout is bound to a model's dims. It allocates pages, packs rows, and is the only reader and writer of
their bytes.
Legend: T tokens, S cached tokens, L latent, R rope, P pages.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_core.cache.scales import Scales
from mla_core.errors import CacheError

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout(ABC):
    """A named byte layout for rows of L latent and R rope values; the rope part is stored rotated.

    `id` names it everywhere; `hash` changes when the bytes would, so engines that exchange pages can compare.
    Tokens lie one row after the other, data is [num_pages, page_size, row]; `PlaneLayout` is the other kind.
    """

    id: str
    latent: int
    rope: int

    @property
    @abstractmethod
    def storage(self) -> torch.dtype:
        """Element type of the cache tensor."""

    @property
    @abstractmethod
    def row(self) -> int:
        """Storage elements a token takes."""

    @abstractmethod
    def describe(self) -> str:
        """The bytes of one row, field by field."""

    @abstractmethod
    def pack(self, latent_TL: Tensor, k_rope_TR: Tensor, scales: Scales) -> Tensor:
        """Encode tokens as rows [T, row] of the storage type."""

    @abstractmethod
    def unpack(self, rows: Tensor, dtype: torch.dtype, scales: Scales) -> Tensor:
        """Decode rows [..., row] to values [..., L + R] of `dtype`; may return a view of `rows`."""

    def calibrate(self, latent_TL: Tensor, k_rope_TR: Tensor) -> Scales:
        """Scales under which none of these values saturates; 1 where the layout needs none."""
        return Scales()

    @property
    def bytes_per_token(self) -> int:
        return self.row * self.storage.itemsize

    @property
    def width(self) -> int:
        """L + R: values a row decodes to."""
        return self.latent + self.rope

    @property
    def hash(self) -> str:
        return hashlib.sha256(f"{self.id}:{self.latent}:{self.rope}:{self.describe()}".encode()).hexdigest()[
            :16
        ]

    def page_size_of(self, data: Tensor) -> int:
        """Tokens in a page of this cache tensor. Raises CacheError when it is not one of this layout."""
        shape = tuple(data.shape)
        if len(shape) != 3 or shape[2] != self.row or data.dtype != self.storage:
            raise CacheError(
                f"layout {self.id!r} needs [num_pages, page_size, {self.row}] of {self.storage}, "
                f"got {list(shape)} of {data.dtype}"
            )
        return shape[1]

    def allocate(self, num_pages: int, page_size: int, device: torch.device | str) -> Tensor:
        """A zeroed cache tensor."""
        return torch.zeros(num_pages, page_size, self.row, dtype=self.storage, device=device)

    def write(self, data: Tensor, pages_T: Tensor, offsets_T: Tensor, rows: Tensor) -> None:
        """Store packed rows at (page, offset), and touch nothing else. Offsets are 64-bit, strides are
        data's own.
        """
        data[pages_T, offsets_T] = rows

    def read(self, data: Tensor, pages_S: Tensor, offsets_S: Tensor) -> Tensor:
        """Fetch packed rows [S, row] from (page, offset)."""
        return data[pages_S, offsets_S]

    def gather_pages(self, data: Tensor, pages_P: Tensor, out: Tensor | None = None) -> Tensor:
        """Fetch whole pages as rows [P, page_size, row], into `out` when given."""
        return torch.index_select(data, 0, pages_P, out=out)
