# ruff: noqa: ANN001, ANN201, ANN202 - Triton takes the types of a kernel's arguments from each launch
"""Rotates the new tokens' queries and keys, and stores their rows in the cache, in one launch.

Products, sums and quotients are rounded one by one (the launch forbids fused multiply-add), so that values
and bytes are those of the stages it replaces. Legend: T tokens, H heads, L latent, R rope.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_trtllm_like.kernels.numerics import e4m3_code, rounded
from mla_trtllm_like.kernels.pack import store_bfloat16, store_fp4, store_tiles

__all__ = ["rope_append"]


@triton.jit
def rope_append(
    query, latent, key, cos, sin, slots, data, k_scale, global_scale, heads,
    query_stride_t, query_stride_h, query_stride_x, latent_stride_t, latent_stride_x, key_stride_t,
    key_stride_x, cos_stride_t, cos_stride_x, sin_stride_t, sin_stride_x, slot_stride, page_stride,
    token_stride, unit_stride,
    STYLE: tl.constexpr, LAYOUT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Program (t, 0) rotates token t's key and stores its row, program (t, 1 + i) rotates HEADS of its query
    heads.
    """
    t = tl.program_id(0).to(tl.int64)
    angles = cos + t * cos_stride_t, sin + t * sin_stride_t
    if tl.program_id(1) == 0:
        slot = tl.load(slots + t * slot_stride).to(tl.int64)
        key_row = key + t * key_stride_t
        if slot >= 0:
            page_data = data + slot // PAGE_SIZE * page_stride
            latent_row = latent + t * latent_stride_t
            _store(
                page_data, slot % PAGE_SIZE, latent_row, key_row, angles, k_scale, global_scale,
                latent_stride_x, key_stride_x, cos_stride_x, sin_stride_x, token_stride, unit_stride, STYLE,
                LAYOUT, LATENT, ROPE, LATENT_PAD, ROPE_PAD, PAGE_SIZE, POWER_OF_TWO,
            )  # fmt: skip
        if STYLE != "none":
            # The row above was made from keys as they came: all threads have read them before any is rotated.
            _rotate(
                key_row, angles, tl.zeros((1,), tl.int64), tl.full((1,), 1, tl.int1), key_stride_x,
                cos_stride_x, sin_stride_x, STYLE, ROPE, ROPE_PAD,
            )  # fmt: skip
    elif STYLE != "none":
        head = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)
        _rotate(
            query + t * query_stride_t, angles, head.to(tl.int64) * query_stride_h, head < heads,
            query_stride_x, cos_stride_x, sin_stride_x, STYLE, ROPE, ROPE_PAD,
        )  # fmt: skip


