"""Stage create_output: the buffer that attention writes into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from mla_core.batch import Batch
    from mla_core.layer import MLA

__all__ = ["AttentionOutput", "create_output"]


@dataclass(frozen=True)
class AttentionOutput:
    """Attention's result: values [T, H, V], and lse [T, H] float32 when somebody asked for it."""

    values_THV: Tensor
    lse_TH: Tensor | None


def create_output(layer: MLA, hidden: Tensor, batch: Batch) -> Tensor:
    """An uninitialised buffer [T, H*V] in the dtype of the hidden states."""
    return hidden.new_empty(batch.num_rows, layer.num_heads * layer.config.v_head_dim)
