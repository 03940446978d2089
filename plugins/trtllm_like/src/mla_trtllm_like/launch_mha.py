"""Launches the prefill kernel. Legend: T queries, S keys, H heads, E = N + R, V value."""

from __future__ import annotations

import triton
from torch import Tensor

from mla_core import MhaSegments
from mla_trtllm_like.device import limits, on_device
from mla_trtllm_like.kernels import mha as kernels
from mla_trtllm_like.kernels.numerics import LOG2_E
from mla_trtllm_like.launch_mqa import padded
from mla_trtllm_like.tuning import mha_shape

__all__ = ["mha", "parts_of"]


def mha(
    q_THE: Tensor,
    k_SHE: Tensor,
    v_SHV: Tensor,
    segments: MhaSegments,
    scale: float,
    out_THV: Tensor,
    lse_TH: Tensor | None,
) -> None:
    """Attention of every query row over its request's keys, causal or over all of them."""
    heads, width = q_THE.shape[1:]
    shape = mha_shape(q_THE.dtype.itemsize, limits(q_THE.device).shared_memory)
    blocks = triton.cdiv(max(segments.query_lens, default=0), shape.rows)
    if blocks == 0:
        return
    head_pad, rest_pad = parts_of(width)
    lse = out_THV if lse_TH is None else lse_TH
    lse_strides = (0, 0) if lse_TH is None else lse_TH.stride()
    with on_device(q_THE.device):
        kernels.mha[(blocks * heads * len(segments.query_lens),)](
            q_THE, k_SHE, v_SHV, segments.query_start_loc, segments.key_start_loc, out_THV, lse,
            scale * LOG2_E, heads, blocks,
            *q_THE.stride(), *k_SHE.stride(), *v_SHV.stride(), *out_THV.stride(), *lse_strides,
            CAUSAL=segments.causal, HAS_LSE=lse_TH is not None, WIDTH=width, HEAD_PAD=head_pad,
            REST_PAD=rest_pad, VALUE=v_SHV.shape[2], VALUE_PAD=padded(v_SHV.shape[2]), ROWS=shape.rows,
            KEYS=shape.keys, DEPTH=shape.depth, num_warps=shape.warps, num_stages=shape.depth,
            enable_fp_fusion=True,
        )  # fmt: skip


def parts_of(width: int) -> tuple[int, int]:
    """A width as its largest power of two and what the rest takes: 192 is (128, 64), 128 is (128, 0)."""
    whole = padded(width)
    if width in (whole, whole - 1) or whole == 16:
        return whole, 0
    head = whole // 2
    rest = padded(width - head)
    return (whole, 0) if rest == head else (head, rest)
