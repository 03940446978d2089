"""The e2m1 codec and its packing of two codes a byte."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from mla_core.quant import e2m1
from tests.byte_rows import E2M1


def codes(x: list[float]) -> list[int]:
    return e2m1.encode(torch.tensor(x)).tolist()


def test_the_sixteen_codes_decode_to_the_table_and_its_negative():
    decoded = e2m1.decode(torch.arange(16, dtype=torch.uint8)).tolist()
    assert decoded == E2M1 + [-value for value in E2M1]


def test_every_value_encodes_to_its_own_code():
    assert codes(E2M1) == list(range(8))


def test_a_value_halfway_between_two_codes_takes_the_even_one():
    halfway = [(low + high) / 2 for low, high in pairwise(E2M1)]
    assert codes(halfway) == [0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("direction", [math.inf, -math.inf])
def test_a_value_next_to_halfway_takes_the_nearer_code(direction):
    halfway = torch.tensor([(low + high) / 2 for low, high in pairwise(E2M1)])
    beside = torch.nextafter(halfway, torch.tensor(direction))
    assert codes(beside.tolist()) == [code + (direction > 0) for code in range(7)]


@pytest.mark.parametrize("x", [5.0001, 6.0, 7.0, 1e30, math.inf])
def test_values_beyond_the_largest_saturate(x):
    assert codes([x, -x]) == [7, 15]


def test_values_that_round_to_zero_keep_their_sign():
    assert codes([0.0, -0.0, 0.2, -0.2]) == [0, 8, 0, 8]


def test_nan_becomes_plus_six():
    assert codes([math.nan, -math.nan]) == [7, 7]


def test_the_low_nibble_holds_the_even_element():
    packed = e2m1.encode_pairs(torch.tensor([[0.5, -6.0, 3.0, 0.0]]))
    assert packed.tolist() == [[0xF1, 0x05]]


def test_unpacking_gives_the_elements_in_order():
    packed = torch.tensor([[0xF1, 0x05]], dtype=torch.uint8)
    assert e2m1.decode_pairs(packed).tolist() == [[0.5, -6.0, 3.0, 0.0]]


def test_packing_and_unpacking_every_byte_gives_it_back():
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(e2m1.encode_pairs(e2m1.decode_pairs(every.unsqueeze(1))).squeeze(1), every)
