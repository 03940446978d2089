"""Layouts nvfp4 and nvfp4_rope_bf16: 4-bit values in groups of 16, stored 64 tokens a page as planes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_core.cache.planes import PlaneLayout
from mla_core.cache.scales import Scales, largest_size
from mla_core.errors import CacheError
from mla_core.quant import e2m1, e4m3, nvfp4

__all__ = ["Nvfp4Layout", "Nvfp4RopeBf16Layout"]

_PAGE_SIZE = 64


@dataclass(frozen=True)
class Nvfp4Layout(PlaneLayout):
    """Two planes: (L + R) / 2 bytes of e2m1 pairs, (L + R) / 16 e4m3 group scales; latent before rope."""

    def __post_init__(self) -> None:
        if self.latent % nvfp4.GROUP or self.rope % nvfp4.GROUP:
            raise CacheError(
                f"layout {self.id!r} needs latent and rope widths that are multiples of {nvfp4.GROUP}, this "
                f"model has {self.latent} and {self.rope}"
            )

    @property
    def fixed_page_size(self) -> int | None:
        return _PAGE_SIZE

    @property
    def planes(self) -> tuple[int, ...]:
        return self.width // 2, self.width // nvfp4.GROUP

    def describe(self) -> str:
        return (
            f"pages of {_PAGE_SIZE} tokens; plane of {self.latent} latent then {self.rope} rope values e2m1, "
            "low nibble first; plane of their e4m3fn scales, one for 16 values, times global_scale"
        )

    def pack(self, latent_TL: Tensor, k_rope_TR: Tensor, scales: Scales) -> Tensor:
        packed, factors = nvfp4.encode(torch.cat([latent_TL, k_rope_TR], dim=-1), scales.global_scale)
        return torch.cat([packed, factors.view(torch.uint8)], dim=-1)

    def unpack(self, rows: Tensor, dtype: torch.dtype, scales: Scales) -> Tensor:
        packed, factors = rows.split(self.planes, dim=-1)
        return nvfp4.decode(packed, factors, scales.global_scale).to(dtype)

    def calibrate(self, latent_TL: Tensor, k_rope_TR: Tensor) -> Scales:
        """The factor that gives the group of the largest value the largest group scale, 448."""
        return Scales(global_scale=largest_size(latent_TL, k_rope_TR) / (e2m1.LARGEST * e4m3.LARGEST) or 1.0)


@dataclass(frozen=True)
class Nvfp4RopeBf16Layout(Nvfp4Layout):
    """Three planes: latent e2m1 pairs, rope values in bf16, latent group scales."""

    @property
    def planes(self) -> tuple[int, ...]:
        return self.latent // 2, 2 * self.rope, self.latent // nvfp4.GROUP

    def describe(self) -> str:
        return (
            f"pages of {_PAGE_SIZE} tokens; plane of {self.latent} latent values e2m1, low nibble first; "
            f"plane of {self.rope} rope values bf16, little-endian; plane of the latent's e4m3fn scales, one "
            "for 16 values, times global_scale"
        )

    def pack(self, latent_TL: Tensor, k_rope_TR: Tensor, scales: Scales) -> Tensor:
        packed, factors = nvfp4.encode(latent_TL, scales.global_scale)
        rope = k_rope_TR.to(torch.bfloat16).contiguous()
        return torch.cat([packed, rope.view(torch.uint8), factors.view(torch.uint8)], dim=-1)

    def unpack(self, rows: Tensor, dtype: torch.dtype, scales: Scales) -> Tensor:
        packed, rope, factors = rows.split(self.planes, dim=-1)
        latent = nvfp4.decode(packed, factors, scales.global_scale).to(dtype)
        # Copied and flat: a row may have an odd number of bytes, and pairs of them need even strides.
        pairs = rope.clone(memory_format=torch.contiguous_format).view(-1).view(torch.bfloat16)
        return torch.cat([latent, pairs.view(*rope.shape[:-1], self.rope).to(dtype)], dim=-1)

    def calibrate(self, latent_TL: Tensor, k_rope_TR: Tensor) -> Scales:
        """As for nvfp4, from the latent alone: the rope part is not quantised."""
        return super().calibrate(latent_TL, k_rope_TR[:0])
