"""A layer's weights as the oracle takes them: what the checkpoint's tensors stand for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mla_core.layer import MLA
from mla_core.weight_places import places
from mla_core.weights_quantised import collect

__all__ = ["exact_weights"]


def exact_weights(layer: MLA, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every dense tensor that the layer needs, on its device; quantised ones decoded to float32."""
    wanted = places(layer)
    on_device = {name: value.to(layer.device) for name, value in stored.items()}
    quantised = collect(wanted, on_device, (), layer.config.weight_block)
    dense = {name: on_device[name] for name in wanted if name not in quantised.weights}
    return dense | {name: weight.dequantise(torch.float32) for name, weight in quantised.weights.items()}
