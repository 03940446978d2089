"""Tiles of e4m3 values with a float32 scale each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_core.quant import tiles
from tests.byte_rows import e4m3_value, half_step

VALUES = [e4m3_value(code) for code in range(127)]


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_tiles_scale_is_its_largest_size_over_448():
    x = torch.tensor([[1.0, -896.0, 3.0, 0.0, 2.0, 448.0, -1.0, 0.5]])
    assert tiles.encode(x, 4)[1].tolist() == [[2.0, 1.0]]


def test_the_largest_value_of_a_tile_takes_the_largest_code():
    codes, _ = tiles.encode(torch.tensor([[7.0, -0.1]]), 2)
    assert codes.view(torch.uint8)[0, 0].item() == 0x7E


@pytest.mark.parametrize(
    ("largest", "scale"), [(448.0, 1.0), (449.0, 2.0), (896.0, 2.0), (3.5, 2.0**-7), (3.6, 2.0**-6)]
)
def test_scales_round_up_to_powers_of_two_when_asked(largest, scale):
    assert tiles.encode(torch.tensor([[largest, 0.1]]), 2, power_of_two=True)[1].item() == scale


@pytest.mark.parametrize("power_of_two", [False, True])
def test_values_come_back_within_half_a_step_of_their_tile(power_of_two):
    x = noise(50, 32) * torch.logspace(-6, 4, 50).unsqueeze(1)
    codes, scales = tiles.encode(x, 16, power_of_two=power_of_two)
    back = tiles.decode(codes, scales)
    for row in range(50):
        for column in range(32):
            scale = scales[row, column // 16].item()
            allowed = half_step(VALUES, x[row, column].item() / scale) * scale
            error = abs(back[row, column].item() - x[row, column].item())
            assert error <= allowed * (1 + 1e-5) + abs(x[row, column].item()) * 1e-6, (row, column)


def test_a_scale_one_percent_off_would_leave_half_a_step():
    x = noise(20, 16)
    codes, scales = tiles.encode(x, 16)
    error = (tiles.decode(codes, scales * 1.01) - x).abs()
    allowed = torch.tensor(
        [
            [half_step(VALUES, v / s.item()) * s.item() for v in row.tolist()]
            for row, s in zip(x, scales, strict=True)
        ]
    )
    assert (error > allowed).any()


def test_a_tile_of_zeros_gets_the_smallest_normal_scale():
    codes, scales = tiles.encode(torch.zeros(1, 4), 4)
    assert scales.item() == 2.0**-126
    assert codes.view(torch.uint8).tolist() == [[0, 0, 0, 0]]


def test_a_nan_stays_in_its_place_and_leaves_the_scale_alone():
    codes, scales = tiles.encode(torch.tensor([[math.nan, 448.0, 1.0, -2.0]]), 4)
    assert scales.item() == 1.0
    assert codes.view(torch.uint8)[0, 0].item() & 0x7F == 0x7F
    assert codes.float()[0, 1:].tolist() == [448.0, 1.0, -2.0]


def test_an_infinity_counts_as_the_largest_float32():
    codes, scales = tiles.encode(torch.tensor([[-math.inf, 1.0]]), 2)
    assert math.isfinite(scales.item())
    assert codes.view(torch.uint8)[0].tolist() == [0xFE, 0x00]


def test_readers_take_any_positive_finite_scale():
    codes = torch.tensor([[0x38, 0x40]], dtype=torch.uint8)
    for scale in (2.0**-126, 0.37, 1.0, 1e30):
        scales = torch.tensor([[scale]])
        assert torch.equal(tiles.decode(codes, scales), torch.tensor([[1.0, 2.0]]) * scales)


def test_no_rows_give_no_rows():
    codes, scales = tiles.encode(torch.zeros(0, 32), 16)
    assert (tuple(codes.shape), tuple(scales.shape)) == ((0, 32), (0, 2))
