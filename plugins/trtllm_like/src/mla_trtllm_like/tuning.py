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


# (rows, keys, warps, depth, resident) of mqa by (form, bytes of the dtype, packed cache), made for 512 latent
# values; from the widest shared memory to the narrowest: an H100's 227 KB, an A100's 163 KB, 99 KB.
_Cut = tuple[int, int, int, int, int]
_MQA: dict[tuple[Form, int, bool], tuple[_Cut, _Cut, _Cut]] = {
    ("rows", 2, False): ((64, 64, 8, 3, 1), (64, 32, 8, 2, 1), (32, 16, 4, 1, 1)),
    ("rows", 2, True): ((64, 64, 8, 2, 1), (64, 32, 8, 2, 1), (32, 16, 4, 1, 1)),
    ("rows", 4, False): ((16, 16, 8, 2, 1), (16, 16, 8, 2, 1), (16, 16, 8, 1, 1)),
    ("rows", 4, True): ((16, 16, 8, 1, 1), (16, 16, 8, 1, 1), (16, 16, 8, 1, 1)),
    ("columns", 2, False): ((16, 64, 4, 3, 1), (16, 32, 4, 3, 1), (16, 32, 4, 2, 1)),
    ("columns", 2, True): ((16, 32, 4, 2, 2), (16, 32, 4, 2, 1), (16, 32, 4, 2, 1)),
}
# The same for tiles of 17 to 32 columns.
_MORE_COLUMNS: dict[bool, tuple[_Cut, _Cut, _Cut]] = {
    False: ((32, 64, 8, 3, 1), (32, 32, 8, 2, 1), (32, 16, 8, 2, 1)),
    True: ((32, 64, 8, 2, 1), (32, 32, 8, 2, 1), (32, 16, 8, 2, 1)),
}
_MHA = {
    2: (MhaShape(128, 64, 8, 2), MhaShape(128, 32, 8, 2), MhaShape(64, 32, 4, 2)),
    4: (MhaShape(32, 32, 8, 1), MhaShape(32, 32, 8, 1), MhaShape(32, 16, 8, 1)),
}
# Bytes of shared memory from which on the first and the second column hold.
_WIDE, _MIDDLE = 232448, 166912


def mqa_shape(form: str, max_rows: int, itemsize: int, packed: bool, shared_memory: int) -> MqaShape:
    """The decode shape for requests of at most `max_rows` query rows; form "auto" goes by that number."""
    column = _column(shared_memory)
    # Four-byte products do not run on tensor cores: columns gain nothing there.
    if itemsize == 4 or form == "rows" or (form == "auto" and max_rows > _FEW):
        rows, *rest = _MQA["rows", itemsize, packed][column]
        return MqaShape("rows", 2 if max_rows > rows else 1, rows, *rest)
    cuts = _MQA["columns", 2, packed] if max_rows <= _SMALLEST_TILE else _MORE_COLUMNS[packed]
    return MqaShape("columns", 1, *cuts[column])


def mha_shape(itemsize: int, shared_memory: int) -> MhaShape:
    """The prefill shape for inputs of `itemsize` bytes."""
    return _MHA[itemsize][_column(shared_memory)]


def _column(shared_memory: int) -> int:
    return 0 if shared_memory >= _WIDE else 1 if shared_memory >= _MIDDLE else 2
