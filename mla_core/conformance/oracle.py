"""Attention of one kernel call, row by row in float64, from what the cache really holds.

Legend: T query rows, S keys, H heads, E query width, V value width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Answer", "attend", "join"]


@dataclass(frozen=True)
class Answer:
    """The result of attention: values [T, H, V] and lse [T, H]."""

    out_THV: Tensor
    lse_TH: Tensor


def attend(q_THE: Tensor, k_SHE: Tensor, v_SHV: Tensor, seen_T: list[int], scale: float) -> Answer:
    """softmax(scale * q k) v, where row t sees its first seen[t] keys; none gives 0 and lse -inf."""
    outs, lses = [], []
    for q_HE, seen in zip(q_THE.double(), seen_T, strict=True):
        logit_HS = torch.einsum("he,she->hs", q_HE, k_SHE[:seen].double()) * scale
        share_HS = logit_HS.softmax(dim=-1)
        outs.append(torch.einsum("hs,shv->hv", share_HS, v_SHV[:seen].double()))
        empty_H = logit_HS.new_full((len(q_HE),), -math.inf)
        lses.append(logit_HS.logsumexp(dim=-1) if seen else empty_H)
    heads, width = q_THE.shape[1], v_SHV.shape[2]
    if not outs:
        none = q_THE.new_zeros(0, heads, width, dtype=torch.float64)
        return Answer(none, none.sum(-1))
    return Answer(torch.stack(outs), torch.stack(lses))


def join(answers: list[Answer], heads: int, width: int) -> Answer:
    """The answers of one request after the other; without requests, an empty one."""
    if not answers:
        none = torch.zeros(0, heads, width, dtype=torch.float64)
        return Answer(none, none.sum(-1))
    return Answer(
        torch.cat([answer.out_THV for answer in answers]), torch.cat([answer.lse_TH for answer in answers])
    )
