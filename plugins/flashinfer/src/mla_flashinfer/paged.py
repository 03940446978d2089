"""Absorbed attention over the paged cache: FlashInfer's MLA wrapper, planned once a step.

Legend: T query rows, H heads, L latent, R rope, X = L + R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from mla_core import CacheGeometry, LatentCache, LayerContext, MqaSegments
from mla_core.errors import ContractError
from mla_flashinfer import memory
from mla_flashinfer.library import PagedShape, new_paged, plan_paged
from mla_flashinfer.planning import Csr, Piece, csr, launches, pieces, workspace_bytes

__all__ = ["Paged", "PagedPlan"]


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """Wrappers planned for one step, each with the query rows that it serves, and the scale they use."""

    launches: tuple[tuple[slice, Any], ...]
    scale: float


@dataclass(frozen=True)
class _GraphKey:
    """Steps that may replay the same CUDA graph."""

    queries: tuple[int, ...]
    causal: bool
    shape: PagedShape
    launch: int


@dataclass(frozen=True, eq=False)
class _Captured:
    """A wrapper at fixed addresses, and how many page ids it has room for."""

    wrapper: Any
    room: int


class Paged:
    """Plans and runs `mqa` for one layer's shape."""

    def __init__(self, engine: str, context: LayerContext, *, graph: bool) -> None:
        self._engine, self._context, self._graph = engine, context, graph
        self._captured: dict[_GraphKey, _Captured] = {}
        self._shared_workspace: Tensor | None = None

    def plan(self, kernel: str, segments: MqaSegments, geometry: CacheGeometry) -> PagedPlan:
        """Host work for one step: split requests where FlashInfer must see them split, and plan."""
        shape = self._shape(geometry)
        found = pieces(segments.query_lens, segments.key_lens, causal=segments.causal, heads=shape.heads)
        groups = launches(found, shape.heads)
        if not groups:
            return PagedPlan((), shape.scale)
        table = segments.block_table.cpu()
        # Graphs are captured of decode only; prefills have too many shapes to keep a plan for each.
        fixed = self._graph and kernel != "mqa_prefill"
        workspace = self._graph_workspace(geometry.device) if fixed else self._workspace(geometry.device)
        planned = []
        for index, group in enumerate(groups):
            launch = csr(group, table, shape.page_size)
            if fixed:
                wrapper = self._at_fixed_addresses(group, launch, segments, workspace, (shape, index))
            else:
                wrapper = new_paged(self._engine, workspace)
            plan_paged(wrapper, shape, launch, causal=segments.causal)
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
        options: dict[str, Any] = {"kv_cache": pages, "return_lse": True, "return_lse_base_on_e": True}
        if pages.dtype == torch.float8_e4m3fn:
            options |= {"ckv_scale": cache.scales.k_scale, "kpe_scale": cache.scales.k_scale}
        if len(plan.launches) == 1:
            plan.launches[0][1].run(query=query, out=out, lse=lse, **options)
        else:
            for rows, wrapper in plan.launches:
                part = None if lse is None else lse[rows]
                wrapper.run(query=query[rows], out=out[rows], lse=part, **options)
        if out is not out_THL:
            out_THL.copy_(out)
        if lse is not lse_TH and lse_TH is not None:
            lse_TH.copy_(lse)

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

    def _graph_workspace(self, device: torch.device) -> Tensor:
        """One for all captured plans: graphs of one layer never run at the same time."""
        if self._shared_workspace is None:
            self._shared_workspace = self._workspace(device)
        return self._shared_workspace

    def _at_fixed_addresses(
        self,
        group: Sequence[Piece],
        launch: Csr,
        segments: MqaSegments,
        workspace: Tensor,
        place: tuple[PagedShape, int],
    ) -> Any:
        """The wrapper whose memory a CUDA graph of this shape has captured; made at the first such step.

        Lengths of queries are part of the shape: they decide the size of the captured grid.
        """
        key = _GraphKey(tuple(piece.queries for piece in group), segments.causal, *place)
        if key not in self._captured:
            room = max(len(group) * segments.block_table.shape[1], 1)
            fixed = replace(launch, kv_indices=launch.kv_indices.new_zeros(room))
            buffers = {name: tensor.to(workspace.device, copy=True) for name, tensor in vars(fixed).items()}
            self._captured[key] = _Captured(new_paged(self._engine, workspace, Csr(**buffers)), room)
        captured = self._captured[key]
        needed = launch.kv_indices.numel()
        if needed > captured.room:
            raise ContractError(
                f"the step reads {needed} pages, but the CUDA graph of its shape was captured with room for "
                f"{captured.room}; capture with the widest block table"
            )
        return captured.wrapper


def _rows(groups: Sequence[Sequence[Piece]]) -> list[slice]:
    """The query rows of each group."""
    counts = [sum(piece.queries for piece in group) for group in groups]
    return [slice(start, end) for start, end in pairwise(accumulate(counts, initial=0))]
