"""Layout fp8_e4m3: one e4m3 byte a value, one descale for the whole cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_core.cache.base import Layout
from mla_core.cache.scales import Scales, largest_size
from mla_core.quant import e4m3
from mla_core.quant.division import divide

__all__ = ["Fp8Layout"]


@dataclass(frozen=True)
class Fp8Layout(Layout):
    """L latent bytes, then R rope bytes; a byte is e4m3(value / k_scale), saturated at ±448."""

    @property
    def storage(self) -> torch.dtype:
        return torch.float8_e4m3fn

    @property
    def row(self) -> int:
        return self.width

    def describe(self) -> str:
        return f"{self.latent} latent then {self.rope} rope bytes e4m3fn of value / k_scale"

    def pack(self, latent_TL: Tensor, k_rope_TR: Tensor, scales: Scales) -> Tensor:
        values = torch.cat([latent_TL, k_rope_TR], dim=-1).float()
        return e4m3.encode(divide(values, scales.k_scale))

    def unpack(self, rows: Tensor, dtype: torch.dtype, scales: Scales) -> Tensor:
        return (e4m3.decode(rows) * scales.k_scale).to(dtype)

    def calibrate(self, latent_TL: Tensor, k_rope_TR: Tensor) -> Scales:
        """The descale that puts the largest latent or rope value at 448."""
        return Scales(k_scale=largest_size(latent_TL, k_rope_TR) / e4m3.LARGEST or 1.0)
