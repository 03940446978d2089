# ruff: noqa: ANN001, ANN201 - Triton takes the types of a kernel's arguments from each launch
"""What the kernels compute with: matrix products, and number formats decoded and encoded bit by bit.

The codecs use integers and exact float32 products only, so that every device and the interpreter give the
bytes and values of `mla_core`'s reference layouts.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "LOG2_E",
    "dot",
    "e2m1_code",
    "e4m3_code",
    "from_e2m1",
    "from_e4m3",
    "round_to_even",
    "rounded",
    "ue8m0_up",
]

LOG2_E = 1.4426950408889634

# The interpreter multiplies bfloat16 matrices as if their bits were integers, and cuts off where it should
# round to bfloat16.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, accumulator):
    """accumulator + a b, in float32; float32 inputs are not rounded to TensorFloat-32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Float32 values in DTYPE, ties to even."""
    if _INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, x, kept.to(tl.float32, bitcast=True))
    return x.to(DTYPE)


@triton.jit
def from_e4m3(code):
    """e4m3 bytes as float32, exactly: their bits are those of a float32 that is 2^120 too small."""
    bits = code.to(tl.int32)
    value = (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value * 1.329227995784916e36)


@triton.jit
def from_e2m1(code):
    """e2m1 codes 0 to 15 as float32, exactly: their bits are those of a float32 that is 2^126 too small."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def round_to_even(x):
    """The nearest integers of 0 <= x < 2^22, ties to even: adding 2^23 leaves no bits for a fraction."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def e4m3_code(x):
    """e4m3 bytes of the nearest values, ties to even, saturating at 448; NaN gives NaN."""
    bits = x.to(tl.int32, bitcast=True)
    size_bits = bits & 0x7FFFFFFF
    size = tl.minimum(size_bits.to(tl.float32, bitcast=True), 448.0)
    small = round_to_even(tl.minimum(size, 1.0) * 512.0).to(tl.int32)
    # Half of the last kept bit, minus one unless that bit is odd; the carry may step up the exponent.
    clamped = size.to(tl.int32, bitcast=True)
    large = ((clamped + 0x7FFFF + ((clamped >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, small, large)
    code = tl.where(size_bits > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def e2m1_code(x):
    """e2m1 codes (int32, 0 to 15) of the nearest values, ties to even, saturating at 6; NaN gives +6."""
    bits = x.to(tl.int32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    size = tl.minimum(tl.where(is_nan, 6.0, tl.abs(x)), 6.0)
    upper = tl.where(size < 4.0, round_to_even(size) + 2.0, round_to_even(size * 0.5) + 4.0)
    code = tl.where(size < 2.0, round_to_even(size * 2.0), upper).to(tl.int32)
    return code | tl.where(is_nan, 0, (bits >> 28) & 8)


@triton.jit
def ue8m0_up(x):
    """The smallest power of two that is not below x, for normal positive float32 x up to 2^127."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return (tl.minimum(exponent, 254) << 23).to(tl.float32, bitcast=True)
