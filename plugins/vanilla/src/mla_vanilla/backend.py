"""The vanilla backend: groups requests of similar size, pads them, and calls one attention function.

Legend: T query rows, S keys, H heads, E = N + R, X = L + R, L latent, V value, n requests of a group, P
pages each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mla_core import CacheGeometry, LatentCache, LayerContext, MhaSegments, MqaSegments, ops
from mla_vanilla.attention import attention, causal_attention
from mla_vanilla.manifest import INFO

__all__ = ["Vanilla"]

# A group may be padded to this many times its shortest request.
_MAX_PADDING = 1.25


# Values gathered at once. A GPU only needs a bound on memory. A CPU wants them to stay in its cache, and too
# few for malloc to ask the system for fresh memory, page by page, every time.
_MAX_GATHERED = {"cpu": 1 << 22, "cuda": 1 << 28}


@dataclass(frozen=True, eq=False)
class Piece:
    """Keys of a group that are gathered at once: a run of each request's pages, equally many of each.

    pages [n * P]: the pages to read. unowned: gathered rows that hold no token of the request, None when
    there are none. visible [n, T]: how many of these keys each query row sees, None when all see all.
    """

    pages: Tensor
    unowned: Tensor | None
    visible: Tensor | None


@dataclass(frozen=True, eq=False)
class Group:
    """Requests with the same query length and a similar key length, padded to the longest.

    rows: their query rows. pieces: their keys, in order.
    """

    requests: int
    rows: slice | Tensor
    pieces: tuple[Piece, ...]


class Vanilla:
    """Expanded attention request by request, absorbed attention group by group, in torch."""

    def __init__(self, context: LayerContext) -> None:
        context.require(INFO)
        self.context, self.latent = context, context.request.latent

    def prepare(
        self, kernel: str, segments: MhaSegments | MqaSegments, geometry: CacheGeometry
    ) -> list[Group] | None:
        """Absorbed kernels: how to group the requests and which pages to gather."""
        self.context.require(INFO, page_size=geometry.page_size)
        if isinstance(segments, MhaSegments):
            return None
        groups = _similar(segments.query_lens, segments.key_lens)
        return [_group(members, segments, geometry) for members in groups]

    def mha(
        self,
        q_THE: Tensor,
        k_SHE: Tensor,
        v_SHV: Tensor,
        segments: MhaSegments,
        scale: float,
        out_THV: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        """Each request's heads are one group."""
        query_starts, key_starts = _starts(segments.query_lens), _starts(segments.key_lens)
        for b, (queries, keys) in enumerate(zip(segments.query_lens, segments.key_lens, strict=True)):
            if queries == 0:
                continue
            rows = slice(query_starts[b], query_starts[b + 1])
            columns = slice(key_starts[b], key_starts[b + 1])
            qkv = (x.transpose(0, 1) for x in (q_THE[rows], k_SHE[columns], v_SHV[columns]))
            if segments.causal and queries == keys:
                out, lse = causal_attention(*qkv, scale)
            else:
                visible = _visible(queries, keys, q_THE.device) if segments.causal else None
                out, lse = attention(*qkv, visible, scale)
            out_THV[rows] = out.transpose(0, 1)
            if lse_TH is not None:
                lse_TH[rows] = lse.transpose(0, 1)

    def mqa(
        self,
        q_THX: Tensor,
        cache: LatentCache,
        segments: MqaSegments,
        scale: float,
        out_THL: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        """All heads of a request are query rows over the same keys; values are the keys' latent part."""
        heads = q_THX.shape[1]
        for group in segments.meta:
            query_nTHX = q_THX[group.rows].reshape(group.requests, -1, heads, q_THX.shape[2])
            out, lse = _over_pieces(group.pieces, query_nTHX, cache, scale)
            out_THL[group.rows] = out.reshape(-1, heads, out.shape[2])[..., : self.latent]
            if lse_TH is not None:
                lse_TH[group.rows] = lse.reshape(-1, heads)


def _over_pieces(
    pieces: Sequence[Piece], query_nTHX: Tensor, cache: LatentCache, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of a group over all its keys (out [n, T * H, X], lse [n, T * H]), merged in float32."""
    out, lse = _over_piece(pieces[0], query_nTHX, cache, scale)
    if len(pieces) > 1:
        out = out.float()
    for piece in pieces[1:]:
        ops.merge_into(out, lse, *_over_piece(piece, query_nTHX, cache, scale))
    return out, lse


def _over_piece(piece: Piece, query_nTHX: Tensor, cache: LatentCache, scale: float) -> tuple[Tensor, Tensor]:
    requests, queries, heads, _ = query_nTHX.shape
    keys_nSX = _gather(piece, cache, query_nTHX.dtype)
    keys_nSX = keys_nSX.view(requests, keys_nSX.shape[0] // requests, keys_nSX.shape[1])
    visible = piece.visible
    if visible is not None and queries > 1:
        visible = visible.repeat_interleave(heads, dim=1)
    # The whole row as value: dropping the rope part afterwards is cheaper than copying it away.
    return attention(query_nTHX.flatten(1, 2), keys_nSX, keys_nSX, visible, scale)


def _gather(piece: Piece, cache: LatentCache, dtype: torch.dtype) -> Tensor:
    """The piece's cached rows [n * S, X] in `dtype`; rows that hold no token are 0, whatever lies there."""
    packed = cache.layout.gather_pages(cache.data, piece.pages)
    rows = cache.layout.unpack(packed, dtype, cache.scales).view(-1, cache.layout.width)
    if piece.unowned is not None:
        rows.index_fill_(0, piece.unowned, 0.0)
    return rows


def _similar(query_lens: Sequence[int], key_lens: Sequence[int]) -> list[list[int]]:
    """Requests with new tokens, grouped by query length and, within the padding limit, by key length."""
    live = [b for b, length in enumerate(query_lens) if length > 0]
    groups: list[list[int]] = []
    for b in sorted(live, key=lambda b: (query_lens[b], key_lens[b], b)):
        shortest = groups[-1][0] if groups else b
        alike = groups and query_lens[shortest] == query_lens[b]
        if alike and key_lens[b] <= _MAX_PADDING * key_lens[shortest]:
            groups[-1].append(b)
        else:
            groups.append([b])
    return [sorted(group) for group in groups]


def _group(members: list[int], segments: MqaSegments, geometry: CacheGeometry) -> Group:
    device, page_size = geometry.device, geometry.page_size
    queries = segments.query_lens[members[0]]
    lengths = [segments.key_lens[b] for b in members]
    lengths_n1 = torch.tensor(lengths, device=device).unsqueeze(1)
    columns = -(-max(lengths) // page_size)
    table = segments.block_table[torch.tensor(members, device=device), :columns].long()
    # Entries that a request does not need may be anything; page 0 stands in, and its rows are blanked after
    # the gather.
    needed = torch.arange(table.shape[1], device=device) * page_size < lengths_n1
    pages_nP = table.where(needed, 0)
    # Without the mask every row sees what the last one sees.
    visible_nT = lengths_n1 - torch.arange(queries - 1, -1, -1, device=device) * int(segments.causal)

    def piece(first: int, last: int) -> Piece:
        start, end = first * page_size, last * page_size
        unowned = (torch.arange(start, end, device=device) >= lengths_n1).view(-1).nonzero().squeeze(1)
        return Piece(
            pages=pages_nP[:, first:last].flatten(),
            unowned=unowned if end > min(lengths) else None,
            visible=(visible_nT - start).clamp(0, end - start) if end > min(lengths) - queries + 1 else None,
        )

    limit = _MAX_GATHERED[device.type] // (len(members) * page_size * geometry.layout.width)
    bounds = [*(range(0, columns, max(1, limit)) or [0]), columns]
    return Group(
        requests=len(members),
        rows=_rows(members, segments.query_lens, device),
        pieces=tuple(piece(first, last) for first, last in pairwise(bounds)),
    )


def _rows(members: list[int], query_lens: Sequence[int], device: torch.device) -> slice | Tensor:
    starts = _starts(query_lens)
    if members == list(range(members[0], members[-1] + 1)):
        return slice(starts[members[0]], starts[members[-1] + 1])
    return torch.cat([torch.arange(starts[b], starts[b + 1], device=device) for b in members])


def _visible(queries: int, keys: int, device: torch.device) -> Tensor:
    """Keys each query row of a causal request sees: the last one all, each earlier one fewer."""
    return torch.arange(keys - queries + 1, keys + 1, device=device).clamp(min=0).unsqueeze(0)


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]
