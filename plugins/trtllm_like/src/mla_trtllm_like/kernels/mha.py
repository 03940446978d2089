# ruff: noqa: ANN001, ANN201, ANN202 - Triton takes the types of a kernel's arguments from each launch
"""Prefill: expanded attention over packed requests, each head with its own keys and values.

Legend: M query rows of a program, S keys of a block, E query and key width, V value width. E is cut into a
power of two and a rest, so that 192 is computed as 128 + 64 and not as 256.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mla_trtllm_like.kernels.mqa_rows import LOWEST, MASKED
from mla_trtllm_like.kernels.numerics import dot, rounded

__all__ = ["mha"]


@triton.jit
def mha(
    query, key, value, query_start, key_start, out, lse, score_scale, heads, blocks,
    query_stride_t, query_stride_h, query_stride_e, key_stride_t, key_stride_h, key_stride_e,
    value_stride_t, value_stride_h, value_stride_v, out_stride_t, out_stride_h, out_stride_v,
    lse_stride_t, lse_stride_h,
    CAUSAL: tl.constexpr, HAS_LSE: tl.constexpr, WIDTH: tl.constexpr, HEAD_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program: a block of query rows of one head of one request; late blocks, which see most keys, first."""
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    head = (program // blocks % heads).to(tl.int64)
    request = program // blocks // heads
    first_query = tl.load(query_start + request).to(tl.int64)
    first_key = tl.load(key_start + request).to(tl.int64)
    queries = (tl.load(query_start + request + 1) - first_query).to(tl.int32)
    keys = (tl.load(key_start + request + 1) - first_key).to(tl.int32)
    if block * ROWS < queries:
        row = block * ROWS + tl.arange(0, ROWS)
        used = row < queries
        part = tl.arange(0, HEAD_PAD)
        query_row = query + (first_query + row) * query_stride_t + head * query_stride_h
        q = _columns(query_row, part, used, query_stride_e, WIDTH, HEAD_PAD)
        if REST_PAD > 0:
            rest = HEAD_PAD + tl.arange(0, REST_PAD)
            q_rest = _columns(query_row, rest, used, query_stride_e, WIDTH, HEAD_PAD + REST_PAD)
        visible = tl.zeros((ROWS,), tl.int32) + keys
        if CAUSAL:
            visible = tl.minimum(keys - queries + 1 + row, keys)
        # Up to here all rows see all keys: no mask.
        full = tl.maximum(tl.min(visible, 0), 0) // KEYS * KEYS
        limit = tl.max(tl.where(used, visible, 0), 0)
        maximum = tl.full((ROWS,), LOWEST, tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        values = tl.zeros((ROWS, VALUE_PAD), tl.float32)
        value_column = tl.arange(0, VALUE_PAD)
        key_base = key + first_key * key_stride_t + head * key_stride_h
        value_base = value + first_key * value_stride_t + head * value_stride_h
        for phase in tl.static_range(2):
            for start in tl.range(full * phase, full if phase == 0 else limit, KEYS, num_stages=DEPTH):
                s = start + tl.arange(0, KEYS)
                live = s < limit
                key_row = key_base + s.to(tl.int64) * key_stride_t
                k = _columns(key_row, part, live, key_stride_e, WIDTH, HEAD_PAD)
                scores = dot(q, tl.trans(k), tl.zeros((ROWS, KEYS), tl.float32))
                if REST_PAD > 0:
                    k_rest = _columns(key_row, rest, live, key_stride_e, WIDTH, HEAD_PAD + REST_PAD)
                    scores = dot(q_rest, tl.trans(k_rest), scores)
                scores *= score_scale
                if phase == 1:
                    scores = tl.where(s[None, :] < visible[:, None], scores, MASKED)
                higher = tl.maximum(maximum, tl.max(scores, 1))
                shrink = tl.exp2(maximum - higher)
                weights = tl.exp2(scores - higher[:, None])
                total = total * shrink + tl.sum(weights, 1)
                value_row = value_base + s.to(tl.int64) * value_stride_t
                v = _columns(value_row, value_column, live, value_stride_v, VALUE, VALUE_PAD)
                values = dot(rounded(weights, v.dtype), v, values * shrink[:, None])
                maximum = higher
        # A NaN in `total` stays one: only an exact 0 means that nothing was seen.
        empty = total == 0.0
        total = tl.where(empty, 1.0, total)
        values *= (1.0 / total)[:, None]
        out_row = out + (first_query + row) * out_stride_t + head * out_stride_h
        mask = used[:, None] & (value_column < VALUE)[None, :]
        out_at = out_row[:, None] + (value_column * out_stride_v)[None, :]
        tl.store(out_at, rounded(values, out.dtype.element_ty), mask=mask)
        if HAS_LSE:
            sums = tl.where(empty, float("-inf"), (maximum + tl.log2(total)) * 0.6931471805599453)
            tl.store(lse + (first_query + row) * lse_stride_t + head * lse_stride_h, sums, mask=used)


@triton.jit
def _columns(row, column, live, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Columns of the live rows; 0 beyond WIDTH and for other rows, whose memory is not read."""
    mask = live[:, None]
    if WIDTH < PADDED:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(row[:, None] + (column * stride)[None, :], mask=mask, other=0.0)
