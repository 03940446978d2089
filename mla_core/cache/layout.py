"""How one token's latent row lies in memory.

A layout is bound to a model's dims. It allocates pages, packs rows, and is the only reader and writer of
their bytes.
Legend: T tokens, S cached tokens, L latent, R rope, P pages.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_core.errors import CacheError

__all__ = ["Layout", "Scales", "layout_for", "layout_ids"]


@dataclass(frozen=True)
class Scales:
    """Per-tensor factors of a quantised cache: stored = value / k_scale. MLA has one scale for the shared
    latent.
    """

    k_scale: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.k_scale) and self.k_scale > 0):
            raise CacheError(
                f"k_scale must be a positive finite number, got {self.k_scale}; use 1.0 for no scaling"
            )


@dataclass(frozen=True)
class Layout(ABC):
    """A named byte layout for rows of L latent and R rope values; the rope part is stored rotated.

    `id` names it everywhere; `hash` changes when the bytes would, so engines that exchange pages can compare.
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

    def allocate(self, num_pages: int, page_size: int, device: torch.device | str) -> Tensor:
        """A zeroed cache tensor [num_pages, page_size, row]."""
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
        """Fetch whole pages [P, page_size, row], into `out` when given."""
        return torch.index_select(data, 0, pages_P, out=out)


@dataclass(frozen=True)
class PlainLayout(Layout):
    """Unquantised rows: L latent values, then R rotated rope values, in one float type."""

    element: torch.dtype

    @property
    def storage(self) -> torch.dtype:
        return self.element

    @property
    def row(self) -> int:
        return self.width

    def describe(self) -> str:
        return f"{self.latent} latent then {self.rope} rope values of {self.element}, native byte order"

    def pack(self, latent_TL: Tensor, k_rope_TR: Tensor, scales: Scales) -> Tensor:
        return torch.cat([latent_TL, k_rope_TR], dim=-1).to(self.element)

    def unpack(self, rows: Tensor, dtype: torch.dtype, scales: Scales) -> Tensor:
        return rows.to(dtype)


_PLAIN = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def layout_ids() -> list[str]:
    """Names that `layout_for` knows, besides "auto"."""
    return list(_PLAIN)


def layout_for(name: str, dtype: torch.dtype, latent: int, rope: int) -> Layout:
    """The one place that turns a user's cache name into a layout; "auto" stores the layer's own dtype.

    Raises CacheError for a name that does not exist.
    """
    if name == "auto":
        name = next((known for known, element in _PLAIN.items() if element == dtype), str(dtype))
    if name not in _PLAIN:
        raise CacheError(f"unknown cache layout {name!r}; known layouts: auto, {', '.join(layout_ids())}")
    return PlainLayout(id=name, latent=latent, rope=rope, element=_PLAIN[name])
