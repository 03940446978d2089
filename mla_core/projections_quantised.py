"""Weight modules that hold a matrix as the checkpoint stores it, or as the two halves of kv_b_proj.

Legend: S rows, H heads of this rank, N nope, L latent, V value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mla_core.quant.fp4_hidden import Fp4Hidden, plain
from mla_core.quant.weight import QuantisedWeight, multiply

__all__ = ["QuantisedLinear", "SplitUp"]

Multiply = Callable[[Tensor | Fp4Hidden, QuantisedWeight, Tensor | None], Tensor]


class QuantisedLinear(nn.Module):
    """y = x W^T + b with W quantised; its tensors are parameters under their checkpoint names.

    `multiply` does the product, from (x, stored weight, bias); kernels replace it, in a prepare_weights hook
    for example. fp4_inputs: give an NVFP4 weight with a static input scale NVFP4 inputs, as 4-bit hardware
    does; else inputs stay as they are.
    """

    def __init__(
        self, stored: QuantisedWeight, bias: nn.Parameter | None, device: torch.device, fp4_inputs: bool
    ) -> None:
        super().__init__()
        self._format, self._shape, self._skip = stored.format, stored.shape, stored.skip
        for name, tensor in stored.tensors.items():
            self.register_parameter(name, _owned(tensor, device))
        self.bias = bias
        self.input_scale = None if stored.input_scale is None else _owned(stored.input_scale, device)
        self.fp4_inputs = fp4_inputs
        self.multiply: Multiply = multiply

    @property
    def stored(self) -> QuantisedWeight:
        """The weight; its tensors are this module's parameters."""
        tensors = {name: getattr(self, name) for name in self._format.parts}
        return QuantisedWeight(self._format, tensors, self._shape, self._skip, self.input_scale)

    @property
    def takes_fp4(self) -> bool:
        """Does this module quantise its inputs to NVFP4?"""
        return self.fp4_inputs and self._format.fp4 and self.input_scale is not None

    def forward(self, x: Tensor | Fp4Hidden) -> Tensor:
        if not self._format.fp4:
            x = plain(x)
        elif self.takes_fp4 and isinstance(x, Tensor):
            x = Fp4Hidden.quantise(x, self.input_scale)
        return self.multiply(x, self.stored, self.bias)

    def fits(self, stored: QuantisedWeight) -> bool:
        """Can `stored` be copied into the tensors that are here?"""
        mine = self.stored
        same = (mine.format.id, mine.shape, mine.skip) == (stored.format.id, stored.shape, stored.skip)
        return same and _description(mine) == _description(stored)

    def copy_(self, stored: QuantisedWeight) -> None:
        """Take over the values of a weight that fits, in place."""
        mine = self.stored
        for name, tensor in mine.tensors.items():
            tensor.copy_(stored.tensors[name])
        if mine.input_scale is not None and stored.input_scale is not None:
            mine.input_scale.copy_(stored.input_scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantisedLinear:
        """Codes and scales keep their types when a model is cast."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def __getstate__(self) -> dict[str, Any]:
        """8-bit floats travel as bytes: torch 2.13 pickles them, but cannot read them back."""
        kept = {
            name: None if value is None else (_viewed(value, torch.uint8), value.dtype)
            for name, value in self._parameters.items()
        }
        return self.__dict__ | {"_parameters": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kept = {name: None if pair is None else _viewed(*pair) for name, pair in state["_parameters"].items()}
        super().__setstate__(state | {"_parameters": kept})


class SplitUp(nn.Module):
    """kv_b_proj as W_uk [H, L, N] and W_uv [H, V, L] alone: what a quantised one becomes.

    Dequantised before it is split, because blocks may straddle heads; the quantised form is not kept.
    """

    def __init__(self, w_uk_HLN: Tensor, w_uv_HVL: Tensor) -> None:
        super().__init__()
        self.register_buffer("w_uk_HLN", w_uk_HLN)
        self.register_buffer("w_uv_HVL", w_uv_HVL)
        self.bias = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the dense matrix, [H * (N + V), L]."""
        heads, latent, nope = self.w_uk_HLN.shape
        return heads * (nope + self.w_uv_HVL.shape[1]), latent

    def forward(self, latent_SL: Tensor) -> Tensor:
        """[nope | value] of every head, [S, H * (N + V)], as the dense kv_b_proj gives them."""
        nope, value = self.w_uk_HLN.shape[2], self.w_uv_HVL.shape[1]
        out_SHX = latent_SL.new_empty(latent_SL.shape[0], len(self.w_uk_HLN), nope + value)
        out_SHX[..., :nope] = _product(latent_SL, self.w_uk_HLN).transpose(0, 1)
        out_SHX[..., nope:] = _product(latent_SL, self.w_uv_HVL.transpose(1, 2)).transpose(0, 1)
        return out_SHX.flatten(1)

    def split(self, kv_b: QuantisedWeight) -> None:
        """Take over this rank's kv_b_proj, some heads at a time."""
        heads, nope, latent = len(self.w_uk_HLN), self.w_uk_HLN.shape[2], self.w_uk_HLN.shape[1]
        rows = nope + self.w_uv_HVL.shape[1]
        step = max(1, _AT_ONCE // (rows * latent))
        for start in range(0, heads, step):
            stop = min(start + step, heads)
            part_HXL = kv_b.cut(0, start * rows, stop * rows).dequantise(self.w_uk_HLN.dtype)
            part_HXL = part_HXL.view(stop - start, rows, latent)
            self.w_uk_HLN[start:stop] = part_HXL[:, :nope].transpose(1, 2)
            self.w_uv_HVL[start:stop] = part_HXL[:, nope:]


# Elements of kv_b_proj that are dequantised at once: few, because allocators keep what temporaries took.
_AT_ONCE = 1 << 17


def _product(x: Tensor, weights: Tensor) -> Tensor:
    """x times each head's weights, [H, S, ...]; on a CPU in float32, for the reason `multiply` gives."""
    if x.device.type == "cpu":
        x, weights = x.float(), weights.float()
    return torch.matmul(x, weights)


def _owned(tensor: Tensor, device: torch.device) -> nn.Parameter:
    copy = tensor.detach().to(device, copy=True, memory_format=torch.contiguous_format)
    return nn.Parameter(copy, requires_grad=False)


def _viewed(tensor: Tensor, dtype: torch.dtype) -> nn.Parameter:
    """One-byte values as another one-byte type; wider ones as they are."""
    return nn.Parameter(tensor.view(dtype) if tensor.itemsize == 1 else tensor, requires_grad=False)


def _description(weight: QuantisedWeight) -> dict[str, tuple[torch.Size, torch.dtype] | None]:
    tensors = dict(weight.tensors) | {"input_scale": weight.input_scale}
    return {name: None if value is None else (value.shape, value.dtype) for name, value in tensors.items()}
