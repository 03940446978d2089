"""A weight matrix as a checkpoint stores it quantised: its tensors, what their entries cover, its values.

Legend: N output rows, K input columns of the matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_core.quant.fp4_hidden import Fp4Hidden

__all__ = ["Format", "Part", "QuantisedWeight", "multiply", "times"]

# Values decoded at once: a temporary of this many float32 elements instead of a second copy of the matrix.
_CHUNK = 1 << 20

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Part:
    """One tensor of a format: an entry covers `rows` by `columns` of the matrix, 0 means all of them.

    Blocks are anchored at the matrix's first row and column; the last ones may be ragged.
    """

    rows: int
    columns: int
    dtypes: tuple[torch.dtype, ...]

    def shape(self, shape: tuple[int, int]) -> tuple[int, ...]:
        """The tensor's shape for a matrix [N, K]; empty for one scale of everything."""
        if self.rows == self.columns == 0:
            return ()
        return tuple(-(-size // step) if step else 1 for size, step in zip(shape, self.steps, strict=True))

    @property
    def steps(self) -> tuple[int, int]:
        return self.rows, self.columns


@dataclass(frozen=True)
class Format:
    """A way to store a matrix: its tensors by checkpoint name, and how they become float32 values.

    `decode` may return more columns than the matrix has, where codes are packed. fp4: hardware multiplies it
    with NVFP4 inputs.
    """

    id: str
    parts: Mapping[str, Part]
    decode: Callable[[Tensors, Mapping[str, Part]], Tensor]
    fp4: bool = False

    def granule(self, dim: int) -> int:
        """Rows (dim 0) or columns (1) after which all tensors can be cut."""
        return math.lcm(*(part.steps[dim] or 1 for part in self.parts.values()))


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A matrix [N, K], or a cut of one, in a format.

    The tensors begin `skip` rows and columns before the matrix does, at the last borders that all of them
    share, so that any cut keeps its blocks where the whole matrix had them. input_scale: the static step of
    the layer's own input, when the checkpoint has one.
    """

    format: Format
    tensors: Tensors
    shape: tuple[int, int]
    skip: tuple[int, int] = (0, 0)
    input_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def cut(self, dim: int, start: int, stop: int) -> QuantisedWeight:
        """Rows (dim 0) or columns (dim 1) start to stop; the tensors are views."""
        first, last = self.skip[dim] + start, self.skip[dim] + stop
        begin = first // self.format.granule(dim) * self.format.granule(dim)
        tensors = {
            name: _narrow(tensor, dim, self.format.parts[name].steps[dim], begin, last)
            for name, tensor in self.tensors.items()
        }
        shape, skip = list(self.shape), list(self.skip)
        shape[dim], skip[dim] = stop - start, first - begin
        return replace(self, tensors=tensors, shape=(shape[0], shape[1]), skip=(skip[0], skip[1]))

    def chunks(self) -> list[tuple[slice, QuantisedWeight]]:
        """The matrix in pieces of whole blocks, and which of its rows each one is."""
        granule, rows = self.format.granule(0), self.shape[0]
        step = max(1, _CHUNK // max(1, self.shape[1]) // granule) * granule
        borders = [0, *range(step - self.skip[0], rows, step), rows]
        return [(slice(start, stop), self.cut(0, start, stop)) for start, stop in pairwise(borders)]

    def values(self) -> Tensor:
        """All values [N, K] in float32, decoded at once."""
        rows, columns = (slice(skip, skip + size) for skip, size in zip(self.skip, self.shape, strict=True))
        return self.format.decode(self.tensors, self.format.parts)[rows, columns]

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """The matrix [N, K]: float32 values rounded once to `dtype`."""
        device = next(iter(self.tensors.values())).device
        return self.dequantise_into(torch.empty(self.shape, dtype=dtype, device=device))

    def dequantise_into(self, out: Tensor) -> Tensor:
        """`dequantise` into the caller's matrix, piece by piece."""
        for rows, piece in self.chunks():
            out[rows] = piece.values()
        return out


def multiply(x: Tensor | Fp4Hidden, weight: QuantisedWeight, bias: Tensor | None = None) -> Tensor:
    """x W^T + b in the dtype of x; the weight is decoded piece by piece and never held whole.

    NVFP4 inputs are multiplied in float32, as hardware accumulates them, and so is everything on a CPU: the
    values are float32 already, and few CPUs multiply 16-bit floats as fast.
    """
    values = x if isinstance(x, Tensor) else x.values()
    values = values.float() if values.device.type == "cpu" else values
    out = x.new_empty(*x.shape[:-1], weight.shape[0])
    for rows, piece in weight.chunks():
        own = None if bias is None else bias[rows].to(values.dtype)
        out[..., rows] = F.linear(values, piece.values().to(values.dtype), own)
    return out


def times(values: Tensor, scale: Tensor, part: Part) -> Tensor:
    """Values [N, K] times the scales that cover them, in float32, in place."""
    scale, (rows, columns) = scale.float(), part.steps
    if rows > 1:
        scale = scale.repeat_interleave(rows, 0)[: values.shape[0]]
    if columns < 2:
        return values.mul_(scale)
    whole = values.shape[1] // columns
    blocks, rest = values.tensor_split([whole * columns], dim=1)
    blocks.unflatten(1, (whole, columns)).mul_(scale[:, :whole, None])
    if rest.shape[1]:
        rest.mul_(scale[:, whole:])
    return values


def _narrow(tensor: Tensor, dim: int, step: int, begin: int, end: int) -> Tensor:
    """The entries that cover begin to end, where begin is a border."""
    if step == 0:
        return tensor
    first = begin // step
    return tensor.narrow(dim, first, -(-end // step) - first)
