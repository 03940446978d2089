"""Absorbed attention over the paged cache: FlashInfer's MLA wrapper, planned once a step.

Legend: T query rows, H heads, L latent, R rope, X = L + R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mla_core import CacheGeometry, LatentCache, LayerContext, MqaSegments
from mla_core.errors import ContractError
from mla_flashinfer import memory
from mla_flashinfer.library import PagedShape, new_paged, plan_paged, set_softmax_scale
from mla_flashinfer.planning import (
    Csr,
    Piece,
    Room,
    csr,
    launches,
    pieces,
    room_for,
    split_scale,
    workspace_bytes,
)

__all__ = ["Paged", "PagedPlan"]


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """Wrappers planned for one step, each with the query rows that it serves, and the scale they use.

    room: of a graph step, whose one wrapper is planned anew at the addresses that a CUDA graph has captured.
    """

    launches: tuple[tuple[slice, Any], ...]
    scale: float
    room: Room | None = None


class Paged:
    """Plans and runs `mqa` for one layer's shape."""

    def __init__(self, engine: str, context: LayerContext) -> None:
        self._engine, self._context = engine, context
        self._graph_workspace: Tensor | None = None

    def plan(self, segments: MqaSegments, geometry: CacheGeometry) -> PagedPlan:
        """Host work for one step: split requests where FlashInfer must see them split, and plan."""
        shape = self._shape(geometry)
        found = pieces(segments.query_lens, segments.key_lens, causal=segments.causal, heads=shape.heads)
        table = segments.block_table.cpu()
        if segments.graph_rows is not None:
            plan = segments.meta or self._captured(segments, segments.graph_rows, shape, geometry.device)
            self._fill(plan, found, table, shape, causal=segments.causal)
            return plan
        groups = launches(found, shape.heads)
        workspace = self._workspace(geometry.device) if groups else None
        planned = []
        for group in groups:
            wrapper = new_paged(self._engine, workspace)
            plan_paged(wrapper, shape, csr(group, table, shape.page_size), causal=segments.causal)
            planned.append(wrapper)
        return PagedPlan(tuple(zip(_rows(groups), planned, strict=True)), shape.scale)

    def run(
        self,
        plan: PagedPlan,
        q_THX: Tensor,
        cache: LatentCache,
        scale: float,
        out_THL: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        """Fill `out` and `lse` by the planned launches."""
        memory.check_scale(scale, plan.scale)
        query, pages = memory.readable(q_THX), memory.readable_cache(cache.data)
        out, lse = memory.writable(out_THL), memory.writable_lse(lse_TH)
        if pages.dtype == torch.float8_e4m3fn:
            _launch_fp8(plan, query, pages, cache.scales.k_scale, out, lse)
        else:
            _launch(plan, query, pages, out, lse)
        if out is not out_THL:
            out_THL.copy_(out)
        if lse is not lse_TH and lse_TH is not None:
            lse_TH.copy_(lse)

    def _fill(
        self, plan: PagedPlan, found: tuple[Piece, ...], table: Tensor, shape: PagedShape, *, causal: bool
    ) -> None:
        """Plan a graph step at the addresses that its graph has captured, or will."""
        filled = plan.room.fill(found)
        if filled is None:
            rows = sum(piece.queries for piece in found)
            raise ContractError(
                f"the step needs {rows} rows in {len(found)} pieces, but its graph has room for "
                f"{plan.room.rows} rows in {plan.room.pieces - 1}; requests of a graph step have at most "
                f"max_query_len={self._context.request.max_query_len} new tokens"
            )
        ((_, wrapper),) = plan.launches
        plan_paged(wrapper, shape, csr(filled, table, shape.page_size), causal=causal)

    def _captured(
        self, segments: MqaSegments, rows: int, shape: PagedShape, device: torch.device
    ) -> PagedPlan:
        """A wrapper over device memory that stays where it is, not planned yet."""
        requests, width = segments.block_table.shape
        longest = self._context.request.max_query_len or rows
        room = room_for(requests, width, rows, longest, shape.heads, causal=segments.causal)
        # One for all graph steps of this backend: their graphs never run at the same time.
        if self._graph_workspace is None:
            self._graph_workspace = self._workspace(device)
        wrapper = new_paged(self._engine, self._graph_workspace, Csr.zeros(room, device))
        return PagedPlan(((slice(0, rows), wrapper),), shape.scale, room)

    def _shape(self, geometry: CacheGeometry) -> PagedShape:
        request = self._context.request
        return PagedShape(
            engine=self._engine,
            heads=request.heads,
            latent=request.latent,
            rope=request.rope,
            page_size=geometry.page_size,
            scale=self._context.softmax_scale,
            dtype=self._context.dtype,
            cache_dtype=geometry.layout.storage,
        )

    def _workspace(self, device: torch.device) -> Tensor:
        size = workspace_bytes(memory.multiprocessors(device), self._context.request.latent)
        return memory.scratch(size, device)


def _launch(
    plan: PagedPlan, query: Tensor, pages: Tensor, out: Tensor, lse: Tensor | None, **scales: float
) -> None:
    options: dict[str, Any] = {"kv_cache": pages, "return_lse": True, "return_lse_base_on_e": True, **scales}
    if len(plan.launches) == 1:
        plan.launches[0][1].run(query=query, out=out, lse=lse, **options)
        return
    for rows, wrapper in plan.launches:
        part = None if lse is None else lse[rows]
        wrapper.run(query=query[rows], out=out[rows], lse=part, **options)


def _launch_fp8(
    plan: PagedPlan, query: Tensor, pages: Tensor, k_scale: float, out: Tensor, lse: Tensor | None
) -> None:
    """FlashInfer rounds the scale to bfloat16, and then each scaled key: it gets a power of two, which rounds
    nothing. What is left goes into the softmax scale, in float32, and into the result.
    """
    power, rest = split_scale(k_scale)
    for _, wrapper in plan.launches:
        set_softmax_scale(wrapper, plan.scale * rest)
    _launch(plan, query, pages, out, lse, ckv_scale=power, kpe_scale=power)
    if rest != 1.0:
        out.mul_(rest)


def _rows(groups: Sequence[Sequence[Piece]]) -> list[slice]:
    """The query rows of each group."""
    counts = [sum(piece.queries for piece in group) for group in groups]
    return [slice(start, end) for start, end in pairwise(accumulate(counts, initial=0))]
