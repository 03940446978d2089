"""FP8 E4M3 ("fn"): sign, 4 exponent bits of bias 7, 3 mantissa bits; ±448 the largest, no infinity.

0x7f and 0xff are NaN; below 2^-6 values are multiples of 2^-9.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LARGEST", "SMALLEST", "decode", "encode"]

LARGEST = 448.0
SMALLEST = 2.0**-9


def encode(x: Tensor) -> Tensor:
    """The nearest e4m3 values, ties to the even mantissa; beyond ±448, infinities included, ±448. NaN stays
    NaN.
    """
    return x.float().clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def decode(codes: Tensor) -> Tensor:
    """The values of codes (float8_e4m3fn, or the same bits as uint8) in float32, exactly."""
    return codes.view(torch.float8_e4m3fn).float()
