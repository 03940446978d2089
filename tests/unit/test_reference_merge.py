"""The oracle's merge by log-sum-exp."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from mla_core.reference import merge

KEYS, TOKENS, HEADS, VALUE = 12, 5, 3, 4


def attend(logits_HTS: torch.Tensor, values_SHV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a set of keys that may be empty, by its definition."""
    weights_HTS = logits_HTS.exp()
    total_TH = weights_HTS.sum(-1).T
    out_THV = torch.einsum("hts,shv->thv", weights_HTS, values_SHV)
    return out_THV / total_TH.clamp_min(1e-300)[..., None], total_TH.log()


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    logits = 3 * torch.randn(HEADS, TOKENS, KEYS, generator=generator, dtype=torch.float64)
    return logits, torch.randn(KEYS, HEADS, VALUE, generator=generator, dtype=torch.float64)


def parts(cuts: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    logits, values = problem()
    edges = itertools.pairwise([0, *cuts, KEYS])
    pieces = [attend(logits[..., a:b], values[a:b]) for a, b in edges]
    return [out for out, _ in pieces], [lse for _, lse in pieces]


@pytest.mark.parametrize("cuts", [[], [5], [0], [12], [4, 8], [0, 0, 3, 3, 12], list(range(1, 12))], ids=str)
def test_any_number_of_parts_merges_to_the_whole(cuts):
    out, lse = merge(*parts(cuts))
    whole_out, whole_lse = attend(*problem())
    torch.testing.assert_close(out, whole_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-12)


def test_the_order_of_the_parts_does_not_matter():
    outs, lses = parts([2, 9])
    for left, right in zip(merge(outs, lses), merge(outs[::-1], lses[::-1]), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=1e-12)


def test_a_log_sum_exp_in_base_two_gives_another_result():
    outs, lses = parts([5])
    wrong, _ = merge(outs, [lse / math.log(2) for lse in lses])
    assert (wrong - attend(*problem())[0]).abs().max() > 1e-2


def test_parts_that_saw_nothing_merge_to_zero_and_minus_infinity():
    nothing = (torch.zeros(TOKENS, HEADS, VALUE), torch.full((TOKENS, HEADS), -math.inf))
    out, lse = merge([nothing[0]] * 3, [nothing[1]] * 3)
    assert torch.equal(out, torch.zeros(TOKENS, HEADS, VALUE, dtype=torch.float64))
    assert torch.equal(lse, torch.full((TOKENS, HEADS), -math.inf, dtype=torch.float64))


def test_rows_that_saw_nothing_leave_the_other_rows_alone():
    outs, lses = parts([5])
    outs[0][1], lses[0][1] = 0.0, -math.inf
    out, lse = merge(outs, lses)
    assert torch.equal(out[1], outs[1][1])
    assert torch.equal(lse[1], lses[1][1])
    torch.testing.assert_close(out[0], attend(*problem())[0][0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shift", [-800.0, 800.0])
def test_large_logits_neither_overflow_nor_vanish(shift):
    outs, lses = parts([5])
    out, lse = merge(outs, [part + shift for part in lses])
    torch.testing.assert_close(out, attend(*problem())[0], rtol=0, atol=1e-10)
    torch.testing.assert_close(lse - shift, attend(*problem())[1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("where", ["out", "lse"])
def test_a_nan_that_comes_in_comes_out_in_its_row_only(where):
    outs, lses = parts([5])
    (outs if where == "out" else lses)[0][2, 1] = math.nan
    out, _ = merge(outs, lses)
    assert out[2, 1].isnan().all()
    assert int(out.isnan().any(-1).sum()) == 1


def test_low_precision_parts_merge_in_float64():
    outs, lses = parts([5])
    out, lse = merge([part.bfloat16() for part in outs], [part.float() for part in lses])
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
