"""Splits cached prefixes into chunks that fit the workspace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Piece", "plan_chunks"]


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
