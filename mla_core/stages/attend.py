"""Stage attend: each phase in its form, context chunks merged by lse.

expand form: k, v = W_ukv c, attention over N + R (equations 9 to 11 of arXiv 2405.04434).
absorb form: queries times W_uk, attention over the cached row itself, values times W_uv (its section 2.1.2).
Legend: T tokens of a part, S keys, H heads, N nope, R rope, E = N + R, L latent, V value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_core.ops import merge_into
from mla_core.stages.output import AttentionOutput
from mla_core.step import AbsorbedPart, ContextChunk, ExpandedPart, Step

if TYPE_CHECKING:
    from mla_core.backend import MhaSegments
    from mla_core.cache.latent import LatentCache
    from mla_core.layer import MLA
    from mla_core.stages.project import Projected

__all__ = ["absorb", "attend", "expand", "v_up"]


def attend(layer: MLA, projected: Projected, step: Step, output: AttentionOutput) -> None:
    """Fill the output rows of every request, each phase by the kernel the plan chose."""
    for part in step.parts:
        result = _rows_of(output, part.rows)
        run = _absorbed if isinstance(part, AbsorbedPart) else _expanded
        run(part, layer, projected, step, result)
        if not isinstance(part.rows, slice):
            _scatter(output, part.rows, result)


def _absorbed(
    part: AbsorbedPart, layer: MLA, projected: Projected, step: Step, output: AttentionOutput
) -> None:
    """Multi-query attention over the paged latent rows; new tokens are read back from the cache."""
    backend, cache = layer.kernels.of(part.kernel), step.cache_of(layer)
    query_THX = absorb(layer, projected.query_THE[part.rows])
    owned = layer.kernels.owns_v_up(part.kernel)
    out = output.values_THV if owned else query_THX.new_empty(*query_THX.shape[:2], layer.config.kv_lora_rank)
    backend.mqa(query_THX, cache, part.segments, layer.softmax_scale, out, output.lse_TH)
    if not owned:
        v_up(layer, out, output.values_THV)


def _expanded(
    part: ExpandedPart, layer: MLA, projected: Projected, step: Step, output: AttentionOutput
) -> None:
    """Causal attention among the new tokens, then one unmasked pass per context chunk, merged in float32."""
    query_THE = projected.query_THE[part.rows]
    own = projected.latent_TL[part.rows], projected.k_rope_TR[part.rows]
    if not part.chunks:
        _attend_expanded(layer, part.kernel, query_THE, own, part.own, output)
        return
    lse_TH = query_THE.new_empty(query_THE.shape[:2], dtype=torch.float32)
    first = AttentionOutput(output.values_THV, lse_TH)
    _attend_expanded(layer, part.kernel, query_THE, own, part.own, first)
    total_THV = output.values_THV.float()
    for chunk in part.chunks:
        total = AttentionOutput(total_THV[chunk.rows], lse_TH[chunk.rows])
        _add_chunk(chunk, part.kernel, layer, step.cache_of(layer), query_THE[chunk.rows], total)
    output.values_THV.copy_(total_THV)
    if output.lse_TH is not None:
        output.lse_TH.copy_(lse_TH)


def _add_chunk(
    chunk: ContextChunk,
    kernel: str,
    layer: MLA,
    cache: LatentCache,
    query_THE: Tensor,
    total: AttentionOutput,
) -> None:
    """Merge one chunk's attention into the float32 totals; its memory ends before the next chunk's begins."""
    shape = query_THE.shape[:2]
    partial_THV = query_THE.new_empty(*shape, layer.config.v_head_dim)
    partial_TH = query_THE.new_empty(shape, dtype=torch.float32)
    rows = cache.read_targets(chunk.targets, query_THE.dtype)
    partial = AttentionOutput(partial_THV, partial_TH)
    _attend_expanded(layer, kernel, query_THE, rows, chunk.segments, partial)
    merge_into(total.values_THV, total.lse_TH, partial_THV, partial_TH)


def _attend_expanded(
    layer: MLA,
    kernel: str,
    query_THE: Tensor,
    rows: tuple[Tensor, Tensor],
    segments: MhaSegments,
    output: AttentionOutput,
) -> None:
    """Multi-head attention to these rows; the only holder of their expanded keys and values."""
    k_SHE, v_SHV = expand(layer, *rows)
    backend, scale = layer.kernels.of(kernel), layer.softmax_scale
    backend.mha(query_THE, k_SHE, v_SHV, segments, scale, output.values_THV, output.lse_TH)


def expand(layer: MLA, latent_SL: Tensor, k_rope_SR: Tensor) -> tuple[Tensor, Tensor]:
    """Per-head keys [S, H, N + R] and values [S, H, V] of cached or new rows; the rope key is shared by the
    heads.
    """
    config = layer.config
    nope = config.qk_nope_head_dim
    kv_SHX = layer.projections.kv_b_proj(latent_SL).view(-1, layer.num_heads, nope + config.v_head_dim)
    k_SHE = kv_SHX.new_empty(*kv_SHX.shape[:2], config.qk_head_dim)
    k_SHE[..., :nope] = kv_SHX[..., :nope]
    k_SHE[..., nope:] = k_rope_SR.unsqueeze(1)
    return k_SHE, kv_SHX[..., nope:]


def absorb(layer: MLA, query_THE: Tensor) -> Tensor:
    """Queries against cached rows, [T, H, L + R]: W_uk^T q_nope, then q_rope as it is."""
    nope, latent = layer.config.qk_nope_head_dim, layer.config.kv_lora_rank
    query_THX = query_THE.new_empty(*query_THE.shape[:2], layer.config.latent_width)
    query_THX[..., :latent] = torch.bmm(query_THE[..., :nope].transpose(0, 1), layer.w_uk_HNL).transpose(0, 1)
    query_THX[..., latent:] = query_THE[..., nope:]
    return query_THX


def v_up(layer: MLA, latent_THL: Tensor, values_THV: Tensor) -> None:
    """Stage v_up: latent outputs times W_uv, into the caller's buffer."""
    values_THV.copy_(torch.bmm(latent_THL.transpose(0, 1), layer.w_uv_HLV).transpose(0, 1))


def _rows_of(output: AttentionOutput, rows: slice | Tensor) -> AttentionOutput:
    """A part's rows of the output: itself or a view when they are consecutive, else a buffer for
    `_scatter`.
    """
    if isinstance(rows, slice):
        if rows.stop - rows.start == output.values_THV.shape[0]:
            return output
        return AttentionOutput(
            output.values_THV[rows], None if output.lse_TH is None else output.lse_TH[rows]
        )
    values = output.values_THV.new_empty(rows.shape[0], *output.values_THV.shape[1:])
    lse = None if output.lse_TH is None else output.lse_TH.new_empty(rows.shape[0], output.lse_TH.shape[1])
    return AttentionOutput(values, lse)


def _scatter(output: AttentionOutput, rows: Tensor, result: AttentionOutput) -> None:
    output.values_THV[rows] = result.values_THV
    if output.lse_TH is not None:
        output.lse_TH[rows] = result.lse_TH
