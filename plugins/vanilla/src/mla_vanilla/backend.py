"""The vanilla backend: groups requests of similar size, pads them, and calls one attention function.

Legend: T query rows, S keys, H heads, E = N + R, X = L + R, L latent, V value, n requests of a group, P
pages each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mla_core import CacheGeometry, LatentCache, LayerContext, MhaSegments, MqaSegments
from mla_vanilla.attention import attention
from mla_vanilla.manifest import INFO

__all__ = ["Vanilla"]

# A group may be padded to this many times its shortest request.
_MAX_PADDING = 1.25


@dataclass(frozen=True, eq=False)
class Group:
    """Requests with the same query length and a similar key length, padded to `keys`.

    rows: their query rows. pages [n * P]: the pages to read. unowned: rows of the gathered pages that hold
    no token of the request, None when there are none. visible [n, T]: keys each query row sees, None when
    all see all.
    """

    requests: int
    rows: slice | Tensor
    pages: Tensor
    unowned: Tensor | None
    visible: Tensor | None


class Vanilla:
    """Expanded attention request by request, absorbed attention group by group, in torch."""

    def __init__(self, context: LayerContext) -> None:
        context.require(INFO)
        self.latent = context.request.latent

    def prepare(
        self, kernel: str, segments: MhaSegments | MqaSegments, geometry: CacheGeometry
    ) -> list[Group] | None:
        """Absorbed kernels: how to group the requests and which pages to gather."""
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
            visible = _visible(queries, keys, q_THE.device) if segments.causal else None
            out, lse = attention(
                q_THE[rows].transpose(0, 1),
                k_SHE[columns].transpose(0, 1),
                v_SHV[columns].transpose(0, 1),
                visible,
                scale,
            )
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
            keys_nSX = _gather(group, cache, q_THX.dtype)
            query_nMX = q_THX[group.rows].reshape(group.requests, -1, q_THX.shape[2])
            visible = group.visible
            if visible is not None and visible.shape[1] > 1:
                visible = visible.repeat_interleave(heads, dim=1)
            # The whole row as value: dropping the rope part afterwards is cheaper than copying it away.
            out, lse = attention(query_nMX, keys_nSX, keys_nSX, visible, scale)
            out_THL[group.rows] = out.reshape(-1, heads, out.shape[2])[..., : self.latent]
            if lse_TH is not None:
                lse_TH[group.rows] = lse.reshape(-1, heads)


def _gather(group: Group, cache: LatentCache, dtype: torch.dtype) -> Tensor:
    """The group's cached rows [n, S, X] in `dtype`; rows that hold no token are 0, whatever lies there."""
    packed = cache.layout.gather_pages(cache.data, group.pages)
    rows = cache.layout.unpack(packed, dtype, cache.scales).view(-1, cache.layout.width)
    if group.unowned is not None:
        rows.index_fill_(0, group.unowned, 0.0)
    return rows.view(group.requests, rows.shape[0] // group.requests, cache.layout.width)


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
    lengths = torch.tensor([segments.key_lens[b] for b in members], device=device)
    columns = -(-int(lengths.max()) // page_size)
    table = segments.block_table[torch.tensor(members, device=device), :columns].long()
    # Entries that a request does not need may be anything; page 0 stands in, and its rows are blanked after
    # the gather.
    needed = torch.arange(columns, device=device) * page_size < lengths.unsqueeze(1)
    owned = torch.arange(columns * page_size, device=device) < lengths.unsqueeze(1)
    unowned = (~owned).view(-1).nonzero().squeeze(1)
    ragged = unowned.numel() > 0
    visible = None
    if ragged or queries > 1:
        visible = lengths.unsqueeze(1) - torch.arange(queries - 1, -1, -1, device=device)
    return Group(
        requests=len(members),
        rows=_rows(members, segments.query_lens, device),
        pages=table.where(needed, 0).view(-1),
        unowned=unowned if ragged else None,
        visible=visible,
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
