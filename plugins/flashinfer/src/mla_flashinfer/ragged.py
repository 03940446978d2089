"""Expanded attention over packed requests: FlashInfer's ragged prefill wrapper, planned once a step.

Legend: T query rows, S keys, H heads, E = N + R query width, V value.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_core import LayerContext, MhaSegments
from mla_flashinfer import memory
from mla_flashinfer.library import RaggedShape, plan_ragged
from mla_flashinfer.planning import spans

__all__ = ["Ragged", "RaggedPlan"]

# Query rows of the largest tile, and tiles a multiprocessor that fa2 plans for when it splits keys.
_TILE_ROWS, _TILES = 128, 2


@dataclass(frozen=True, eq=False)
class RaggedPlan:
    """A planned wrapper; None when no row sees a key."""

    wrapper: Any
    scale: float


class Ragged:
    """Plans and runs `mha` for one layer's shape."""

    def __init__(self, engine: str, context: LayerContext) -> None:
        request = context.request
        self._device = context.device
        self._shape = RaggedShape(
            engine=engine,
            heads=request.heads,
            width=request.nope + request.rope,
            value=request.value,
            scale=context.softmax_scale,
            dtype=context.dtype,
        )
        # Plans whose host buffers are still being copied.
        self._copying: deque[tuple[torch.cuda.Event, Any]] = deque()

    def plan(self, segments: MhaSegments) -> RaggedPlan:
        """Host work for one step. Nothing is read back from the device."""
        queries, keys = spans(segments.query_lens, segments.key_lens, causal=segments.causal)
        if not sum(queries) or not sum(keys):
            return RaggedPlan(None, self._shape.scale)
        workspace = memory.scratch(self._workspace_bytes(), self._device)
        wrapper = plan_ragged(self._shape, workspace, queries, keys, causal=segments.causal)
        self._keep_until_copied(wrapper)
        return RaggedPlan(wrapper, self._shape.scale)

    def run(
        self,
        plan: RaggedPlan,
        q_THE: Tensor,
        k_SHE: Tensor,
        v_SHV: Tensor,
        scale: float,
        out_THV: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        """Fill `out` and `lse` by the planned wrapper."""
        memory.check_scale(scale, plan.scale)
        if plan.wrapper is None:
            out_THV.zero_()
            if lse_TH is not None:
                lse_TH.fill_(-torch.inf)
            return
        out, lse = memory.writable(out_THV), memory.writable_lse(lse_TH)
        inputs = (memory.readable(x) for x in (q_THE, k_SHE, v_SHV))
        plan.wrapper.run(*inputs, out=out, lse=lse, return_lse=lse is not None, lse_base="ln")
        if out is not out_THV:
            out_THV.copy_(out)
        if lse is not lse_TH and lse_TH is not None:
            lse_TH.copy_(lse)

    def _workspace_bytes(self) -> int:
        """Only fa2 splits keys, and then keeps one float32 row a tile row."""
        if self._shape.engine != "fa2":
            return 256
        tiles = _TILES * memory.multiprocessors(self._device)
        return tiles * _TILE_ROWS * (self._shape.value + 1) * 4 + 256

    def _keep_until_copied(self, wrapper: Any) -> None:
        """FlashInfer copies a plan from pinned memory of the wrapper's, unknown to torch: hold it until then,
        or the next plan could be written over it.
        """
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._copying.append((event, wrapper))
        while self._copying[0][0].query() and len(self._copying) > 1:
            self._copying.popleft()
