"""Re-smoothing: FP8 blocks with any scales become FP8 blocks whose scales are powers of two.

Tensor cores that take a block's scale as a bare exponent (UE8M0) need it; the values change by less than
one rounding to e4m3.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_core.errors import ContractError
from mla_core.quant import e4m3, ue8m0
from mla_core.quant.division import divide
from mla_core.quant.weight import Part, QuantisedWeight, times

__all__ = ["SMALLEST_LARGEST", "resmooth"]

# A block whose largest value is below this counts as if it were this.
SMALLEST_LARGEST = 1e-4


def resmooth(weight: QuantisedWeight) -> QuantisedWeight:
    """The same matrix with power-of-two scales: largest value of the block / 448, rounded up, in float32.

    Raises ContractError for a weight that has no FP8 blocks.
    """
    name, part = _block_scale(weight)
    # The neighbouring rows and columns in front of a cut belong to its first blocks.
    stored = replace(weight, skip=(0, 0), shape=tuple(weight.tensors["weight"].shape))
    pieces = [_requantise(piece.values(), part) for _, piece in stored.chunks()]
    codes, scales = (torch.cat(own) for own in zip(*pieces, strict=True))
    return replace(weight, tensors={"weight": codes, name: scales})


def _block_scale(weight: QuantisedWeight) -> tuple[str, Part]:
    """Name and extent of the scales."""
    parts = {name: part for name, part in weight.format.parts.items() if name != "weight"}
    name, part = next(iter(parts.items()))
    if weight.format.id != "fp8" or min(part.steps) < 2:
        raise ContractError(
            f"cannot re-smooth a weight of format {weight.format.id!r} with one scale for {part.rows} x "
            f"{part.columns} values (0: all); only fp8 with scales per block has any"
        )
    return name, part


def _requantise(values: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """Codes and power-of-two scales of some block rows, the last ones perhaps ragged."""
    padding = [-size % step for size, step in zip(values.shape, part.steps, strict=True)]
    blocks = F.pad(values.abs(), (0, padding[1], 0, padding[0]))
    blocks = blocks.unflatten(1, (-1, part.columns)).unflatten(0, (-1, part.rows))
    largest = blocks.amax(dim=(1, 3)).clamp(min=SMALLEST_LARGEST)
    scales = ue8m0.decode(ue8m0.encode(divide(largest, e4m3.LARGEST)))
    # A power of two has an exact inverse.
    return e4m3.encode(times(values, scales.reciprocal(), part)), scales
