"""Shared tensor operations; their numbers are tested in tests/requirements/test_r01_partial_results.py."""

from __future__ import annotations

import torch

from mla_core.ops import merge, merge_into


def parts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 2, 5), (3, 2), (3, 2, 5), (3, 2)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def test_merge_into_accumulates_in_place_and_returns_nothing():
    out, lse, part_out, part_lse = parts()
    expected = merge(out, lse, part_out, part_lse)
    where = out.data_ptr(), lse.data_ptr()
    assert merge_into(out, lse, part_out, part_lse) is None
    torch.testing.assert_close((out, lse), expected)
    assert (out.data_ptr(), lse.data_ptr()) == where


def test_merge_into_writes_through_views():
    out, lse, part_out, part_lse = parts()
    expected = merge(out[1:], lse[1:], part_out[1:], part_lse[1:])[0]
    first = out[0].clone()
    merge_into(out[1:], lse[1:], part_out[1:], part_lse[1:])
    torch.testing.assert_close(out[1:], expected)
    assert torch.equal(out[0], first)


def test_merge_does_not_care_which_side_comes_first():
    out_a, lse_a, out_b, lse_b = parts()
    torch.testing.assert_close(merge(out_a, lse_a, out_b, lse_b), merge(out_b, lse_b, out_a, lse_a))


def test_merging_with_itself_keeps_the_output_and_doubles_the_weight():
    out, lse, *_ = parts()
    merged, total = merge(out, lse, out, lse)
    torch.testing.assert_close(merged, out)
    torch.testing.assert_close(total, lse + torch.tensor(2.0).log())


def test_merge_works_on_any_leading_dims():
    out_a, lse_a, out_b, lse_b = parts()
    flat = merge(out_a.flatten(0, 1), lse_a.flatten(), out_b.flatten(0, 1), lse_b.flatten())
    torch.testing.assert_close(flat[0].view(3, 2, 5), merge(out_a, lse_a, out_b, lse_b)[0])
