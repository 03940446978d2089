"""Division that rounds the same on every device."""

from __future__ import annotations

from torch import Tensor

__all__ = ["divide"]


def divide(x: Tensor, by: float | Tensor) -> Tensor:
    """x / by with one rounding. torch on CUDA turns division by a number into a product with its inverse,
    which rounds twice; division by a tensor is exact to the last bit everywhere.
    """
    return x / (by if isinstance(by, Tensor) else x.new_full((), by))
