# ruff: noqa: ANN001, ANN201 - Triton takes the types of a kernel's arguments from each launch
"""Decode for few heads: as `mqa_rows`, with keys as the rows of every product and query rows as columns.

Tensor cores want 64 rows and take 8 to 32 columns, so 8 or 16 heads are not padded to 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_trtllm_like.kernels.mqa_rows import LOWEST, MASKED
from mla_trtllm_like.kernels.numerics import dot, rounded
from mla_trtllm_like.kernels.rows import latent_block, rope_block, token_rows
from mla_trtllm_like.kernels.schedule import OVERHEAD, fragment, skip_idle

__all__ = ["mqa_columns"]


@triton.jit
def mqa_columns(
    query, data, table, query_start, key_lens, bounds, first_request, span_at, out, lse, partial, partial_lse,
    score_scale, latent_scale, out_scale, num_requests, heads,
    query_stride_t, query_stride_h, query_stride_x, page_stride, token_stride, unit_stride, table_stride,
    out_stride_t, out_stride_h, out_stride_x, lse_stride_t, lse_stride_h,
    LAYOUT: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, LATENT_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, TYPED: tl.constexpr, CAUSAL: tl.constexpr,
    HAS_LSE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """One part of the schedule, for ROWS of a tile's GROUP * ROWS query rows."""
    part = tl.program_id(0) // GROUP
    member = tl.program_id(0) % GROUP
    span = tl.load(span_at)
    cursor = part * span
    end = tl.minimum(cursor + span, tl.load(bounds + num_requests))
    request = tl.load(first_request + part)
    column = tl.arange(0, LATENT_PAD)
    rope_column = tl.arange(0, ROPE_PAD if ROPE > 0 else 16)
    DTYPE: tl.constexpr = query.dtype.element_ty
    while cursor < end:
        request = skip_idle(bounds, request, cursor)
        tile, tile_begin, tile_end = fragment(bounds, key_lens, request, cursor, KEYS)
        stop = tl.minimum(end, tile_end)
        first_token = tl.load(query_start + request).to(tl.int32)
        tokens = tl.load(query_start + request + 1).to(tl.int32) - first_token
        keys = tl.load(key_lens + request).to(tl.int32)
        row = (tile.to(tl.int32) * GROUP + member) * ROWS + tl.arange(0, ROWS)
        used = row < tokens * heads
        token, head = row // heads, row % heads
        query_row = query + (first_token + token).to(tl.int64) * query_stride_t + head * query_stride_h
        in_latent = used[None, :]
        if LATENT < LATENT_PAD:
            in_latent = in_latent & (column < LATENT)[:, None]
        q_latent = tl.load(query_row[None, :] + (column * query_stride_x)[:, None], mask=in_latent, other=0.0)
        if ROPE > 0:
            in_rope = used[None, :] & (rope_column < ROPE)[:, None]
            rope_at = query_row[None, :] + ((LATENT + rope_column) * query_stride_x)[:, None]
            q_rope = tl.load(rope_at, mask=in_rope, other=0.0)
        visible = tl.zeros((ROWS,), tl.int32) + keys
        if CAUSAL:
            visible = keys - (tokens - 1 - token)
        visible = tl.where(used, visible, 0)
        first_block = tl.maximum(cursor - tile_begin - OVERHEAD, 0).to(tl.int32)
        last_block = tl.maximum(stop - tile_begin - OVERHEAD, 0).to(tl.int32)
        # Keys that no row of this program sees are not read.
        limit = tl.minimum(tl.max(visible, 0), last_block * KEYS)
        visible = tl.minimum(visible, limit)
        maximum = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        values = tl.zeros((LATENT_PAD, ROWS), tl.float32)
        for start in tl.range(first_block * KEYS, limit, KEYS, num_stages=DEPTH):
            key = start + tl.arange(0, KEYS)
            live = key < limit
            page, offset = token_rows(table + request.to(tl.int64) * table_stride, key, live, PAGE_SIZE)
            k_latent = latent_block(
                data, page, offset, live, page_stride, token_stride, unit_stride,
                LAYOUT, LATENT, ROPE, LATENT_PAD, PAGE_SIZE, TYPED, DTYPE,
            )  # fmt: skip
            scores = dot(k_latent, q_latent, tl.zeros((KEYS, ROWS), tl.float32))
            if LAYOUT == "nvfp4_rope_bf16":
                scores *= latent_scale
            if ROPE > 0:
                k_rope = rope_block(
                    data, page, offset, live, page_stride, token_stride, unit_stride,
                    LAYOUT, LATENT, ROPE, ROPE_PAD, PAGE_SIZE, TYPED, DTYPE,
                )  # fmt: skip
                scores = dot(k_rope, q_rope, scores)
            seen = key[:, None] < visible[None, :]
            scores = tl.where(seen, scores * score_scale, MASKED)
            higher = tl.maximum(maximum, tl.max(scores, 0))
            shrink = tl.exp2(maximum - higher)
            weights = tl.exp2(scores - higher[None, :])
            total = total * shrink + tl.sum(weights, 0)
            values = dot(tl.trans(k_latent), rounded(weights, DTYPE), values * shrink[None, :])
            maximum = higher
        # A NaN in `total` stays one: only an exact 0 means that nothing was seen.
        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        values *= (out_scale / total)[None, :]
        sums = tl.where(empty, float("-inf"), maximum + tl.log2(total))
        if (cursor == tile_begin) & (stop == tile_end):
            out_row = out + (first_token + token).to(tl.int64) * out_stride_t + head * out_stride_h
            tl.store(
                out_row[None, :] + (column * out_stride_x)[:, None], rounded(values, DTYPE), mask=in_latent
            )
            if HAS_LSE:
                lse_at = lse + (first_token + token).to(tl.int64) * lse_stride_t + head * lse_stride_h
                tl.store(lse_at, sums * 0.6931471805599453, mask=used)
        else:
            slot = (2 * part + (cursor == tile_begin).to(tl.int32)) * GROUP + member
            slot_row = slot.to(tl.int64) * ROWS + tl.arange(0, ROWS)
            tl.store(partial + slot_row[None, :] * LATENT_PAD + column[:, None], values)
            tl.store(partial_lse + slot_row, sums)
        cursor = stop
