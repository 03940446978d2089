"""Powers of two as one exponent byte."""

from __future__ import annotations

import math

import pytest
import torch

from mla_core.quant import ue8m0


def code(x: float) -> int:
    return int(ue8m0.encode(torch.tensor([x])))


@pytest.mark.parametrize("exponent", [-127, -126, -1, 0, 1, 127])
def test_a_power_of_two_is_its_biased_exponent(exponent):
    assert code(2.0**exponent) == exponent + 127


@pytest.mark.parametrize("exponent", [-127, -126, -10, 0, 3, 126])
def test_a_number_just_above_a_power_of_two_takes_the_next_one(exponent):
    above = torch.nextafter(torch.tensor(2.0**exponent), torch.tensor(math.inf)).item()
    assert code(above) == exponent + 128


@pytest.mark.parametrize("exponent", [-126, -10, 0, 3, 127])
def test_a_number_just_below_a_power_of_two_takes_that_one(exponent):
    below = torch.nextafter(torch.tensor(2.0**exponent), torch.tensor(0.0)).item()
    assert code(below) == exponent + 127


def test_numbers_beyond_the_largest_power_saturate():
    assert code(3.4e38) == 254


def test_the_smallest_positive_number_takes_the_smallest_power():
    assert code(1e-45) == 0


def test_nan_has_its_own_byte_both_ways():
    assert code(math.nan) == 255
    assert math.isnan(ue8m0.decode(torch.tensor([255], dtype=torch.uint8)).item())


def test_every_byte_decodes_to_its_power():
    decoded = ue8m0.decode(torch.arange(255, dtype=torch.uint8)).tolist()
    assert decoded == [2.0 ** (byte - 127) for byte in range(255)]
