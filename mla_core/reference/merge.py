"""Merge attention over disjoint sets of keys by their log-sum-exp.

Legend: P parts, T tokens, H heads, V value (or latent).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["merge"]


def merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of the parts' keys, in float64: out = sum_p exp(lse_p - lse) out_p.

    outs are [..., H, V], lses [..., H], natural logarithm. A part that saw nothing has lse -inf; where all
    parts saw nothing the result is 0 and -inf. A NaN that comes in comes out.
    """
    out_PTHV = torch.stack([out.double() for out in outs])
    lse_PTH = torch.stack([lse.double() for lse in lses])
    top_TH = lse_PTH.amax(dim=0)
    # Nothing seen anywhere: subtract 0 instead of -inf, whose difference from itself is NaN.
    top_TH = torch.where(top_TH == -math.inf, 0.0, top_TH)
    weight_PTH = torch.exp(lse_PTH - top_TH)
    total_TH = weight_PTH.sum(dim=0)
    share_PTH = weight_PTH / torch.where(total_TH == 0.0, 1.0, total_TH)
    return (share_PTH[..., None] * out_PTHV).sum(dim=0), top_TH + torch.log(total_TH)
