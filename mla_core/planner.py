"""Plans an engine step on the host: splits a batch by phase, and lets the chosen backends prepare.

Legend: T tokens, B requests, S cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_core.backend import MhaSegments, MqaSegments
from mla_core.batch import Batch
from mla_core.cache.latent import CacheGeometry, LatentCache, SlotTargets
from mla_core.cache.pool import CachePool
from mla_core.chunks import plan_chunks
from mla_core.errors import BatchError, CacheError
from mla_core.plan import KERNELS
from mla_core.stages.rope import query_factors, rope_inputs
from mla_core.step import AbsorbedPart, ContextChunk, ExpandedPart, Rows, Step, copy_into

if TYPE_CHECKING:
    from mla_core.layer import MLA

__all__ = ["prepare", "refresh"]


def prepare(layer: MLA, batch: Batch, cache: LatentCache | CachePool, *, graph: bool = False) -> Step:
    """Split the batch by phase, plan context chunks and let the chosen backends do their host work.

    graph: one part of fixed shape that covers every row, padding included; see `refresh`.
    Raises CacheError when the cache does not fit the layer or a page id lies outside it, BatchError when a
    graph step has requests that are not decode.
    """
    step = plan(layer, _own(batch) if graph else batch, cache, graph=graph)
    for part in step.parts:
        for segments in part.every_segments():
            _prepare_backend(layer, part.kernel, segments, cache.geometry)
    return step


def refresh(layer: MLA, step: Step, batch: Batch) -> None:
    """Make a graph step describe another batch of the same capacity, without moving any of its tensors.

    Raises BatchError when a shape differs from the step's.
    """
    copy_into(step, plan(layer, batch, step.cache, graph=True))
    for part in step.parts:
        for segments in part.every_segments():
            _prepare_backend(layer, part.kernel, segments, step.cache.geometry)


def _own(batch: Batch) -> Batch:
    """A copy that `refresh` may write into; the caller's batch stays as it is."""
    return Batch(
        query_start_loc=batch.query_start_loc.clone(),
        seq_lens=batch.seq_lens.clone(),
        block_table=batch.block_table.clone(),
        slot_mapping=batch.slot_mapping.clone(),
        positions=batch.positions.clone(),
    )


def _prepare_backend(
    layer: MLA, kernel: str, segments: MhaSegments | MqaSegments, geometry: CacheGeometry
) -> None:
    segments.meta = layer.kernels.of(kernel).prepare(KERNELS[kernel], segments, geometry)


def plan(layer: MLA, batch: Batch, cache: LatentCache | CachePool, *, graph: bool) -> Step:
    """The step before backends have seen it."""
    geometry = cache.geometry
    table = _checked_table(batch, geometry)
    planner = _Planner(layer, batch, geometry, table)
    return Step(
        batch=batch,
        cache=cache,
        signature=layer.signature,
        targets=SlotTargets.split(_live_slots(batch), geometry, fixed=graph),
        rope=rope_inputs(layer.config, batch),
        query_factors_T=query_factors(layer.config, batch),
        parts=(planner.fixed(),) if graph else planner.by_phase(),
        padding_T=_padding(batch) if graph else None,
    )


