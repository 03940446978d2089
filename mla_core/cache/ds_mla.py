"""Layout fp8_ds_mla: DeepSeek's row of 656 bytes, with a float32 scale for every 128 latent values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_core.cache.base import Layout
from mla_core.cache.scales import Scales
from mla_core.errors import CacheError
from mla_core.quant import tiles

__all__ = ["DsMlaLayout"]

_LATENT, _ROPE, _TILE = 512, 64, 128
# 512 e4m3 bytes, 4 float32 scales, 64 bf16 rope values.
_FIELDS = (_LATENT, 4 * _LATENT // _TILE, 2 * _ROPE)


@dataclass(frozen=True)
class DsMlaLayout(Layout):
    """512 latent bytes e4m3, 4 float32 scales, 64 rope values in bf16; only for 512 + 64.

    Writers choose a tile's scale from its largest value (powers of two with `Scales.power_of_two`); readers
    take any positive finite scale.
    """

    def __post_init__(self) -> None:
        if (self.latent, self.rope) != (_LATENT, _ROPE):
            raise CacheError(
                f"layout {self.id!r} holds {_LATENT} latent and {_ROPE} rope values a token, this model has "
                f"{self.latent} and {self.rope}"
            )

    @property
    def storage(self) -> torch.dtype:
        return torch.uint8

    @property
    def row(self) -> int:
        return sum(_FIELDS)

    def describe(self) -> str:
        return "512 latent bytes e4m3fn, 4 float32 scales of 128 values each, 64 bf16 rope, little-endian"

    def pack(self, latent_TL: Tensor, k_rope_TR: Tensor, scales: Scales) -> Tensor:
        codes, factors = tiles.encode(latent_TL, _TILE, power_of_two=scales.power_of_two)
        fields = (codes, factors, k_rope_TR.to(torch.bfloat16).contiguous())
        return torch.cat([field.view(torch.uint8) for field in fields], dim=-1)

    def unpack(self, rows: Tensor, dtype: torch.dtype, scales: Scales) -> Tensor:
        codes, factors, rope = rows.split(_FIELDS, dim=-1)
        latent = tiles.decode(codes, factors.view(torch.float32))
        return torch.cat([latent.to(dtype), rope.view(torch.bfloat16).to(dtype)], dim=-1)
