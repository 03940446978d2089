# ruff: noqa: ANN001, ANN201, ANN202 - Triton takes the types of a kernel's arguments from each launch
"""Reads a block of cached rows, in any layout, as a matrix of values.

Addresses are 64-bit, from the cache's own strides. Bytes of tokens that are not live are never read: what
they hold may be anything. Values come without the factor that the whole cache shares (k_scale or
global_scale), which the attention kernels apply to scores and outputs. Legend: S tokens of a block, L
latent, R rope; _PAD is the next power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_trtllm_like.kernels.numerics import from_e2m1, from_e4m3, rounded

__all__ = ["latent_block", "rope_block", "token_rows"]


@triton.jit
def token_rows(table, token, live, PAGE_SIZE: tl.constexpr):
    """(page, offset) of a request's tokens; table entries of tokens that are not live are not read."""
    page = tl.load(table + token // PAGE_SIZE, mask=live, other=0).to(tl.int64)
    return page, token % PAGE_SIZE


@triton.jit
def latent_block(
    data, page, offset, live, page_stride, token_stride, unit_stride,
    LAYOUT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TYPED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The latent parts [S, LATENT_PAD] in DTYPE; 0 beyond LATENT and for tokens that are not live."""
    column = tl.arange(0, LATENT_PAD)
    mask = live[:, None]
    if LATENT < LATENT_PAD:
        mask = mask & (column < LATENT)[None, :]
    if LAYOUT == "plain":
        row = data + page * page_stride + offset * token_stride
        values = tl.load(row[:, None] + (column * unit_stride)[None, :], mask=mask, other=0.0)
    elif LAYOUT == "fp8_e4m3":
        row = data + page * page_stride + offset * token_stride
        values = from_e4m3(tl.load(row[:, None] + (column * unit_stride)[None, :], mask=mask, other=0))
    elif LAYOUT == "fp8_ds_mla":
        row = data + page * page_stride + offset * token_stride
        codes = from_e4m3(tl.load(row[:, None] + (column * unit_stride)[None, :], mask=mask, other=0))
        tile = tl.arange(0, LATENT_PAD // 128)
        at = row[:, None] + ((LATENT + 4 * tile) * unit_stride)[None, :]
        scales = _float32_at(at, live[:, None], unit_stride, TYPED)
        tiles = tl.reshape(codes, (codes.shape[0], LATENT_PAD // 128, 128))
        values = tl.reshape(tiles * scales[:, :, None], (codes.shape[0], LATENT_PAD))
    else:
        values = _fp4_latent(
            data + page * page_stride, offset, live, unit_stride, LAYOUT, LATENT, ROPE, LATENT_PAD, PAGE_SIZE
        )
    return rounded(values.to(tl.float32), DTYPE) if values.dtype != DTYPE else values


@triton.jit
def rope_block(
    data, page, offset, live, page_stride, token_stride, unit_stride,
    LAYOUT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TYPED: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The rope parts [S, ROPE_PAD] in DTYPE; 0 beyond ROPE and for tokens that are not live."""
    column = tl.arange(0, ROPE_PAD)
    mask = live[:, None]
    if ROPE < ROPE_PAD:
        mask = mask & (column < ROPE)[None, :]
    if LAYOUT == "plain":
        row = data + page * page_stride + offset * token_stride
        values = tl.load(row[:, None] + ((LATENT + column) * unit_stride)[None, :], mask=mask, other=0.0)
    elif LAYOUT == "fp8_e4m3":
        row = data + page * page_stride + offset * token_stride
        at = row[:, None] + ((LATENT + column) * unit_stride)[None, :]
        values = from_e4m3(tl.load(at, mask=mask, other=0))
    elif LAYOUT == "fp8_ds_mla":
        row = data + page * page_stride + offset * token_stride
        at = row[:, None] + ((LATENT + LATENT // 32 + 2 * column) * unit_stride)[None, :]
        values = _bfloat16_at(at, mask, unit_stride, TYPED)
    elif LAYOUT == "nvfp4_rope_bf16":
        start = PAGE_SIZE * (LATENT // 2) + offset * (2 * ROPE)
        at = (data + page * page_stride)[:, None] + (start[:, None] + 2 * column[None, :]) * unit_stride
        values = _bfloat16_at(at, mask, unit_stride, TYPED)
    else:
        page_data = data + page * page_stride
        values = _fp4_values(
            page_data, offset, live, unit_stride, LATENT, ROPE, LATENT + ROPE, ROPE_PAD,
            PAGE_SIZE * ((LATENT + ROPE) // 2),
        )  # fmt: skip
    return rounded(values.to(tl.float32), DTYPE) if values.dtype != DTYPE else values


@triton.jit
def _fp4_latent(
    page_data, offset, live, unit_stride,
    LAYOUT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    if LAYOUT == "nvfp4":
        values = _fp4_values(
            page_data, offset, live, unit_stride, 0, LATENT, LATENT + ROPE, LATENT_PAD,
            PAGE_SIZE * ((LATENT + ROPE) // 2),
        )  # fmt: skip
    else:
        values = _fp4_values(
            page_data, offset, live, unit_stride, 0, LATENT, LATENT, LATENT_PAD,
            PAGE_SIZE * (LATENT // 2 + 2 * ROPE),
        )  # fmt: skip
    return values


@triton.jit
def _fp4_values(
    page_data, offset, live, unit_stride,
    FIRST: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, PAD: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """COUNT e2m1 values a token from value FIRST of WIDTH, times the scales of their groups of 16; the
    scales' plane starts at byte SCALES of the page.
    """
    pair = tl.arange(0, PAD // 2)
    group = tl.arange(0, PAD // 16)
    start = offset * (WIDTH // 2) + FIRST // 2
    at = page_data[:, None] + (start[:, None] + pair[None, :]) * unit_stride
    packed = tl.load(at, mask=live[:, None] & (pair < COUNT // 2)[None, :], other=0).to(tl.int32)
    start = SCALES + offset * (WIDTH // 16) + FIRST // 16
    at = page_data[:, None] + (start[:, None] + group[None, :]) * unit_stride
    scales = from_e4m3(tl.load(at, mask=live[:, None] & (group < COUNT // 16)[None, :], other=0))
    values = tl.join(from_e2m1(packed & 15), from_e2m1(packed >> 4))
    groups = tl.reshape(values, (packed.shape[0], PAD // 16, 16)) * scales[:, :, None]
    return tl.reshape(groups, (packed.shape[0], PAD))


@triton.jit
def _float32_at(at, mask, unit_stride, TYPED: tl.constexpr):
    """Little-endian float32 values at byte addresses; single bytes where they may start anywhere."""
    if TYPED:
        return tl.load(at.to(tl.pointer_type(tl.float32)), mask=mask, other=0.0)
    else:
        bits = tl.load(at, mask=mask, other=0).to(tl.int32)
        for i in tl.static_range(1, 4):
            bits |= tl.load(at + i * unit_stride, mask=mask, other=0).to(tl.int32) << (8 * i)
        return bits.to(tl.float32, bitcast=True)


@triton.jit
def _bfloat16_at(at, mask, unit_stride, TYPED: tl.constexpr):
    """Little-endian bfloat16 values at byte addresses, as float32 or bfloat16."""
    if TYPED:
        return tl.load(at.to(tl.pointer_type(tl.bfloat16)), mask=mask, other=0.0)
    else:
        low = tl.load(at, mask=mask, other=0).to(tl.int32)
        high = tl.load(at + unit_stride, mask=mask, other=0).to(tl.int32)
        return ((low << 16) | (high << 24)).to(tl.float32, bitcast=True)
