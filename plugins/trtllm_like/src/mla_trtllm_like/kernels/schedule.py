# ruff: noqa: ANN001, ANN201, ANN202 - Triton takes the types of a kernel's arguments from each launch
"""Splits the work of a decode step evenly over a fixed number of parts, on the device.

A tile is a block of query rows of one request; its cost is the number of its key blocks, plus OVERHEAD. Laid
end to end, the tiles of all requests form a line; part p serves its stretch [p * span, (p + 1) * span). A
tile that lies in several parts is computed in fragments and combined. Lengths are read on the device and the
number of parts is fixed, so a captured graph stays valid while lengths change.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["OVERHEAD", "fragment", "plan_parts", "skip_idle"]

# What starting and storing a tile costs, in key blocks.
OVERHEAD = tl.constexpr(3)


@triton.jit
def _costs(query_start, key_lens, request, num_requests, heads, TILE_ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Cost of all tiles of each request; 0 for requests without query rows."""
    live = request < num_requests
    first = tl.load(query_start + request, mask=live, other=0)
    last = tl.load(query_start + request + 1, mask=live, other=0)
    keys = tl.load(key_lens + request, mask=live, other=0).to(tl.int64)
    tiles = ((last - first).to(tl.int64) * heads + TILE_ROWS - 1) // TILE_ROWS
    return tl.where(last > first, tiles * (OVERHEAD + (keys + KEYS - 1) // KEYS), 0)


@triton.jit
def plan_parts(
    query_start, key_lens, bounds, first_request, span_out, num_requests, heads, min_span,
    TILE_ROWS: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program p finds the request in which part p begins; program 0 also writes where each request's tiles
    begin (bounds [B + 1]) and the span.
    """
    part, parts = tl.program_id(0), tl.num_programs(0) - 1
    total = tl.zeros((), tl.int64)
    for start in range(0, num_requests, CHUNK):
        request = start + tl.arange(0, CHUNK)
        total += tl.sum(_costs(query_start, key_lens, request, num_requests, heads, TILE_ROWS, KEYS))
    span = tl.maximum((total + parts - 1) // parts, min_span)
    begin = part * span
    before = tl.zeros((), tl.int64)
    passed = tl.zeros((), tl.int32)
    for start in range(0, num_requests, CHUNK):
        request = start + tl.arange(0, CHUNK)
        costs = _costs(query_start, key_lens, request, num_requests, heads, TILE_ROWS, KEYS)
        ends = before + tl.cumsum(costs)
        before += tl.sum(costs)
        live = request < num_requests
        passed += tl.sum((live & (ends <= begin)).to(tl.int32))
        if part == 0:
            tl.store(bounds + 1 + request, ends, mask=live)
    tl.store(first_request + part, passed)
    if part == 0:
        tl.store(bounds, 0)
        tl.store(span_out, span)


@triton.jit
def skip_idle(bounds, request, cursor):
    """The request that owns position `cursor` of the line, from `request` on; some have no length."""
    while tl.load(bounds + request + 1) <= cursor:
        request += 1
    return request


@triton.jit
def fragment(bounds, key_lens, request, cursor, KEYS: tl.constexpr):
    """The tile at position `cursor`: (its index in the request, its begin and its end on the line)."""
    start = tl.load(bounds + request)
    cost = OVERHEAD + (tl.load(key_lens + request).to(tl.int64) + KEYS - 1) // KEYS
    tile = (cursor - start) // cost
    begin = start + tile * cost
    return tile, begin, begin + cost
