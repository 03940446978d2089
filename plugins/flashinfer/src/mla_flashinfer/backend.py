"""The flashinfer backend: plans in `prepare`, runs the planned wrappers in each layer."""

from __future__ import annotations

from torch import Tensor

from mla_core import CacheGeometry, LatentCache, LayerContext, MhaSegments, MqaSegments, UnsupportedError
from mla_flashinfer.engines import choose
from mla_flashinfer.manifest import INFO
from mla_flashinfer.options import Options
from mla_flashinfer.paged import Paged, PagedPlan
from mla_flashinfer.ragged import Ragged, RaggedPlan
from mla_flashinfer.toolchain import problems

__all__ = ["FlashInfer"]


class FlashInfer:
    """FlashInfer's kernels behind the core's contract; rope and append stay with the core."""

    def __init__(self, context: LayerContext) -> None:
        context.require(INFO)
        options = Options.model_validate(dict(context.options))
        self.engine = choose(options.impl, context.request, context.kernels)
        lacking = problems()
        if lacking:
            raise UnsupportedError(INFO.name, lacking)
        self._paged = Paged(self.engine, context)
        self._ragged = Ragged(self.engine, context)

    def prepare(
        self, kernel: str, segments: MhaSegments | MqaSegments, geometry: CacheGeometry
    ) -> PagedPlan | RaggedPlan:
        """Plan one step; compiles a kernel the first time it is planned in this environment."""
        if isinstance(segments, MhaSegments):
            return self._ragged.plan(segments)
        return self._paged.plan(segments, geometry)

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
        """Kernel mha_prefill."""
        self._ragged.run(segments.meta, q_THE, k_SHE, v_SHV, scale, out_THV, lse_TH)

    def mqa(
        self,
        q_THX: Tensor,
        cache: LatentCache,
        segments: MqaSegments,
        scale: float,
        out_THL: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        """Kernels mqa_decode and mqa_prefill."""
        self._paged.run(segments.meta, q_THX, cache, scale, out_THL, lse_TH)
