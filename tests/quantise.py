"""Quantised weights for tests: every format's tensors, and the values they stand for, element by element.

Legend: N output rows, K input columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["FORMATS", "Stored", "checkpoint", "quantise"]

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
BLOCK = 128


@dataclass(frozen=True)
class Stored:
    """A module's tensors by their names after the module's, and the float32 values [N, K] they stand for."""

    tensors: Mapping[str, Tensor]
    values: Tensor


def quantise(kind: str, matrix_NK: Tensor) -> Stored:
    """A matrix in one of FORMATS."""
    return FORMATS[kind](matrix_NK.float())


def checkpoint(kind: str, weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint with every matrix quantised, and the dense weights that it stands for."""
    given: dict[str, Tensor] = {}
    dense: dict[str, Tensor] = {}
    for name, value in weights.items():
        if value.dim() < 2:
            given[name] = dense[name] = value
            continue
        stored = quantise(kind, value)
        module = name.removesuffix("weight")
        given |= {module + part: tensor for part, tensor in stored.tensors.items()}
        dense[name] = stored.values
    return given, dense


def _covering(scales: Tensor, rows: int, columns: int, shape: tuple[int, ...]) -> Tensor:
    """For each element of [N, K] the scale of the rows x columns block that it lies in."""
    return scales[torch.arange(shape[0]) // rows][:, torch.arange(shape[1]) // columns]


def _largest(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Largest size in each rows x columns block, the last ones ragged."""
    sizes = torch.stack([part.abs().amax(1) for part in matrix.split(columns, 1)], 1)
    if rows > 1:
        sizes = torch.stack([band.amax(0) for band in sizes.split(rows, 0)])
    return sizes.clamp(min=1e-6)


def _fp8(matrix: Tensor, rows: int, columns: int, name: str, shape: tuple[int, ...] | None = None) -> Stored:
    scales = _largest(matrix, rows, columns) / 448
    steps = _covering(scales, rows, columns, matrix.shape)
    codes = (matrix / steps).to(torch.float8_e4m3fn)
    stored = scales if shape is None else scales.reshape(shape)
    return Stored({"weight": codes, name: stored}, codes.float() * steps)


def _block(matrix: Tensor) -> Stored:
    return _fp8(matrix, BLOCK, BLOCK, "weight_scale_inv")


def _block_compressed(matrix: Tensor) -> Stored:
    """Scales in bfloat16, as models in bfloat16 get them."""
    scales = (_largest(matrix, BLOCK, BLOCK) / 448).bfloat16()
    steps = _covering(scales.float(), BLOCK, BLOCK, matrix.shape)
    codes = (matrix / steps).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Stored({"weight": codes, "weight_scale": scales}, codes.float() * steps)


def _block_four_dims(matrix: Tensor) -> Stored:
    rows, columns = (-(-size // BLOCK) for size in matrix.shape)
    return _fp8(matrix, BLOCK, BLOCK, "weight_scale", (rows, 1, columns, 1))


def _channel(matrix: Tensor) -> Stored:
    return _fp8(matrix, 1, matrix.shape[1], "weight_scale")


def _channel_flat(matrix: Tensor) -> Stored:
    return _fp8(matrix, 1, matrix.shape[1], "weight_scale", (matrix.shape[0],))


def _tensor(matrix: Tensor) -> Stored:
    stored = _fp8(matrix, *matrix.shape, "weight_scale", ())
    return Stored({**stored.tensors, "input_scale": torch.tensor(0.25)}, stored.values)


def _e2m1(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes, e4m3 scales per 16 columns and the scale of all."""
    whole = matrix.abs().max() / (6 * 448)
    scales = (_largest(matrix, 1, 16) / (6 * whole)).to(torch.float8_e4m3fn)
    steps = _covering(scales.float() * whole, 1, 16, matrix.shape)
    codes = ((matrix / steps).unsqueeze(-1) - E2M1).abs().argmin(-1).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales, whole


def _nvfp4_values(packed: Tensor, steps: Tensor) -> Tensor:
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return E2M1[codes.long()] * _covering(steps, 1, 16, codes.shape)


def _nvfp4(matrix: Tensor) -> Stored:
    packed, scales, whole = _e2m1(matrix)
    tensors = {"weight": packed, "weight_scale": scales, "weight_scale_2": whole}
    tensors["input_scale"] = torch.tensor(0.004)
    return Stored(tensors, _nvfp4_values(packed, scales.float() * whole))


def _nvfp4_packed(matrix: Tensor) -> Stored:
    packed, scales, whole = _e2m1(matrix)
    inverse = (1 / whole).reshape(1)
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": inverse}
    tensors["input_global_scale"] = torch.tensor([250.0])
    return Stored(tensors, _nvfp4_values(packed, scales.float() / inverse))


def _int4(matrix: Tensor, group: int = 32) -> Stored:
    scales = (_largest(matrix, 1, group) / 7.5).bfloat16()
    steps = _covering(scales.float(), 1, group, matrix.shape)
    codes = (matrix / steps).round().clamp(-8, 7)
    nibbles = F.pad(codes.long() + 8, (0, -codes.shape[1] % 8))
    words = sum(nibbles[:, at::8] << 4 * at for at in range(8))
    packed = words.to(torch.uint32).view(torch.int32)
    shape = torch.tensor(matrix.shape)
    tensors = {"weight_packed": packed, "weight_scale": scales, "weight_shape": shape}
    return Stored(tensors, codes * steps)


def _int4_channel(matrix: Tensor) -> Stored:
    return _int4(matrix, matrix.shape[1])


FORMATS: Mapping[str, Callable[[Tensor], Stored]] = {
    "fp8_block": _block,
    "fp8_block_bf16_scales": _block_compressed,
    "fp8_block_four_dims": _block_four_dims,
    "fp8_channel": _channel,
    "fp8_channel_flat": _channel_flat,
    "fp8_tensor": _tensor,
    "nvfp4": _nvfp4,
    "nvfp4_packed": _nvfp4_packed,
    "int4_group": _int4,
    "int4_channel": _int4_channel,
}
