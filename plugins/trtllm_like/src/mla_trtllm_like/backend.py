"""The backend: chooses block shapes once a layer, a schedule once a step, and launches the kernels.

Legend: T tokens, S keys, H heads, E = N + R, X = L + R, L latent, R rope, V value.
"""

from __future__ import annotations

from torch import Tensor

from mla_core import (
    BackendInfo,
    CacheGeometry,
    LatentCache,
    LayerContext,
    MhaSegments,
    MqaSegments,
    RopeInputs,
    SlotTargets,
)
from mla_trtllm_like import launch_mha, launch_mqa, launch_rope
from mla_trtllm_like.device import limits
from mla_trtllm_like.launch_mqa import MqaPlan
from mla_trtllm_like.manifest import INFO
from mla_trtllm_like.options import Options
from mla_trtllm_like.tuning import MqaShape, mqa_shape

__all__ = ["TrtllmLike"]

# Requests of mqa_prefill may have any number of query rows; the causal ones see fewer keys the earlier they
# come, and several parts to a place even that out.
_PREFILL_WAVES = 4
_MANY_ROWS = 1 << 30
_PACKED = frozenset({"fp8_e4m3", "fp8_ds_mla", "nvfp4", "nvfp4_rope_bf16"})


class TrtllmLike:
    """MLA by Triton kernels of our own."""

    info: BackendInfo = INFO

    def __init__(self, context: LayerContext) -> None:
        context.require(self.info)
        self.context, self.options = context, Options.model_validate(context.options)

    def prepare(
        self, kernel: str, segments: MhaSegments | MqaSegments, geometry: CacheGeometry
    ) -> MqaPlan | None:
        """Absorbed kernels: the step's schedule, in the tensors of an earlier one if `segments` has it."""
        self.context.require(self.info, page_size=geometry.page_size)
        if isinstance(segments, MhaSegments):
            return None
        shape = self._shape(kernel, geometry)
        return launch_mqa.plan(
            segments, self.context.request.heads, shape, self._parts(kernel, shape, geometry), segments.meta
        )

    def _shape(self, kernel: str, geometry: CacheGeometry) -> MqaShape:
        request = self.context.request
        rows = _MANY_ROWS if kernel == "mqa_prefill" else request.heads * request.max_query_len
        packed = geometry.layout.id in _PACKED
        shared_memory = limits(geometry.device).shared_memory
        return mqa_shape(self.options.form, rows, self.context.dtype.itemsize, packed, shared_memory)

    def _parts(self, kernel: str, shape: MqaShape, geometry: CacheGeometry) -> int:
        if self.options.parts is not None:
            return self.options.parts
        places = limits(geometry.device).multiprocessors * shape.resident
        return max(1, places * (_PREFILL_WAVES if kernel == "mqa_prefill" else 1) // shape.group)

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
        """Prefill over expanded keys and values."""
        launch_mha.mha(q_THE, k_SHE, v_SHV, segments, scale, out_THV, lse_TH)

    def mqa(
        self,
        q_THX: Tensor,
        cache: LatentCache,
        segments: MqaSegments,
        scale: float,
        out_THL: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        """Decode, verify and absorbed prefill over the paged cache."""
        launch_mqa.mqa(q_THX, cache, segments, scale, out_THL, lse_TH)

    def append(self, cache: LatentCache, targets: SlotTargets, latent_TL: Tensor, k_rope_TR: Tensor) -> None:
        """Store the rows of the new tokens; their keys are rotated already."""
        no_queries = k_rope_TR.new_empty(k_rope_TR.shape[0], 0, k_rope_TR.shape[1])
        launch_rope.rope_append(cache, targets, no_queries, latent_TL, k_rope_TR, None)

    def rope_append(
        self,
        cache: LatentCache,
        targets: SlotTargets,
        q_rope_THR: Tensor,
        latent_TL: Tensor,
        k_rope_TR: Tensor,
        rope: RopeInputs | None,
    ) -> None:
        """Rotate and store in one launch."""
        launch_rope.rope_append(cache, targets, q_rope_THR, latent_TL, k_rope_TR, rope)
