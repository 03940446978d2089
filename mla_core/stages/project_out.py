"""Stage project_out: the output projection, and the sum over tensor-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from mla_core.batch import Batch
    from mla_core.layer import MLA

__all__ = ["project_out"]


def project_out(layer: MLA, output: Tensor, batch: Batch) -> Tensor:
    """Hidden states [T, D] from attention output [T, H, V]."""
    hidden_TD = layer.o_proj(output.flatten(1))
    return hidden_TD if layer.reduce is None else layer.reduce(hidden_TD)
