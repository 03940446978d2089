"""Block shapes by device, dtype and kind of cache: a small table, so that nothing is tuned while serving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["MhaShape", "MqaShape", "mha_shape", "mqa_shape"]

Form = Literal["rows", "columns"]

# Query rows up to which they are columns of the products.
_FEW = 32
_SMALLEST_TILE = 16


@dataclass(frozen=True)
class MqaShape:
    """How a decode kernel is cut: `group` programs of `rows` query rows and `keys` keys at a time, with
    `depth` key blocks on their way; `resident` programs fit a multiprocessor.
    """

    form: Form
    group: int
    rows: int
    keys: int
    warps: int
    depth: int
    resident: int

    @property
    def tile_rows(self) -> int:
        return self.group * self.rows


@dataclass(frozen=True)
class MhaShape:
    """How the prefill kernel is cut: query rows and keys of a block, warps, key blocks on their way."""

    rows: int
    keys: int
    warps: int
    depth: int


# (keys, warps, depth, resident) of mqa by (form, rows, 2- or 4-byte dtype, packed cache), for 512 latent
# values, from the widest shared memory to the narrowest: an H100's 227 KB, an A100's 163 KB, 99 KB.
_MQA: dict[tuple[Form, int, int, bool], tuple[tuple[int, int, int, int], ...]] = {
    ("rows", 64, 2, False): ((64, 8, 3, 1), (32, 8, 2, 1), (16, 8, 1, 1)),
    ("rows", 64, 2, True): ((64, 8, 2, 1), (32, 8, 2, 1), (16, 8, 1, 1)),
    ("rows", 16, 4, False): ((16, 4, 2, 1), (16, 4, 2, 1), (16, 4, 1, 1)),
    ("rows", 16, 4, True): ((16, 4, 1, 1), (16, 4, 1, 1), (16, 4, 1, 1)),
    ("columns", 16, 2, False): ((64, 4, 3, 1), (32, 4, 3, 1), (32, 4, 2, 1)),
    ("columns", 16, 2, True): ((64, 4, 2, 1), (32, 4, 2, 1), (32, 4, 2, 1)),
    ("columns", 32, 2, False): ((64, 8, 3, 1), (32, 8, 2, 1), (16, 8, 2, 1)),
    ("columns", 32, 2, True): ((64, 8, 2, 1), (32, 8, 2, 1), (16, 8, 2, 1)),
}
_MHA = {
    2: (MhaShape(128, 64, 8, 2), MhaShape(128, 32, 8, 2), MhaShape(64, 32, 4, 2)),
    4: (MhaShape(32, 32, 4, 1), MhaShape(32, 32, 4, 1), MhaShape(32, 16, 4, 1)),
}
# Bytes of shared memory from which on the first and the second column hold.
_WIDE, _MIDDLE = 232448, 166912


def mqa_shape(form: str, max_rows: int, itemsize: int, packed: bool, shared_memory: int) -> MqaShape:
    """The decode shape for requests of at most `max_rows` query rows; form "auto" goes by that number."""
    if itemsize == 4:
        # Four-byte products do not run on tensor cores, so nothing is gained by many rows or by columns.
        chosen, rows, group = "rows", 16, 1
    elif form == "columns" or (form == "auto" and max_rows <= _FEW):
        chosen, rows, group = "columns", _SMALLEST_TILE if max_rows <= _SMALLEST_TILE else _FEW, 1
    else:
        chosen, rows, group = "rows", 64, 2 if max_rows > 64 else 1
    keys, warps, depth, resident = _MQA[chosen, rows, itemsize, packed][_column(shared_memory)]
    return MqaShape(chosen, group, rows, keys, warps, depth, resident)


def mha_shape(itemsize: int, shared_memory: int) -> MhaShape:
    """The prefill shape for inputs of `itemsize` bytes."""
    return _MHA[itemsize][_column(shared_memory)]


def _column(shared_memory: int) -> int:
    return 0 if shared_memory >= _WIDE else 1 if shared_memory >= _MIDDLE else 2
