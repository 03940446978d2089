"""Memory that notices: outputs between canaries, and inputs compared bit by bit afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Guarded", "Watched"]

_PADDING = 256


class Guarded:
    """A tensor between two strips of canaries, all of it poisoned: what stays unwritten is NaN."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        size = 1
        for length in shape:
            size *= length
        self._whole = torch.empty(size + 2 * _PADDING, dtype=dtype, device=device)
        self._whole.view(torch.uint8).fill_(255)
        self._size = size
        self.view = self._whole[_PADDING : _PADDING + size].view(shape)

    def overrun(self) -> bool:
        """Was a canary written?"""
        strips = (self._whole[:_PADDING], self._whole[_PADDING + self._size :])
        return any(bool((strip.view(torch.uint8) != 255).any()) for strip in strips)

    def touched(self) -> bool:
        """Was anything written, inside or outside?"""
        return bool((self._whole.view(torch.uint8) != 255).any())


class Watched:
    """Tensors that nobody may change; NaN-proof, since bytes are compared."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            self.add(name, tensor)

    def add(self, name: str, tensor: Tensor) -> None:
        self._tensors[name], self._copies[name] = tensor, _bytes(tensor).clone()

    def changed(self) -> list[str]:
        """Names of the tensors that are not what they were."""
        return [
            name
            for name, tensor in self._tensors.items()
            if not torch.equal(_bytes(tensor), self._copies[name])
        ]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
