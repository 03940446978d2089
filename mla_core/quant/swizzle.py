"""The order in which tensor cores read the scales of 4-bit blocks: tiles of 128 rows by 4 scales.

Tiles lie row of tiles after row of tiles, 512 scales each. Inside a tile, scale c of row r is number
16 * (r % 32) + 4 * (r // 32) + c. Rows and scales are padded to whole tiles with zeros.
Legend: T rows, G scales a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["padded_size", "swizzle", "unswizzle"]

_ROWS, _COLUMNS, _LANES = 128, 4, 32


def padded_size(rows: int, columns: int) -> int:
    """Scales in the swizzled order of T rows of G scales, padding included."""
    return _up(rows, _ROWS) * _up(columns, _COLUMNS)


def swizzle(scales_TG: Tensor) -> Tensor:
    """Scales [T, G] of a one-byte type in the order of tensor cores, flat."""
    rows, columns = scales_TG.shape
    # As bytes: torch pads no 8-bit floats.
    padding = (0, _up(columns, _COLUMNS) - columns, 0, _up(rows, _ROWS) - rows)
    padded = F.pad(scales_TG.view(torch.uint8), padding)
    tiles = padded.unflatten(1, (-1, _COLUMNS)).unflatten(0, (-1, _ROWS // _LANES, _LANES))
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales_TG.dtype)


def unswizzle(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Scales [T, G] of the flat swizzled order."""
    shape = (-1, _up(columns, _COLUMNS) // _COLUMNS, _LANES, _ROWS // _LANES, _COLUMNS)
    tiles = flat.view(shape).permute(0, 3, 2, 1, 4)
    return tiles.flatten(3).flatten(0, 2)[:rows, :columns]


def _up(size: int, step: int) -> int:
    return -(-size // step) * step
