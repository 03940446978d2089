"""Launches the fused rope and append. Legend: T tokens, H heads, L latent, R rope, F = R / 2."""

from __future__ import annotations

import triton
from torch import Tensor

from mla_core import LatentCache, RopeInputs, SlotTargets
from mla_trtllm_like.device import cached_bytes, on_device
from mla_trtllm_like.kernels import rope_append as kernels
from mla_trtllm_like.launch_mqa import padded

__all__ = ["rope_append"]

# Query heads a program rotates.
_HEADS = 16


def rope_append(
    cache: LatentCache,
    targets: SlotTargets,
    q_rope_THR: Tensor,
    latent_TL: Tensor,
    k_rope_TR: Tensor,
    rope: RopeInputs | None,
) -> None:
    """Rotate q_rope and k_rope in place, and store the rows of the tokens that have a slot."""
    tokens, heads = q_rope_THR.shape[:2]
    if tokens == 0:
        return
    layout, data = cache.layout, cached_bytes(cache)
    style = "none" if rope is None else rope.style
    # Nothing is read through these when nothing rotates.
    cos, sin = (latent_TL, latent_TL) if rope is None else (rope.cos_TF, rope.sin_TF)
    blocks = 1 if style == "none" else 1 + triton.cdiv(heads, _HEADS)
    with on_device(latent_TL.device):
        kernels.rope_append[(tokens, blocks)](
            q_rope_THR, latent_TL, k_rope_TR, cos, sin, targets.slots, data.tensor, cache.scales.k_scale,
            cache.scales.global_scale, heads,
            *q_rope_THR.stride(), *latent_TL.stride(), *k_rope_TR.stride(), *cos.stride(), *sin.stride(),
            targets.slots.stride(0), *data.strides,
            STYLE=style, LAYOUT=data.name, LATENT=layout.latent, ROPE=layout.rope,
            LATENT_PAD=padded(layout.latent), ROPE_PAD=padded(layout.rope), PAGE_SIZE=cache.page_size,
            POWER_OF_TWO=cache.scales.power_of_two, HEADS=_HEADS, num_warps=2,
            enable_fp_fusion=False,
        )  # fmt: skip
