"""Hidden states as NVFP4: what a quantising norm or gather hands to 4-bit matrix multiplications.

Legend: T tokens, D width, G = D / 16 scales a token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_core.errors import ContractError
from mla_core.quant import e2m1, nvfp4
from mla_core.quant.swizzle import padded_size, swizzle, unswizzle

__all__ = ["Fp4Hidden", "plain", "rms_norm_fp4"]


@dataclass(frozen=True, eq=False)
class Fp4Hidden:
    """Rows [T, D] as e2m1 pairs, e4m3 scales per 16 values, and one float32 step for all.

    codes [T, D / 2] uint8. scales (float8_e4m3fn): flat in the swizzled order when `swizzled`, else [T, G].
    unquantised: the rows before quantisation [T, D], for consumers that take no NVFP4. dtype: what the rows
    stand for outside of 4-bit multiplications.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    dtype: torch.dtype
    unquantised: Tensor | None = None
    swizzled: bool = True

    @classmethod
    def quantise(cls, x_TD: Tensor, global_scale: Tensor, *, keep: bool = False) -> Fp4Hidden:
        """Rows rounded to NVFP4 with a given step; keep: carry the rows themselves along."""
        codes, scales = nvfp4.encode(x_TD, global_scale)
        return cls(codes, swizzle(scales), global_scale, x_TD.dtype, x_TD if keep else None)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.codes.shape[0], 2 * self.codes.shape[1]))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def requires_grad(self) -> bool:
        """Codes carry no gradient."""
        return False

    def new_empty(self, *size: int) -> Tensor:
        """An uninitialised tensor of the rows' own dtype and device."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def rows(self, count: int) -> Fp4Hidden:
        """The first `count` rows, such as the live ones of a padded batch.

        The swizzled order is tiled by rows, so the leading part of the scales is that of the leading rows.
        Raises ContractError for scales in plain order, whose consumers expect every row.
        """
        if count == self.shape[0]:
            return self
        if not self.swizzled:
            raise ContractError(
                f"cannot take {count} of {self.shape[0]} rows: the scale factors are in plain order, "
                "only swizzled ones can be cut"
            )
        if not 0 <= count < self.shape[0]:
            raise ContractError(f"cannot take {count} rows of {self.shape[0]}")
        return replace(
            self,
            codes=self.codes[:count].contiguous(),
            scales=self.scales[: padded_size(count, self.shape[1] // nvfp4.GROUP)].contiguous(),
            unquantised=None if self.unquantised is None else self.unquantised[:count].contiguous(),
        )

    def values(self) -> Tensor:
        """What the codes stand for, [T, D] in float32: code times (scale times step)."""
        groups = self.shape[1] // nvfp4.GROUP
        scales = unswizzle(self.scales, self.shape[0], groups) if self.swizzled else self.scales
        steps = scales.float() * self.global_scale
        codes = e2m1.decode_pairs(self.codes).unflatten(-1, (-1, nvfp4.GROUP))
        return (codes * steps.unsqueeze(-1)).flatten(-2)


def plain(x: Tensor | Fp4Hidden) -> Tensor:
    """Rows for a consumer that takes no NVFP4: the unquantised ones where they were carried along."""
    if isinstance(x, Tensor):
        return x
    return x.values().to(x.dtype) if x.unquantised is None else x.unquantised


def rms_norm_fp4(x_TD: Tensor, weight: Tensor, eps: float, global_scale: Tensor) -> Fp4Hidden:
    """RMS norm and NVFP4 quantisation in one step; equals the norm, rounded to its dtype, then quantised.

    The normed rows come along unquantised, for an indexer. Kernels that fuse the two replace this function.
    """
    normed = F.rms_norm(x_TD, weight.shape, weight, eps)
    return Fp4Hidden.quantise(normed, global_scale, keep=True)
