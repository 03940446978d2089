"""Random attention weights of a size that leaves attention neither flat nor one-hot."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mla_core.config import MLAConfig

__all__ = ["random_weights"]


def random_weights(
    config: MLAConfig,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Tensors by checkpoint name: matrices keep the magnitude of what they multiply, norms are about 1.

    Constant factors of the model on query and latent are taken back, as its training would.
    """
    gains = {"q_b_proj.weight": 1 / config.query_scale, "kv_b_proj.weight": 1 / config.latent_scale}
    return {
        name: _random(name, shape, generator).mul_(gains.get(name, 1.0)).to(dtype)
        for name, shape in shapes.items()
    }


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return noise.mul_(0.1).add_(1.0)
    if len(shape) == 1:
        return noise.mul_(0.1)
    return noise.mul_(1.0 / math.sqrt(shape[-1]))
