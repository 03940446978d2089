"""Packed int4: eight values an int32 word, the first in the lowest bits, each stored plus 8."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PER_WORD", "pack", "unpack"]

PER_WORD = 8
_BITS, _OFFSET, _MASK = 4, 8, 15


def unpack(packed: Tensor) -> Tensor:
    """Values -8 to 7 in float32, [..., 8 * W], of words [..., W]."""
    shifts = torch.arange(0, 32, _BITS, dtype=torch.int32, device=packed.device)
    return (((packed.unsqueeze(-1) >> shifts) & _MASK) - _OFFSET).flatten(-2).float()


def pack(values: Tensor) -> Tensor:
    """Words [..., W] of whole numbers -8 to 7, [..., K]; the last word is filled up with 0 bits."""
    filled = torch.nn.functional.pad(values.long() + _OFFSET, (0, -values.shape[-1] % PER_WORD))
    shifts = torch.arange(0, 32, _BITS, device=values.device)
    words = (filled.unflatten(-1, (-1, PER_WORD)) << shifts).sum(-1)
    # Above 2^31 the word's sign bit is set.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
