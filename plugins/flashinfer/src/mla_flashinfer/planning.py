"""What FlashInfer is told about a step, computed on the host from lengths and page tables alone.

FlashInfer's MLA kernels pack (token, head) rows into tiles of 64 or 128. Three of its limits are met here, by
planning pieces of a request as requests of their own: a causal tile whose border falls inside a token loses a
key, a request with more queries than keys is not defined, and one plan holds 16384 work items.

Legend: B requests, P pages a request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

__all__ = [
    "Csr",
    "Piece",
    "Room",
    "csr",
    "launches",
    "pieces",
    "room_for",
    "spans",
    "split_scale",
    "starts",
    "workspace_bytes",
]

# Rows of a tile; a cluster of two takes 128.
TILE = 64
# Of FlashInfer's 16384 work items, what splitting keys over the multiprocessors leaves for tiles.
MAX_TILES = 16000


@dataclass(frozen=True)
class Piece:
    """Consecutive query rows of one request; the last one sees `keys` keys."""

    request: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Room:
    """What a captured graph has room for. FlashInfer's grid follows from rows a piece on average, so a graph
    step is planned with as many rows and pieces at every replay.
    """

    rows: int
    pieces: int
    pages: int

    def fill(self, found: Sequence[Piece]) -> tuple[Piece, ...] | None:
        """The pieces, then the rows of padding, which see nothing, then empty places; None: too many."""
        padding = self.rows - sum(piece.queries for piece in found)
        unused = self.pieces - len(found) - 1
        if padding < 0 or unused < 0:
            return None
        return (*found, Piece(0, padding, 0), *[Piece(0, 0, 0)] * unused)


@dataclass(frozen=True, eq=False)
class Csr:
    """Pieces as FlashInfer reads them: where their queries start, which pages they read, how many keys they
    have; int32 on the host.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    @classmethod
    def zeros(cls, room: Room, device: torch.device) -> Csr:
        """Memory for every plan of a graph step."""
        lengths = (room.pieces + 1, room.pieces + 1, room.pages, room.pieces)
        return cls(*(torch.zeros(length, dtype=torch.int32, device=device) for length in lengths))


def pieces(
    query_lens: Sequence[int], key_lens: Sequence[int], *, causal: bool, heads: int
) -> tuple[Piece, ...]:
    """All query rows in order, as pieces that FlashInfer plans correctly; rows that see nothing form pieces
    without keys.
    """
    longest = _longest(heads, causal=causal)
    found = []
    for request, (queries, keys) in enumerate(zip(query_lens, key_lens, strict=True)):
        blind = _blind(queries, keys, causal=causal)
        found += [Piece(request, count, 0) for count in _chunks(blind, longest)]
        seen = keys - (queries - blind) if causal else keys
        for count in _chunks(queries - blind, longest):
            seen += count if causal else 0
            found.append(Piece(request, count, seen))
    return tuple(found)


def spans(query_lens: Sequence[int], key_lens: Sequence[int], *, causal: bool) -> tuple[list[int], list[int]]:
    """(query lengths, key lengths) of packed requests, rows that come before every key split off."""
    queries, keys = [], []
    for query, key in zip(query_lens, key_lens, strict=True):
        blind = _blind(query, key, causal=causal)
        if blind:
            queries.append(blind)
            keys.append(0)
        queries.append(query - blind)
        keys.append(key)
    return queries, keys


def room_for(requests: int, width: int, rows: int, longest_query: int, heads: int, *, causal: bool) -> Room:
    """Room for any step of as many requests and table columns, each of at most `longest_query` new tokens."""
    cuts = -(-longest_query // _longest(heads, causal=causal))
    # A longer request may also have rows before every key, which are a piece of their own.
    most = requests * (cuts + 1 if longest_query > 1 else 1) + 1
    return Room(rows=rows, pieces=most, pages=max(most * width, 1))


def split_scale(scale: float) -> tuple[float, float]:
    """A power of two, which multiplies without rounding, and what is left of the scale: from 1 up to 2."""
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(1.0, exponent - 1), 2 * mantissa


def launches(found: Iterable[Piece], heads: int) -> list[tuple[Piece, ...]]:
    """The pieces in groups that fit into one plan each."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in found:
        tiles = -(-piece.queries * heads // TILE)
        if not groups or tiles > room:
            groups.append([])
            room = MAX_TILES
        groups[-1].append(piece)
        room -= tiles
    return [tuple(group) for group in groups]


def csr(group: Sequence[Piece], block_table: Tensor, page_size: int) -> Csr:
    """One plan's pieces over a page table [B, P] on the host; entries that no piece needs are not read."""
    keys = torch.tensor([piece.keys for piece in group], dtype=torch.int32)
    requests = torch.tensor([piece.request for piece in group])
    pages = -(-keys.long() // page_size)
    ends = pages.cumsum(0)
    columns = torch.arange(int(pages.sum())) - torch.repeat_interleave(ends - pages, pages)
    rows = torch.repeat_interleave(requests, pages)
    return Csr(
        qo_indptr=starts([piece.queries for piece in group]),
        kv_indptr=torch.cat([ends.new_zeros(1), ends]).int(),
        kv_indices=block_table[rows, columns].int(),
        kv_len_arr=keys,
    )


def starts(lengths: Sequence[int]) -> Tensor:
    """Where each of some consecutive spans begins, and where the last one ends; int32 on the host."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def workspace_bytes(multiprocessors: int, latent: int) -> int:
    """Scratch of the MLA kernels: two tiles a multiprocessor, of 16-bit rows and one float32 each."""
    return 2 * multiprocessors * TILE * (2 * latent + 4) + 256


def _blind(queries: int, keys: int, *, causal: bool) -> int:
    """Query rows that come before every key."""
    return max(queries - keys, 0) if causal else 0


def _longest(heads: int, *, causal: bool) -> int:
    """Tokens that a piece may have: whole tiles end between tokens, or one tile holds all."""
    if causal and TILE % heads and heads != 2 * TILE:
        return max(TILE // heads, 1)
    return MAX_TILES * TILE // heads


def _chunks(total: int, longest: int) -> list[int]:
    return [min(longest, total - start) for start in range(0, total, longest)]
