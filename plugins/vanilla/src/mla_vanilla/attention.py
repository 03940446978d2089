"""Attention over one padded group of requests, with its lse. The only place that does the softmax.

Legend: G groups (requests, or requests times heads), M query rows, S keys, E query width, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["attention", "causal_attention"]

# Scores computed at once, in elements: 256 MB of float32.
_MAX_SCORES = 1 << 26


def attention(
    q_GME: Tensor, k_GSE: Tensor, v_GSV: Tensor, visible_GM: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v and its lse; row m of group g sees its first visible[g, m] keys, or all.

    `visible` may have one row for all groups or one column for all query rows. Keys that a row does not see
    must be finite. Scores, softmax and lse are float32.
    Returns (out [G, M, V], lse [G, M] natural log). A row that sees nothing gets 0 and -inf.
    """
    if k_GSE.shape[1] == 0:
        shape = q_GME.shape[:2]
        return q_GME.new_zeros(*shape, v_GSV.shape[2]), q_GME.new_full(shape, -torch.inf, dtype=torch.float32)
    rows = max(1, _MAX_SCORES // (q_GME.shape[0] * k_GSE.shape[1]))
    compute = _on_cpu if q_GME.device.type == "cpu" else _by_matmul
    if rows >= q_GME.shape[1]:
        return compute(q_GME, k_GSE, v_GSV, visible_GM, scale)
    blocks = [
        compute(q, k_GSE, v_GSV, _rows(visible_GM, start, rows), scale)
        for start, q in zip(range(0, q_GME.shape[1], rows), q_GME.split(rows, dim=1), strict=True)
    ]
    return torch.cat([out for out, _ in blocks], dim=1), torch.cat([lse for _, lse in blocks], dim=1)


def causal_attention(q_GME: Tensor, k_GME: Tensor, v_GMV: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`attention` of a sequence to itself: row m sees keys 0 to m."""
    if q_GME.device.type == "cpu":
        # Skips what lies above the diagonal, about half the work.
        return _fused(q_GME, k_GME, v_GMV, scale, causal=True)
    visible_1M = torch.arange(1, q_GME.shape[1] + 1, device=q_GME.device).unsqueeze(0)
    return attention(q_GME, k_GME, v_GMV, visible_1M, scale)


def _rows(visible_GM: Tensor | None, start: int, rows: int) -> Tensor | None:
    if visible_GM is None or visible_GM.shape[1] == 1:
        return visible_GM
    return visible_GM[:, start : start + rows]


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    if visible is None:
        return _fused(q, k, v, scale)
    bias = torch.zeros(1, dtype=q.dtype).where(_mask(visible, k.shape[1]), -torch.inf).unsqueeze(1)
    return _empty_rows(*_fused(q, k, v, scale, bias=bias), visible)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """torch's fused CPU kernel: float32 softmax inside, and no score matrix. It wants equal widths of q, k
    and v.
    """
    width = v.shape[2]
    if width < q.shape[2]:
        v = F.pad(v, (0, q.shape[2] - width))
    elif width > q.shape[2]:
        q, k = (F.pad(x, (0, width - q.shape[2])) for x in (q, k))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), 0.0, causal, attn_mask=bias, scale=scale
    )
    return out[:, 0, :, :width], lse[:, 0]


def _by_matmul(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Two matmuls with float32 scores in between."""
    if q.dtype == torch.float32:
        scores_GMS = torch.bmm(q, k.transpose(1, 2)) * scale
    else:
        scores_GMS = torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32) * scale
    if visible is not None:
        scores_GMS.masked_fill_(~_mask(visible, k.shape[1]), -torch.inf)
    lse_GM = torch.logsumexp(scores_GMS, dim=-1)
    out = torch.bmm(torch.exp(scores_GMS - lse_GM.unsqueeze(-1)).to(v.dtype), v)
    return (out, lse_GM) if visible is None else _empty_rows(out, lse_GM, visible)


def _mask(visible_GM: Tensor, keys: int) -> Tensor:
    return torch.arange(keys, device=visible_GM.device) < visible_GM.unsqueeze(-1)


def _empty_rows(out: Tensor, lse: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    empty = visible == 0
    return out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -torch.inf)
