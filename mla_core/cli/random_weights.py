"""Random attention weights of a size that leaves attention neither flat nor one-hot."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["random_weights"]


def random_weights(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Tensors by checkpoint name: matrices keep the magnitude of what they multiply, norms are about 1."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, generator).to(dtype) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name.endswith("norm.weight"):
        return noise.mul_(0.1).add_(1.0)
    if len(shape) == 1:
        return noise.mul_(0.1)
    return noise.mul_(1.0 / math.sqrt(shape[-1]))
