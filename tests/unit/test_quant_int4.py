"""Packed int4 words."""

from __future__ import annotations

import torch

from mla_core.quant import int4


def test_a_word_unpacks_to_the_values_worked_out_by_hand():
    # Nibbles from the lowest: 0, 1, 7, 8, 9, 15, 8, 8.
    word = 0x88F98710
    packed = torch.tensor([word - (1 << 32)], dtype=torch.int32)
    assert int4.unpack(packed).tolist() == [-8, -7, -1, 0, 1, 7, 0, 0]


def test_packing_and_unpacking_give_back_every_value():
    values = torch.arange(-8.0, 8.0).repeat(3, 1)
    assert torch.equal(int4.unpack(int4.pack(values)), values)


def test_the_last_word_is_filled_up():
    packed = int4.pack(torch.tensor([[-8.0, 7.0, 0.0]]))
    assert packed.tolist() == [[0x8F0]]
    assert int4.unpack(packed).shape == (1, 8)


def test_the_top_nibble_reaches_the_sign_bit():
    assert int4.pack(torch.tensor([-8.0] * 7 + [7.0])).tolist() == [-(1 << 28)]
