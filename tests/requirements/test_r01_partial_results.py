"""R01: every partial result carries its lse, and merging partial results is exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mla_core import reference
from mla_core.ops import merge, merge_into
from tests import faults
from tests.support import SCENARIOS, TOLERANCE, relative_error, tiny_config

Merge = Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Tensor]]
ROWS, HEADS, WIDTH = 3, 2, 5


def pairwise_merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = outs[0], lses[0]
    for part_out, part_lse in zip(outs[1:], lses[1:], strict=True):
        out, lse = merge(out, lse, part_out, part_lse)
    return out, lse


def accumulating_merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    out, lse = outs[0].float().clone(), lses[0].float().clone()
    for part_out, part_lse in zip(outs[1:], lses[1:], strict=True):
        merge_into(out, lse, part_out, part_lse)
    return out, lse


def textbook_merge(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The negative control: it subtracts the larger lse even when both are -inf."""
    top = torch.stack(list(lses)).amax(dim=0)
    weights = [torch.exp(lse - top) for lse in lses]
    total = torch.stack(weights).sum(dim=0)
    out = sum(w[..., None] * out for w, out in zip(weights, outs, strict=True)) / total[..., None]
    return out, top + torch.log(total)


MERGES = {"pairwise": pairwise_merge, "accumulating": accumulating_merge, "oracle": reference.merge}


