"""The e4m3 codec, against all 256 codes written out."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from mla_core.quant import e4m3
from tests.byte_rows import e4m3_value

# Codes 0 to 126 in ascending order of value; 127 is NaN.
VALUES = [e4m3_value(code) for code in range(127)]


def codes(x: list[float], dtype: torch.dtype = torch.float32) -> list[int]:
    return e4m3.encode(torch.tensor(x, dtype=dtype)).view(torch.uint8).tolist()


def test_every_code_decodes_to_its_value_by_the_formula():
    decoded = e4m3.decode(torch.arange(256, dtype=torch.uint8)).tolist()
    wrong = [
        code
        for code, value in enumerate(decoded)
        if value != e4m3_value(code) and not (math.isnan(value) and math.isnan(e4m3_value(code)))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("byte", "value"), [(0x00, 0.0), (0x01, 2**-9), (0x08, 2**-6), (0x38, 1.0), (0xB9, -1.125), (0x7E, 448.0)]
)
def test_a_byte_decodes_to_the_value_worked_out_by_hand(byte, value):
    assert e4m3.decode(torch.tensor([byte], dtype=torch.uint8)).item() == value


def test_a_value_halfway_between_two_codes_takes_the_even_one():
    halfway = [(low + high) / 2 for low, high in pairwise(VALUES)]
    assert codes(halfway) == [code + code % 2 for code in range(126)]


@pytest.mark.parametrize("direction", [math.inf, -math.inf])
def test_a_value_next_to_halfway_takes_the_nearer_code(direction):
    halfway = torch.tensor([(low + high) / 2 for low, high in pairwise(VALUES)])
    beside = torch.nextafter(halfway, torch.tensor(direction))
    assert codes(beside.tolist()) == [code + (direction > 0) for code in range(126)]


def test_negative_values_differ_from_positive_ones_in_the_sign_bit_only():
    x = torch.linspace(0, 500, 1001).tolist()
    assert codes([-value for value in x]) == [code | 0x80 for code in codes(x)]


@pytest.mark.parametrize("x", [448.0, 449.0, 464.0, 1e4, 3e38, math.inf])
def test_values_beyond_the_largest_saturate(x):
    assert codes([x, -x]) == [0x7E, 0xFE]


def test_nan_stays_nan():
    assert codes([math.nan])[0] & 0x7F == 0x7F


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_inputs_round_once(dtype):
    x = torch.linspace(-300, 300, 997).to(dtype)
    assert codes(x.tolist(), dtype) == codes(x.float().tolist())


@pytest.mark.parametrize("nan", [False, True], ids=["without-nan", "with-nan"])
def test_many_codes_decode_like_few(nan):
    """Large tensors take another way on CPUs."""
    known = torch.tensor([code for code in range(256) if nan or code & 0x7F != 0x7F], dtype=torch.uint8)
    many = known.repeat(200)
    assert many.numel() > e4m3._WORTHWHILE > known.numel()
    found, expected = e4m3.decode(many), e4m3.decode(known).repeat(200)
    assert torch.equal(
        found.view(torch.int32)[~expected.isnan()], expected.view(torch.int32)[~expected.isnan()]
    )
    assert torch.equal(found.isnan(), expected.isnan())
