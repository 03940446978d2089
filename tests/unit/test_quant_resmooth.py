"""Re-smoothing FP8 blocks to power-of-two scales."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_core.errors import ContractError
from mla_core.quant import weight, weight_formats
from mla_core.quant.resmooth import resmooth
from mla_core.quant.weight import QuantisedWeight
from tests.quantise import BLOCK, quantise

SHAPE = (300, 200)


def block_weight(matrix: Tensor) -> QuantisedWeight:
    stored = quantise("fp8_block", matrix)
    found, _ = weight_formats.read(stored.tensors, (matrix.shape[0], matrix.shape[1]), (BLOCK, BLOCK))
    assert found is not None
    return found


@pytest.fixture
def matrix() -> Tensor:
    """Blocks of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-3, 2, 300)[:, None]
    return torch.randn(SHAPE, generator=generator) * sizes


def blocks(shape: tuple[int, int]) -> list[tuple[int, int, slice, slice]]:
    return [
        (i, j, slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
        for i in range(-(-shape[0] // BLOCK))
        for j in range(-(-shape[1] // BLOCK))
    ]


def test_scales_are_the_next_powers_of_two(matrix):
    given = block_weight(matrix)
    scales = resmooth(given).tensors["weight_scale_inv"]
    values = given.dequantise(torch.float32)
    for i, j, rows, columns in blocks(SHAPE):
        wanted = max(values[rows, columns].abs().max().item(), 1e-4) / 448
        assert scales[i, j].item() == 2.0 ** math.ceil(math.log2(wanted)), (i, j)


def test_codes_are_the_nearest_at_the_new_scale(matrix):
    given = block_weight(matrix)
    smooth = resmooth(given)
    values = given.dequantise(torch.float32)
    for i, j, rows, columns in blocks(SHAPE):
        scale = smooth.tensors["weight_scale_inv"][i, j]
        expected = (values[rows, columns] / scale).to(torch.float8_e4m3fn)
        codes = smooth.tensors["weight"][rows, columns]
        assert torch.equal(codes.view(torch.uint8), expected.view(torch.uint8)), (i, j)


def test_values_change_by_less_than_one_rounding(matrix):
    given = block_weight(matrix)
    before, after = given.dequantise(torch.float32), resmooth(given).dequantise(torch.float32)
    steps = resmooth(given).tensors["weight_scale_inv"]
    for i, j, rows, columns in blocks(SHAPE):
        old, new = before[rows, columns], after[rows, columns]
        # Half a step of 3 mantissa bits, or of the subnormal ones.
        bound = (old.abs() / 16).clamp(min=steps[i, j].item() * 2.0**-10)
        assert bool(((new - old).abs() <= bound).all()), (i, j)
    assert not torch.equal(after, before)


def test_smoothing_what_is_smooth_changes_no_value(matrix):
    once = resmooth(block_weight(matrix))
    assert torch.equal(resmooth(once).dequantise(torch.float32), once.dequantise(torch.float32))


def test_a_block_of_zeros_gets_the_smallest_scale():
    smooth = resmooth(block_weight(torch.zeros(130, 20)))
    assert smooth.tensors["weight_scale_inv"].unique().item() == 2.0 ** math.ceil(math.log2(1e-4 / 448))
    assert torch.equal(smooth.dequantise(torch.float32), torch.zeros(130, 20))


def test_a_cut_is_smoothed_by_the_whole_matrix_blocks(matrix, monkeypatch):
    monkeypatch.setattr(weight, "_CHUNK", 1000)
    given = block_weight(matrix)
    expected = resmooth(given).dequantise(torch.float32)[150:280]
    assert torch.equal(resmooth(given.cut(0, 150, 280)).dequantise(torch.float32)[:106], expected[:106])


@pytest.mark.parametrize("kind", ["fp8_channel", "fp8_tensor", "nvfp4", "int4_group"])
def test_weights_without_fp8_blocks_are_refused(kind):
    stored = quantise(kind, torch.randn(130, 160))
    found, _ = weight_formats.read(stored.tensors, (130, 160), (BLOCK, BLOCK))
    with pytest.raises(ContractError, match="cannot re-smooth"):
        resmooth(found)
