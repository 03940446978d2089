"""Stage gate: an optional sigmoid gate on the attention output, from the layer's own input."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mla_core.layer import MLA

__all__ = ["gate"]


def gate(layer: MLA, output: Tensor, hidden: Tensor) -> Tensor:
    """output [T, H, V] times sigmoid(W_g x) in float32, one gate a head or one a value; identity without a
    gate.
    """
    if layer.gate_proj is None:
        return output
    logits = layer.gate_proj(hidden).float().unflatten(1, (output.shape[1], -1))
    return (output * torch.sigmoid(logits)).to(output.dtype)
