"""Splits cached prefixes into chunks that fit the workspace, and says how much memory a chunk takes.

Legend: S cached tokens of a chunk, H heads, L latent, N nope, R rope, V value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mla_core.request import LayerRequest

__all__ = ["Piece", "chunk_bytes", "plan_chunks"]

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_PLAIN = {"fp32", "fp16", "bf16"}
# Bytes that decoding a quantised value takes on the way: codes, scales and float32 products.
_DECODING = 12
# One part in so many for what does not grow with the chunk, a kernel's scratch of fixed size above all.
_MARGIN = 32


@dataclass(frozen=True)
class Piece:
    """Cached tokens [start, end) of one request."""

    request: int
    start: int
    end: int


def plan_chunks(context_lens: Sequence[int], budget: int) -> list[list[Piece]]:
    """Pack all cached tokens, in order of request, into chunks of at most `budget` tokens.

    A request may straddle chunks. Every cached token is in exactly one piece; no chunk is empty.
    """
    chunks: list[list[Piece]] = []
    room = 0
    for request, length in enumerate(context_lens):
        start = 0
        while start < length:
            if room == 0:
                chunks.append([])
                room = budget
            end = min(length, start + room)
            chunks[-1].append(Piece(request, start, end))
            room -= end - start
            start = end
    return chunks


def chunk_bytes(request: LayerRequest, tokens: int) -> int:
    """Most memory that a context chunk of `tokens` cached tokens takes, whatever the context length.

    Gathered rows [S, L + R], what kv_b_proj makes of them [S, H, N + V] and keys [S, H, N + R]; and one more
    tensor [S, H, max(N + R, V)]: the partial result of up to as many new tokens, or the copy of keys or
    values that a kernel may need. With few heads, decoding rows of a quantised layout takes more than that.
    What new tokens take by themselves comes on top: queries, outputs and their float32 sums.
    """
    row, key = request.latent + request.rope, request.nope + request.rope
    per_head = (request.nope + request.value) + key + max(key, request.value)
    expanded = (row + request.heads * per_head) * _BYTES[request.dtype]
    decoded = 0 if request.layout in _PLAIN else row * _DECODING
    total = tokens * max(expanded, decoded)
    return total + total // _MARGIN
