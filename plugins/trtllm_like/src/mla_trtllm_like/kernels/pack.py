# ruff: noqa: ANN001, ANN201 - Triton takes the types of a kernel's arguments from each launch
"""Stores one token's values in a packed cache row, with the bytes of `mla_core`'s reference layouts.

Every field is written byte by byte: rows may start anywhere. Quotients are rounded once, as in the
reference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_trtllm_like.kernels.numerics import e2m1_code, e4m3_code, from_e4m3, rounded, ue8m0_up

__all__ = ["fp4_scales", "store_bfloat16", "store_fp4", "store_tiles", "tile_scales"]


@triton.jit
def tile_scales(tiles, POWER_OF_TWO: tl.constexpr):
    """The scale of each tile of e4m3 values [tiles, 128]: largest size / 448, at least 2^-126. A NaN counts
    as nothing, an infinity as the largest float32.
    """
    bits = tiles.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(bits > 0x7F800000, 0, tl.minimum(bits, 0x7F7FFFFF))
    largest = tl.max(bits, 1).to(tl.float32, bitcast=True)
    scales = tl.maximum(tl.div_rn(largest, tl.zeros_like(largest) + 448.0), 1.1754943508222875e-38)
    if POWER_OF_TWO:
        scales = ue8m0_up(scales)
    return scales


@triton.jit
def store_tiles(row, unit_stride, tiles, POWER_OF_TWO: tl.constexpr, TILES: tl.constexpr):
    """e4m3 bytes of tiles [TILES, 128], then their float32 scales."""
    scales = tile_scales(tiles, POWER_OF_TWO)
    codes = e4m3_code(tl.div_rn(tiles, tl.zeros_like(tiles) + scales[:, None]))
    tile = tl.arange(0, TILES)
    at = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(row + at * unit_stride, codes)
    byte = tl.arange(0, 4)
    bits = scales.to(tl.int32, bitcast=True)[:, None] >> (8 * byte)[None, :]
    at = TILES * 128 + 4 * tile[:, None] + byte[None, :]
    tl.store(row + at * unit_stride, (bits & 0xFF).to(tl.uint8))


@triton.jit
def store_bfloat16(row, unit_stride, values, mask):
    """Values as bfloat16, little-endian."""
    bits = rounded(values, tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    at = row + 2 * tl.arange(0, values.shape[0]) * unit_stride
    tl.store(at, (bits & 0xFF).to(tl.uint8), mask=mask)
    tl.store(at + unit_stride, ((bits >> 8) & 0xFF).to(tl.uint8), mask=mask)


@triton.jit
def fp4_scales(even, odd, global_scale):
    """(bytes, steps) of groups of 16 values, given as their even and odd elements [groups, 8].

    A byte is e4m3(largest size / 6 / global_scale), at least 2^-9; NaN when a value is. A step is what a code
    is worth: the byte's value times global_scale.
    """
    even_bits = even.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    odd_bits = odd.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.maximum(tl.max(even_bits, 1), tl.max(odd_bits, 1))
    is_nan = bits > 0x7F800000
    largest = tl.minimum(bits, 0x7F7FFFFF).to(tl.float32, bitcast=True)
    wanted = tl.div_rn(largest, tl.zeros_like(largest) + 6.0)
    wanted = tl.div_rn(wanted, tl.zeros_like(largest) + global_scale)
    codes = e4m3_code(tl.maximum(wanted, 0.001953125))
    codes = tl.where(is_nan, 0x7F, codes.to(tl.int32))
    return codes.to(tl.uint8), from_e4m3(codes) * global_scale


@triton.jit
def store_fp4(data_row, scale_row, unit_stride, even, odd, global_scale, groups):
    """The first `groups` groups of 16 values, as pairs of e2m1 codes and one scale byte each."""
    codes, steps = fp4_scales(even, odd, global_scale)
    group = tl.arange(0, even.shape[0])
    live = group < groups
    tl.store(scale_row + group * unit_stride, codes, mask=live)
    low = e2m1_code(tl.div_rn(even, tl.zeros_like(even) + steps[:, None]))
    high = e2m1_code(tl.div_rn(odd, tl.zeros_like(odd) + steps[:, None]))
    at = 8 * group[:, None] + tl.arange(0, 8)[None, :]
    tl.store(data_row + at * unit_stride, (low | (high << 4)).to(tl.uint8), mask=live[:, None])
