"""The kit's own kernels: every shape, slow, float64 inside. They stand in for kernels a backend lacks.

Registered only in the process that tries cells. Legend as in `mla_core.backend`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_core import registry
from mla_core.backend import LayerContext, MhaSegments, MqaSegments
from mla_core.cache.latent import CacheGeometry, LatentCache
from mla_core.cache.layout import layout_ids
from mla_core.capabilities import Capabilities, IntSet
from mla_core.conformance.oracle import attend
from mla_core.conformance.scenes import Lengths
from mla_core.manifest import BackendInfo

__all__ = ["FALLBACK", "Fallback", "register_fallback"]

FALLBACK = "conformance-fallback"


class Fallback:
    """Attention by the oracle, request by request."""

    def __init__(self, context: LayerContext) -> None:
        self.latent = context.request.latent

    def prepare(self, kernel: str, segments: MhaSegments | MqaSegments, geometry: CacheGeometry) -> None:
        """Nothing to plan."""

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
        key = 0
        for request, rows in enumerate(_rows(segments)):
            columns = slice(key, key + segments.key_lens[request])
            inputs = (q_THE[rows], k_SHE[columns], v_SHV[columns])
            _store(inputs, segments, request, rows, scale, out_THV, lse_TH)
            key = columns.stop

    def mqa(
        self,
        q_THL: Tensor,
        cache: LatentCache,
        segments: MqaSegments,
        scale: float,
        out_THL: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        """Kernels mqa_decode and mqa_prefill."""
        for request, rows in enumerate(_rows(segments)):
            length = segments.key_lens[request]
            key_SX = torch.cat(cache.read(segments.block_table[request], length, torch.float32), dim=-1)
            key_SHX = key_SX.unsqueeze(1).expand(-1, q_THL.shape[1], -1)
            inputs = (q_THL[rows], key_SHX, key_SHX[..., : self.latent])
            _store(inputs, segments, request, rows, scale, out_THL, lse_TH)


def _rows(segments: MhaSegments | MqaSegments) -> list[slice]:
    starts = segments.query_start_loc.tolist()
    return [slice(start, start + count) for start, count in zip(starts, segments.query_lens, strict=False)]


def _store(
    inputs: tuple[Tensor, Tensor, Tensor],
    segments: MhaSegments | MqaSegments,
    request: int,
    rows: slice,
    scale: float,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    seen = Lengths(segments.query_lens, segments.key_lens, segments.causal).seen(request)
    answer = attend(*inputs, seen, scale)
    out[rows] = answer.out_THV.to(out.dtype)
    if lse is not None:
        lse[rows] = answer.lse_TH.float()


def register_fallback() -> None:
    """Make the kit's kernels selectable in this process."""
    anything = IntSet.range(0)
    registry.add(
        BackendInfo(
            name=FALLBACK,
            target="mla_core.conformance.fallback:Fallback",
            summary="the conformance kit's own slow kernels",
            priority=-1000,
            capabilities=Capabilities(
                devices={"cpu", "cuda"},
                kernels={"mha_prefill", "mqa_decode", "mqa_prefill"},
                dtypes={"float32", "float16", "bfloat16"},
                layouts=dict.fromkeys(layout_ids(), anything),
                query_len={"single", "uniform", "varlen"},
                heads=anything,
                latent=anything,
                nope=anything,
                rope=anything,
                value=anything,
                returns={"lse"},
            ),
        ),
        override=True,
    )
