"""Unquantised rows: the layouts fp32, fp16 and bf16."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mla_core.cache.base import Layout
from mla_core.cache.scales import Scales

__all__ = ["PlainLayout"]


@dataclass(frozen=True)
class PlainLayout(Layout):
    """L latent values, then R rotated rope values, in one float type. Scales do not apply."""

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
