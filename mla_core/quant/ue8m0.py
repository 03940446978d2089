"""UE8M0: a positive power of two as its biased exponent; byte b is 2^(b - 127), 255 is NaN."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["decode", "encode"]

_NAN = 255
_MANTISSA_BITS = 23
# The mantissa of 2^-127, a subnormal float32.
_HALF_OF_SMALLEST_NORMAL = 1 << 22


def encode(x: Tensor) -> Tensor:
    """Bytes of the smallest powers of two that are not below x, for positive float32 x; at most 2^127.

    NaN becomes 255. Exact: it reads the bits instead of a logarithm.
    """
    bits = x.float().view(torch.int32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & ((1 << _MANTISSA_BITS) - 1)
    above = torch.where(exponent == 0, mantissa > _HALF_OF_SMALLEST_NORMAL, mantissa > 0)
    byte = (exponent + above.int()).clamp(max=_NAN - 1)
    return byte.masked_fill(x.isnan(), _NAN).to(torch.uint8)


def decode(codes: Tensor) -> Tensor:
    """The powers of two in float32; NaN for 255."""
    exponent = codes.int()
    bits = torch.where(exponent == 0, _HALF_OF_SMALLEST_NORMAL, exponent << _MANTISSA_BITS)
    return bits.view(torch.float32).masked_fill(exponent == _NAN, torch.nan)
