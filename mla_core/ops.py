"""Tensor operations that several rooms and outside kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["merge", "merge_into"]


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint sets of keys, for the same queries.

    out [..., V] with lse [...] (natural log of the sum of exp). lse = log(e^lse_a + e^lse_b); each out is
    weighted by e^(its lse - lse). A side that saw nothing has lse -inf and weight 0; with both empty the
    result is 0 and -inf. Computed in float32; a NaN that comes in comes out. Returns (out in out_a's dtype,
    lse float32).
    """
    out = out_a.float().clone()
    lse = lse_a.float().clone()
    merge_into(out, lse, out_b, lse_b)
    return out.to(out_a.dtype), lse


def merge_into(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """`merge` into the float32 accumulators `out` and `lse`, in place."""
    total = torch.logaddexp(lse, part_lse.float())
    # Both sides empty: subtracting -inf from -inf would make NaN; any finite reference gives weight 0.
    reference = torch.where(total == -torch.inf, 0.0, total)
    out.mul_(torch.exp(lse - reference).unsqueeze(-1))
    out.addcmul_(part_out.float(), torch.exp(part_lse.float() - reference).unsqueeze(-1))
    lse.copy_(total)