def scores_and_values(keys: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(ROWS, HEADS, keys, generator=generator)
    return scores, torch.randn(keys, WIDTH, generator=generator)


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over some keys by the contract; none at all gives 0 and -inf."""
    lse = scores.logsumexp(dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -torch.inf)
    return torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None]) @ values, lse


def parts_of(keys: int, borders: Sequence[int], seed: int) -> list[tuple[Tensor, Tensor]]:
    scores, values = scores_and_values(keys, seed)
    cuts = [0, *sorted(borders), keys]
    return [attend(scores[..., a:b], values[a:b]) for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize("form", MERGES)
@settings(max_examples=40)
@given(
    borders=st.lists(st.integers(0, 7), max_size=5),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 9),
)
def test_any_number_and_order_of_parts_merges_into_the_whole(form, borders, order, seed):
    parts = parts_of(7, borders, seed)
    order.shuffle(parts)
    out, lse = MERGES[form](*zip(*parts, strict=True))
    whole_out, whole_lse = attend(*scores_and_values(7, seed))
    assert relative_error(out, whole_out) < 1e-5
    torch.testing.assert_close(lse.float(), whole_lse, rtol=1e-5, atol=1e-5)


def test_a_merge_by_lse_in_base_two_is_noticed():
    parts = [(out, lse / math.log(2)) for out, lse in parts_of(7, [3], 0)]
    out, _ = accumulating_merge(*zip(*parts, strict=True))
    assert relative_error(out, attend(*scores_and_values(7, 0))[0]) > 1e-3


@pytest.mark.parametrize("form", MERGES)
def test_two_parts_that_saw_nothing_merge_into_nothing(form):
    nothing = attend(*scores_and_values(0, 0))
    out, lse = MERGES[form](*zip(nothing, nothing, strict=True))
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_the_textbook_merge_of_two_empty_parts_is_nan():
    nothing = attend(*scores_and_values(0, 0))
    assert textbook_merge(*zip(nothing, nothing, strict=True))[0].isnan().all()


@pytest.mark.parametrize("form", MERGES)
@pytest.mark.parametrize("first", [True, False], ids=["empty_first", "empty_last"])
def test_a_part_that_saw_nothing_changes_nothing(form, first):
    some, nothing = attend(*scores_and_values(4, 1)), attend(*scores_and_values(0, 1))
    out, lse = MERGES[form](*zip(*((nothing, some) if first else (some, nothing)), strict=True))
    torch.testing.assert_close((out.float(), lse.float()), some, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("form", MERGES)
@pytest.mark.parametrize("where", ["out", "lse"])
@pytest.mark.parametrize("part", [0, 1])
def test_a_nan_that_comes_in_comes_out_in_its_own_row_only(form, where, part):
    parts = parts_of(7, [3], 2)
    outs, lses = ([x.clone() for x in kind] for kind in zip(*parts, strict=True))
    {"out": outs, "lse": lses}[where][part][1] = torch.nan
    out, _ = MERGES[form](outs, lses)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("form", MERGES)
def test_parts_whose_lse_lie_far_apart_merge_without_overflow(form):
    (out_a, lse_a), (out_b, lse_b) = parts_of(7, [3], 3)
    out, lse = MERGES[form]([out_a, out_b], [lse_a + 1e4, lse_b - 1e4])
    torch.testing.assert_close((out.float(), lse.float()), (out_a, lse_a + 1e4))


def test_merge_keeps_the_dtype_of_the_output_and_gives_lse_in_float32():
    (out_a, lse_a), (out_b, lse_b) = parts_of(7, [3], 4)
    out, lse = merge(out_a.bfloat16(), lse_a, out_b.bfloat16(), lse_b)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_merge_leaves_its_inputs_alone():
    parts = [x for part in parts_of(7, [3], 5) for x in part]
    before = [x.clone() for x in parts]
    merge(*parts)
    assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))


def lse_error(scenario: str, fault: faults.Fault | None = None, **options: object) -> float:
    """Worst absolute difference of any lse in a scenario."""
    world = SCENARIOS[scenario].world(tiny_config(), **options)
    with fault(world) if fault else faults.none(world):
        return max(_lse_error(world, counts) for counts in SCENARIOS[scenario].steps)


def _lse_error(world, counts) -> float:
    starts = [world.requests[request].done for request, _ in counts]
    errors = []
    for (request, count), start, (_, lse_TH) in zip(counts, starts, world.attention(counts), strict=True):
        assert lse_TH.dtype == torch.float32
        expected = world.expected(request).lse_SH[start : start + count]
        assert lse_TH.shape == expected.shape
        errors.append(float((lse_TH - expected).abs().nan_to_num(nan=torch.inf).max()))
    return max(errors)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_layer_returns_the_natural_lse_of_scaled_scores(scenario):
    assert lse_error(scenario) < 1e-5


@pytest.mark.parametrize("fault", [faults.lse_in_base_two, faults.scale_one_percent_off])
def test_the_lse_comparison_notices_another_base_and_another_scale(fault):
    assert lse_error("chunked_prefill", fault) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scenario", ["chunked_prefill", "decode", "absorbed_context"])
def test_lse_is_float32_for_16_bit_layers_too(scenario, dtype):
    # Scores of about 10 with a relative error of a few 2^-9.
    assert lse_error(scenario, dtype=dtype) < 0.1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_attention_values_match_the_oracle_before_gate_and_output_projection(scenario):
    world = SCENARIOS[scenario].world(tiny_config())
    counts = SCENARIOS[scenario].steps[0]
    for (request, count), (values_THV, _) in zip(counts, world.attention(counts), strict=True):
        error = relative_error(values_THV, world.expected(request).attention_SHV[:count])
        assert error < TOLERANCE[torch.float32]


def test_without_return_lse_there_is_none():
    world = SCENARIOS["context"].world(tiny_config())
    batch = world.batch([(0, 5)])
    step = world.layer.prepare(batch, world.cache)
    assert world.layer.attention(world.hidden([(0, 5)]), step)[1] is None


def test_padded_rows_of_attention_saw_nothing():
    world = SCENARIOS["context"].world(tiny_config())
    batch = world.batch([(0, 5)], max_tokens=8)
    step = world.layer.prepare(batch, world.cache)
    values, lse = world.layer.attention(world.hidden([(0, 5)], 8), step, return_lse=True)
    assert torch.equal(values[5:], torch.zeros_like(values[5:]))
    assert torch.equal(lse[5:], torch.full_like(lse[5:], -torch.inf))
