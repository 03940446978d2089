"""FP4 E2M1: codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6; bit 3 is the sign. No infinity, no NaN.

Two codes share a byte: the low nibble holds the element with the even index.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LARGEST", "decode", "decode_pairs", "encode", "encode_pairs"]

LARGEST = 6.0


def encode(x: Tensor) -> Tensor:
    """Codes (uint8, 0 to 15) of the nearest values, ties to the even code; beyond ±6 they saturate.

    Zeros and values that round to zero keep their sign. NaN becomes +6, code 7, as in hardware.
    """
    x = x.float().nan_to_num(nan=LARGEST)
    size = x.abs().clamp(max=LARGEST)
    # The step between values is 0.5 up to 2, then 1 up to 4, then 2; torch.round takes ties to even.
    above_2 = torch.where(size < 4, torch.round(size) + 2, torch.round(size / 2) + 4)
    code = torch.where(size < 2, torch.round(2 * size), above_2).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode(codes: Tensor) -> Tensor:
    """The values of codes 0 to 15 in float32."""
    code = (codes & 7).float()
    size = torch.where(code < 4, code / 2, torch.where(code < 6, code - 2, 2 * code - 8))
    return torch.where(codes >= 8, -size, size)


def encode_pairs(x: Tensor) -> Tensor:
    """Bytes [..., W / 2] of values [..., W]."""
    codes = encode(x)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def decode_pairs(packed: Tensor) -> Tensor:
    """Values [..., W] in float32 of bytes [..., W / 2]."""
    every = torch.arange(256, dtype=torch.uint8, device=packed.device)
    pairs = decode(torch.stack([every & 15, every >> 4], dim=-1))
    return pairs[packed.int()].flatten(-2)
