"""Plans and launches the decode kernels. Legend: T tokens, B requests, H heads, X = L + R, L latent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from mla_core import LatentCache, MqaSegments
from mla_trtllm_like.device import cached_bytes, on_device
from mla_trtllm_like.kernels.combine import combine
from mla_trtllm_like.kernels.mqa_columns import mqa_columns
from mla_trtllm_like.kernels.mqa_rows import mqa_rows
from mla_trtllm_like.kernels.numerics import LOG2_E
from mla_trtllm_like.kernels.schedule import OVERHEAD, plan_parts
from mla_trtllm_like.tuning import MqaShape

__all__ = ["MqaPlan", "mqa", "plan"]

_KERNELS = {"rows": mqa_rows, "columns": mqa_columns}
# Fewer key blocks than this are not worth a part of their own: combining costs as much.
_FEWEST_BLOCKS = 2
_PLAN_CHUNK = 1024
_COMBINE_ROWS = 4


@dataclass(frozen=True, eq=False)
class MqaPlan:
    """One step's schedule on the device. bounds [B + 1]: where each request's tiles begin on the line of
    work; first_request [parts + 1]: the request in which a part begins; span [1]: the length of a part.
    """

    shape: MqaShape
    parts: int
    bounds: Tensor
    first_request: Tensor
    span: Tensor


def plan(
    segments: MqaSegments, heads: int, shape: MqaShape, parts: int, reuse: MqaPlan | None = None
) -> MqaPlan:
    """Split a step's work over `parts`; into the tensors of an earlier plan when one is given."""
    requests, device = segments.seq_lens.shape[0], segments.seq_lens.device
    made = reuse or MqaPlan(
        shape,
        parts,
        bounds=torch.empty(requests + 1, dtype=torch.int64, device=device),
        first_request=torch.empty(parts + 1, dtype=torch.int32, device=device),
        span=torch.empty(1, dtype=torch.int64, device=device),
    )
    with on_device(device):
        plan_parts[(made.parts + 1,)](
            segments.query_start_loc.contiguous(),
            segments.seq_lens.contiguous(),
            made.bounds,
            made.first_request,
            made.span,
            requests,
            heads,
            OVERHEAD.value + _FEWEST_BLOCKS,
            TILE_ROWS=made.shape.tile_rows,
            KEYS=made.shape.keys,
            CHUNK=min(_PLAN_CHUNK, triton.next_power_of_2(max(requests, 1))),
            enable_fp_fusion=True,
        )
    return made


def mqa(
    q_THX: Tensor,
    cache: LatentCache,
    segments: MqaSegments,
    scale: float,
    out_THL: Tensor,
    lse_TH: Tensor | None,
) -> None:
    """Attention of every query row over its request's cached rows."""
    plan, shape = segments.meta, segments.meta.shape
    layout, heads = cache.layout, q_THX.shape[1]
    latent_pad = padded(layout.latent)
    data = cached_bytes(cache)
    slots = 2 * plan.parts * shape.tile_rows
    partial = torch.empty(slots, latent_pad, dtype=torch.float32, device=q_THX.device)
    partial_lse = torch.empty(slots, dtype=torch.float32, device=q_THX.device)
    starts, lengths = segments.query_start_loc.contiguous(), segments.seq_lens.contiguous()
    table = segments.block_table
    if table.stride(1) != 1:
        table = table.contiguous()
    lse = partial_lse if lse_TH is None else lse_TH
    lse_strides = (0, 0) if lse_TH is None else lse_TH.stride()
    work = (plan.bounds, plan.first_request, plan.span)
    requests = lengths.shape[0]
    score_scale = scale * LOG2_E * data.rope_scale
    with on_device(q_THX.device):
        _KERNELS[shape.form][(plan.parts * shape.group,)](
            q_THX, data.tensor, table, starts, lengths, *work, out_THL, lse, partial, partial_lse,
            score_scale, data.latent_scale / data.rope_scale, data.latent_scale, requests, heads,
            *q_THX.stride(), *data.strides, table.stride(0), *out_THL.stride(), *lse_strides,
            LAYOUT=data.name, LATENT=layout.latent, ROPE=layout.rope, LATENT_PAD=latent_pad,
            ROPE_PAD=padded(layout.rope), PAGE_SIZE=cache.page_size, TYPED=data.typed,
            CAUSAL=segments.causal, HAS_LSE=lse_TH is not None, GROUP=shape.group, ROWS=shape.rows,
            KEYS=shape.keys, DEPTH=shape.depth, num_warps=shape.warps, num_stages=shape.depth,
            enable_fp_fusion=True,
        )  # fmt: skip
        combine[(plan.parts, shape.tile_rows // _COMBINE_ROWS)](
            starts, lengths, *work, partial, partial_lse, out_THL, lse, requests, heads,
            *out_THL.stride(), *lse_strides, LATENT=layout.latent, LATENT_PAD=latent_pad,
            HAS_LSE=lse_TH is not None, TILE_ROWS=shape.tile_rows, KEYS=shape.keys, ROWS=_COMBINE_ROWS,
            enable_fp_fusion=True,
        )  # fmt: skip


def padded(width: int) -> int:
    """The width a matrix product takes for `width` values."""
    return max(16, triton.next_power_of_2(width))
