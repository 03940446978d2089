"""R04: whoever shares a batch, and in which order, a request's rows are those of its solo run."""

from __future__ import annotations

from functools import cache
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_core import MLA, Step
from mla_core.config import GateConfig
from tests import faults
from tests.support import SCENARIOS, TOLERANCE, World, build, random_weights, tiny_config

OPTIONS = {
    "expand": {"workspace_tokens": 3, "max_decode_query_len": 3},
    "absorb": {"prefill_form": "absorb", "max_decode_query_len": 2},
    "one_pass": {},
}
# Everything behind the attention that could turn a padded row into something else than zero.
BIASED = tiny_config(output_bias=True, attention_bias=True, gate=GateConfig(kind="elementwise"))


@cache
def shared_layer(options: str) -> MLA:
    return build(tiny_config(), **OPTIONS[options])


@st.composite
def compositions(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Lengths of some requests, and steps that take random parts of random requests in random order."""
    lengths = draw(st.lists(st.integers(1, 11), min_size=1, max_size=4))
    left, steps = list(lengths), []
    for _ in range(draw(st.integers(1, 4))):
        who = draw(st.permutations(range(len(lengths))))
        counts = [(r, draw(st.integers(0, left[r]))) for r in who[: draw(st.integers(1, len(who)))]]
        for request, count in counts:
            left[request] -= count
        steps.append(counts)
    return lengths, steps


@pytest.mark.parametrize("options", OPTIONS)
@settings(max_examples=25)
@given(composition=compositions(), page_size=st.integers(1, 5), seed=st.integers(0, 3))
def test_any_composition_and_order_of_batches_matches_the_oracle(options, composition, page_size, seed):
    lengths, steps = composition
    world = World(shared_layer(options), lengths, page_size=page_size, seed=seed)
    assert world.errors(steps) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
@pytest.mark.parametrize("options", ["expand", "absorb"])
def test_a_mixed_batch_in_any_order_equals_the_solo_runs(options, order):
    lengths, contexts, queries = [13, 9, 7, 12], [0, 8, 5, 6], [13, 1, 2, 6]

    def warm() -> World:
        world = World(shared_layer(options), lengths)
        world.outputs([(r, n) for r, n in enumerate(contexts)])
        return world

    together = warm().outputs([(r, queries[r]) for r in order])
    for request, rows in zip(order, together, strict=True):
        alone = warm().outputs([(request, queries[request])])[0]
        torch.testing.assert_close(rows, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fault", [faults.wrong_page, faults.rope_twice, faults.mask_one_too_wide])
def test_a_fault_in_a_mixed_batch_is_noticed(fault):
    world = SCENARIOS["mixed"].world(tiny_config())
    with fault(world):
        assert world.errors(SCENARIOS["mixed"].steps) > 1e-3


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_padding_to_a_fixed_capacity_changes_no_live_row(scenario):
    """World checks that padded rows are zeros although their hidden states are NaN."""
    plain, padded = (SCENARIOS[scenario].world(BIASED, weights=random_weights(BIASED)) for _ in range(2))
    for counts in SCENARIOS[scenario].steps:
        live = plain.outputs(counts)
        capacity = {"max_tokens": sum(count for _, count in counts) + 5, "max_requests": len(counts) + 2}
        for a, b in zip(live, padded.outputs(counts, **capacity), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_capacity_serves_steps_of_any_live_count():
    world = World(build(BIASED, weights=random_weights(BIASED)), [9, 4, 6], weights=random_weights(BIASED))
    steps = [[(0, 5), (1, 3)], [(2, 6), (0, 1), (1, 1)], [], [(0, 2)], [(0, 1)]]
    assert world.errors(steps, max_tokens=8, max_requests=3) < TOLERANCE[torch.float32]


def test_padding_that_is_not_zeroed_is_noticed():
    world = SCENARIOS["context"].world(BIASED, weights=random_weights(BIASED))
    with (
        patch.object(Step, "zero_padding", lambda step, rows, value=0.0: rows),
        pytest.raises(AssertionError, match="padded rows"),
    ):
        world.outputs([(0, 5)], max_tokens=7)


@pytest.mark.parametrize("others", [[], [(1, 0)], [(1, 4)], [(1, 4), (2, 1)]], ids=str)
def test_a_request_does_not_depend_on_who_came_before_it(others):
    world = World(shared_layer("expand"), [8, 6, 3])
    world.outputs([(0, 3)])
    assert world.error([*others, (0, 5)]) < TOLERANCE[torch.float32]