@triton.jit
def _rotate(
    base, angles, rows, live, stride, cos_stride, sin_stride,
    STYLE: tl.constexpr, ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of each row in place."""
    pair = tl.arange(0, ROPE_PAD // 2)
    first, second = _places(pair, STYLE, ROPE)
    mask = live[:, None] & (pair < ROPE // 2)[None, :]
    first_at = base + rows[:, None] + (first * stride)[None, :]
    second_at = base + rows[:, None] + (second * stride)[None, :]
    x = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(second_at, mask=mask, other=0.0).to(tl.float32)
    cos = tl.load(angles[0] + pair * cos_stride, mask=pair < ROPE // 2, other=0.0)[None, :]
    sin = tl.load(angles[1] + pair * sin_stride, mask=pair < ROPE // 2, other=0.0)[None, :]
    # A pair may be held by several threads; none may write before all have read.
    tl.debug_barrier()
    tl.store(first_at, rounded(x * cos - y * sin, base.dtype.element_ty), mask=mask)
    tl.store(second_at, rounded(y * cos + x * sin, base.dtype.element_ty), mask=mask)


@triton.jit
def _places(pair, STYLE: tl.constexpr, ROPE: tl.constexpr):
    """Where the two values of a pair lie."""
    if STYLE == "interleaved":
        return 2 * pair, 2 * pair + 1
    else:
        return pair, pair + ROPE // 2


@triton.jit
def _rotated(key_row, angles, place, stride, cos_stride, sin_stride, STYLE: tl.constexpr, ROPE: tl.constexpr):
    """The rotated key values at these places, rounded to the key's type, then float32; 0 beyond ROPE."""
    live = place < ROPE
    value = tl.load(key_row + place * stride, mask=live, other=0.0)
    if STYLE != "none":
        if STYLE == "interleaved":
            pair, second = place // 2, (place % 2) == 1
            partner = place + 1 - 2 * (place % 2)
        else:
            pair, second = place % (ROPE // 2), place >= ROPE // 2
            partner = tl.where(second, place - ROPE // 2, place + ROPE // 2)
        other = tl.load(key_row + partner * stride, mask=live, other=0.0).to(tl.float32)
        cos = tl.load(angles[0] + pair * cos_stride, mask=live, other=0.0)
        sin = tl.load(angles[1] + pair * sin_stride, mask=live, other=0.0)
        across = other * sin
        turned = value.to(tl.float32) * cos + tl.where(second, across, -across)
        value = rounded(turned, value.dtype)
    return value.to(tl.float32)


@triton.jit
def _store(
    page_data, offset, latent_row, key_row, angles, k_scale, global_scale, latent_stride, key_stride,
    cos_stride, sin_stride, token_stride, unit_stride,
    STYLE: tl.constexpr, LAYOUT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    LATENT_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """Write one token's row: its latent, and its key rotated on the way."""
    column = tl.arange(0, LATENT_PAD)
    rope_column = tl.arange(0, ROPE_PAD)
    row = page_data + offset * token_stride
    if LAYOUT == "plain" or LAYOUT == "fp8_e4m3":
        values = tl.load(latent_row + column * latent_stride, mask=column < LATENT, other=0.0).to(tl.float32)
        rope = _rotated(key_row, angles, rope_column, key_stride, cos_stride, sin_stride, STYLE, ROPE)
        if LAYOUT == "fp8_e4m3":
            values = e4m3_code(tl.div_rn(values, tl.zeros_like(values) + k_scale))
            rope = e4m3_code(tl.div_rn(rope, tl.zeros_like(rope) + k_scale))
        else:
            values = rounded(values, page_data.dtype.element_ty)
            rope = rounded(rope, page_data.dtype.element_ty)
        tl.store(row + column * unit_stride, values, mask=column < LATENT)
        tl.store(row + (LATENT + rope_column) * unit_stride, rope, mask=rope_column < ROPE)
    elif LAYOUT == "fp8_ds_mla":
        TILES: tl.constexpr = LATENT // 128
        place = tl.arange(0, TILES)[:, None] * 128 + tl.arange(0, 128)[None, :]
        tiles = tl.load(latent_row + place * latent_stride).to(tl.float32)
        store_tiles(row, unit_stride, tiles, POWER_OF_TWO, TILES)
        rope = _rotated(key_row, angles, rope_column, key_stride, cos_stride, sin_stride, STYLE, ROPE)
        rope_row = row + (LATENT + 4 * TILES) * unit_stride
        store_bfloat16(rope_row, unit_stride, rope, rope_column < ROPE)
    else:
        WIDTH: tl.constexpr = LATENT + ROPE if LAYOUT == "nvfp4" else LATENT
        AFTER: tl.constexpr = 0 if LAYOUT == "nvfp4" else 2 * ROPE
        group = tl.arange(0, LATENT_PAD // 16)[:, None]
        place = group * 16 + 2 * tl.arange(0, 8)[None, :]
        at = latent_row + place * latent_stride
        even = tl.load(at, mask=place < LATENT, other=0.0).to(tl.float32)
        odd = tl.load(at + latent_stride, mask=place < LATENT, other=0.0).to(tl.float32)
        codes = page_data + offset * (WIDTH // 2) * unit_stride
        scales = page_data + (PAGE_SIZE * (WIDTH // 2 + AFTER) + offset * (WIDTH // 16)) * unit_stride
        store_fp4(codes, scales, unit_stride, even, odd, global_scale, LATENT // 16)
        if ROPE > 0 and LAYOUT == "nvfp4":
            place = tl.arange(0, ROPE_PAD // 16)[:, None] * 16 + 2 * tl.arange(0, 8)[None, :]
            even = _rotated(key_row, angles, place, key_stride, cos_stride, sin_stride, STYLE, ROPE)
            odd = _rotated(key_row, angles, place + 1, key_stride, cos_stride, sin_stride, STYLE, ROPE)
            codes += LATENT // 2 * unit_stride
            scales += LATENT // 16 * unit_stride
            store_fp4(codes, scales, unit_stride, even, odd, global_scale, ROPE // 16)
        elif ROPE > 0:
            rope = _rotated(key_row, angles, rope_column, key_stride, cos_stride, sin_stride, STYLE, ROPE)
            rope_row = page_data + (PAGE_SIZE * (LATENT // 2) + offset * (2 * ROPE)) * unit_stride
            store_bfloat16(rope_row, unit_stride, rope, rope_column < ROPE)
