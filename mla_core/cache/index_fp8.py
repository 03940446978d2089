"""Layout idx_fp8: a sparse indexer's keys, e4m3 with one float32 scale a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_core.cache.planes import PlaneLayout
from mla_core.cache.scales import Scales
from mla_core.errors import CacheError
from mla_core.quant import tiles

__all__ = ["IndexFp8Layout"]

_ALIGNMENT = 16


@dataclass(frozen=True)
class IndexFp8Layout(PlaneLayout):
    """Two planes: the key's e4m3 bytes, then its float32 scale. `latent` is the key's width, `rope` is 0.

    Writers choose the scale from the key's largest value (powers of two with `Scales.power_of_two`); readers
    take any positive finite scale.
    """

    def __post_init__(self) -> None:
        if self.rope or self.latent % _ALIGNMENT or not self.latent:
            raise CacheError(
                f"layout {self.id!r} holds an indexer's keys, a multiple of {_ALIGNMENT} values each, and no "
                f"rope part; got {self.latent} and {self.rope}"
            )

    @property
    def planes(self) -> tuple[int, ...]:
        return self.latent, 4

    def describe(self) -> str:
        return f"plane of {self.latent} key bytes e4m3fn; plane of one float32 scale a key, little-endian"

    def pack(self, latent_TL: Tensor, k_rope_TR: Tensor, scales: Scales) -> Tensor:
        codes, factors = tiles.encode(latent_TL, self.latent, power_of_two=scales.power_of_two)
        return torch.cat([codes.view(torch.uint8), factors.view(torch.uint8)], dim=-1)

    def unpack(self, rows: Tensor, dtype: torch.dtype, scales: Scales) -> Tensor:
        codes, factors = rows.split(self.planes, dim=-1)
        return tiles.decode(codes, factors.view(torch.float32)).to(dtype)