@dataclass(frozen=True)
class _Planner:
    layer: MLA
    batch: Batch
    geometry: CacheGeometry
    table: Tensor

    def by_phase(self) -> tuple[AbsorbedPart | ExpandedPart, ...]:
        """Decode requests, then prefill requests in the form that the plan chose for them."""
        parts: list[AbsorbedPart | ExpandedPart] = []
        decode, prefill = self._phases()
        if decode:
            parts.append(self.absorbed("mqa", decode))
        if prefill and self.layer.kernels.mha is not None:
            parts.append(self.expanded("mha", prefill))
        elif prefill:
            parts.append(self.absorbed("mqa_prefill", prefill))
        return tuple(parts)

    def _phases(self) -> tuple[list[int], list[int]]:
        longest = self.layer.max_decode_query_len
        decode = [b for b, length in enumerate(self.batch.query_lens) if 0 < length <= longest]
        prefill = [b for b, length in enumerate(self.batch.query_lens) if length > longest]
        return decode, prefill

    def absorbed(self, kernel: str, requests: list[int]) -> AbsorbedPart:
        lengths = self.batch.lengths
        index = torch.tensor(requests, device=self.batch.seq_lens.device)
        every = len(requests) == self.batch.num_requests
        segments = MqaSegments(
            query_start_loc=self._starts(self._queries(requests)),
            seq_lens=self.batch.seq_lens if every else self.batch.seq_lens[index],
            block_table=self.batch.block_table if every else self.batch.block_table[index],
            query_lens=self._queries(requests),
            key_lens=tuple(lengths[b] for b in requests),
        )
        return AbsorbedPart(kernel, self._rows(requests), segments)

    def fixed(self) -> AbsorbedPart:
        """Every row and request, padding included, as one decode part that owns its tensors."""
        _, prefill = self._phases()
        if prefill:
            raise BatchError(
                f"request {prefill[0]} has {self.batch.query_lens[prefill[0]]} new tokens, but a graph step "
                "takes only decode requests of at most "
                f"max_decode_query_len={self.layer.max_decode_query_len}"
            )
        segments = MqaSegments(
            query_start_loc=self.batch.query_start_loc.to(torch.int32, copy=True),
            seq_lens=self.batch.seq_lens.to(torch.int32, copy=True),
            block_table=self.batch.block_table.clone(),
            query_lens=self.batch.query_lens,
            key_lens=self.batch.lengths,
            graph_rows=self.batch.num_rows,
        )
        return AbsorbedPart("mqa", slice(0, self.batch.num_rows), segments)

    def expanded(self, kernel: str, requests: list[int]) -> ExpandedPart:
        queries = self._queries(requests)
        own = self._mha(queries, queries, causal=True)
        contexts = [self.batch.context_lens[b] for b in requests]
        starts = [0, *accumulate(queries)]
        chunks = []
        for pieces in plan_chunks(contexts, self.layer.workspace_tokens):
            first, last = pieces[0].request, pieces[-1].request
            keys = {piece.request: piece.end - piece.start for piece in pieces}
            lengths = tuple(keys.get(index, 0) for index in range(first, last + 1))
            targets = self._context_targets([(requests[p.request], p.start, p.end) for p in pieces])
            segments = self._mha(queries[first : last + 1], lengths, causal=False)
            chunks.append(ContextChunk(targets, slice(starts[first], starts[last + 1]), segments))
        return ExpandedPart(kernel, self._rows(requests), own, tuple(chunks))

    def _mha(self, queries: tuple[int, ...], keys: tuple[int, ...], *, causal: bool) -> MhaSegments:
        return MhaSegments(self._starts(queries), self._starts(keys), queries, keys, causal)

    def _queries(self, requests: list[int]) -> tuple[int, ...]:
        return tuple(self.batch.query_lens[b] for b in requests)

    def _starts(self, lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.geometry.device)

    def _rows(self, requests: list[int]) -> Rows:
        """Token rows of these requests: a slice when they are consecutive, which costs nothing."""
        starts = [0, *accumulate(self.batch.query_lens)]
        spans = [(starts[b], starts[b + 1]) for b in requests]
        if all(end == start for (_, end), (start, _) in pairwise(spans)):
            return slice(spans[0][0], spans[-1][1])
        return torch.cat([torch.arange(*span) for span in spans]).to(self.geometry.device)

    def _context_targets(self, spans: list[tuple[int, int, int]]) -> SlotTargets:
        page_size = self.geometry.page_size
        pages, offsets = [], []
        for request, start, end in spans:
            where = torch.arange(start, end)
            pages.append(self.table[request, where // page_size])
            offsets.append(where % page_size)
        device = self.geometry.device
        return SlotTargets.at(torch.cat(pages).to(device), torch.cat(offsets).to(device), page_size)


def _live_slots(batch: Batch) -> Tensor:
    """Slots of all rows, with padding stored nowhere, whatever the batch says about it."""
    if batch.num_tokens == batch.num_rows:
        return batch.slot_mapping
    return batch.slot_mapping.masked_fill(_padding(batch), -1)


def _padding(batch: Batch) -> Tensor:
    return torch.arange(batch.num_rows, device=batch.slot_mapping.device) >= batch.num_tokens


def _checked_table(batch: Batch, geometry: CacheGeometry) -> Tensor:
    """The block table on the host, every page id that is read or written checked against the cache."""
    table = batch.block_table.cpu().long()
    # A request without new tokens reads nothing.
    lengths = [length if new else 0 for length, new in zip(batch.lengths, batch.query_lens, strict=True)]
    needed = -(-torch.tensor(lengths, dtype=torch.int64) // geometry.page_size)
    width = table.shape[1]
    if needed.numel() and int(needed.max()) > width:
        request = int(needed.argmax())
        raise CacheError(
            f"request {request} has {batch.lengths[request]} tokens and needs {int(needed[request])} pages "
            f"of {geometry.page_size}, but block_table has {width} columns"
        )
    used = torch.arange(width) < needed.unsqueeze(1)
    wrong = (used & ((table < 0) | (table >= geometry.num_pages))).nonzero()
    if wrong.numel():
        request, column = wrong[0].tolist()
        raise CacheError(
            f"block_table[{request}, {column}] is {int(table[request, column])}, but the cache has pages "
            f"0 to {geometry.num_pages - 1}; request {request} needs its first {int(needed[request])} entries"
        )
    return table
