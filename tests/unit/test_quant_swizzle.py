"""The order of scale factors, against the formula of a scale's place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_core.quant.swizzle import padded_size, swizzle, unswizzle

SHAPES = [(1, 1), (128, 4), (129, 4), (128, 5), (300, 12), (31, 9), (257, 96)]


def scales(rows: int, columns: int) -> Tensor:
    """Bytes that differ from their neighbours, none of them 0."""
    return (torch.arange(rows * columns) % 251 + 1).to(torch.uint8).reshape(rows, columns)


def place(row: int, column: int, columns: int) -> int:
    """Where the scale of (row, column) lies: tiles of 128 x 4, in each 32 lanes of 4 rows."""
    tile = (row // 128) * -(-columns // 4) + column // 4
    return 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_scale_is_where_the_formula_says(rows, columns):
    given = scales(rows, columns)
    flat = swizzle(given)
    where = [place(row, column, columns) for row in range(rows) for column in range(columns)]
    assert flat[where].tolist() == given.flatten().tolist()


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_padding_is_zero_and_fills_whole_tiles(rows, columns):
    flat = swizzle(scales(rows, columns))
    assert flat.numel() == padded_size(rows, columns)
    assert flat.numel() % 512 == 0
    assert int((flat == 0).sum()) == flat.numel() - rows * columns


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_unswizzling_gives_back_the_scales(rows, columns, dtype):
    given = scales(rows, columns).view(dtype)
    back = unswizzle(swizzle(given), rows, columns)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), given.view(torch.uint8))


def test_places_worked_out_by_hand():
    flat = swizzle(scales(129, 8))
    given = scales(129, 8)
    # Row 33 is lane 1's second row; row 128 begins the second row of tiles.
    assert flat[0] == given[0, 0]
    assert flat[16 + 4] == given[33, 0]
    assert flat[512 + 3] == given[0, 7]
    assert flat[1024] == given[128, 0]


def test_the_leading_scales_of_whole_tiles_are_those_of_the_leading_rows():
    given = scales(300, 12)
    leading = swizzle(given)[: padded_size(128, 12)]
    assert torch.equal(leading, swizzle(given[:128]))


def test_no_rows_have_no_scales():
    assert swizzle(torch.zeros(0, 8, dtype=torch.uint8)).numel() == padded_size(0, 8) == 0
