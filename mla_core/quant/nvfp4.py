"""NVFP4: e2m1 values in groups of 16 with an e4m3 scale each, and one float32 scale for the whole tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_core.quant import e2m1, e4m3
from mla_core.quant.division import divide

__all__ = ["GROUP", "decode", "encode"]

GROUP = 16


def encode(x: Tensor, global_scale: float | Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes [..., W / 2] (uint8) and scales [..., W / 16] (float8_e4m3fn) of values [..., W].

    scale = e4m3(largest size in the group / 6 / global_scale), 2^-9 to 448; code = e2m1(x / (scale *
    global_scale)). An infinity counts as the largest float32. A NaN makes its group's scale NaN (0x7f) and
    the codes 7, so the whole group reads as NaN.
    """
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().clamp(max=torch.finfo(torch.float32).max).amax(dim=-1)
    wanted = divide(divide(largest, e2m1.LARGEST), global_scale)
    scales = e4m3.encode(wanted.clamp(min=e4m3.SMALLEST))
    steps = e4m3.decode(scales) * global_scale
    return e2m1.encode_pairs((groups / steps.unsqueeze(-1)).flatten(-2)), scales


def decode(packed: Tensor, scales: Tensor, global_scale: float | Tensor) -> Tensor:
    """Values [..., W] in float32: code times group scale, which is exact, times global_scale, rounded
    once.
    """
    groups = e2m1.decode_pairs(packed).unflatten(-1, (-1, GROUP)) * e4m3.decode(scales).unsqueeze(-1)
    return (groups * global_scale).flatten(-2)
