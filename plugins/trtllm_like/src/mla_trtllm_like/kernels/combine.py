# ruff: noqa: ANN001, ANN201 - Triton takes the types of a kernel's arguments from each launch
"""Combines the fragments of tiles that were split over several parts."""

from __future__ import annotations

import triton
import triton.language as tl

from mla_trtllm_like.kernels.numerics import rounded
from mla_trtllm_like.kernels.schedule import fragment

__all__ = ["combine"]


@triton.jit
def combine(
    query_start, key_lens, bounds, first_request, span_at, partial, partial_lse, out, lse,
    num_requests, heads, out_stride_t, out_stride_h, out_stride_x, lse_stride_t, lse_stride_h,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, HAS_LSE: tl.constexpr, TILE_ROWS: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program (p, r): rows r * ROWS on of the tile that begins in part p and goes on in the next, if any.

    Fragments lie in slot 2p + 1 of the part where the tile begins, and in slot 2p of each later part.
    """
    part = tl.program_id(0)
    span = tl.load(span_at)
    border = (part + 1) * span
    if border < tl.load(bounds + num_requests):
        request = tl.load(first_request + part + 1)
        tile, tile_begin, tile_end = fragment(bounds, key_lens, request, border, KEYS)
        if (tile_begin < border) & (tile_begin >= part * span):
            first_token = tl.load(query_start + request).to(tl.int64)
            tokens = tl.load(query_start + request + 1) - first_token
            in_tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
            row = tile * TILE_ROWS + in_tile
            used = row < tokens * heads
            token, head = first_token + row // heads, row % heads
            column = tl.arange(0, LATENT_PAD)
            slot = (2 * part + 1).to(tl.int64)
            maximum = tl.load(partial_lse + slot * TILE_ROWS + in_tile)
            values = tl.load(partial + (slot * TILE_ROWS + in_tile)[:, None] * LATENT_PAD + column[None, :])
            total = tl.where(maximum == float("-inf"), 0.0, 1.0)
            for later in range(part + 1, tl.cdiv(tile_end, span)):
                at = 2 * later * TILE_ROWS + in_tile
                sums = tl.load(partial_lse + at)
                higher = tl.maximum(maximum, sums)
                # Both may be -inf: nothing was seen so far.
                base = tl.where(higher == float("-inf"), 0.0, higher)
                shrink, weight = tl.exp2(maximum - base), tl.exp2(sums - base)
                more = tl.load(partial + at[:, None] * LATENT_PAD + column[None, :])
                values = values * shrink[:, None] + more * weight[:, None]
                total = total * shrink + weight
                maximum = higher
            empty = total == 0.0
            total = tl.where(empty, 1.0, total)
            values *= (1.0 / total)[:, None]
            out_row = out + token * out_stride_t + head * out_stride_h
            mask = used[:, None] & (column < LATENT)[None, :]
            tl.store(
                out_row[:, None] + (column * out_stride_x)[None, :],
                rounded(values, out.dtype.element_ty),
                mask=mask,
            )
            if HAS_LSE:
                log_total = tl.where(empty, float("-inf"), maximum + tl.log2(total))
                lse_at = lse + token * lse_stride_t + head * lse_stride_h
                tl.store(lse_at, log_total * 0.6931471805599453, mask=used)
