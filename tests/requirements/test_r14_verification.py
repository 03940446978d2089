"""R14: verification of draft tokens sees what token-by-token decode would see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import faults
from tests.support import TOLERANCE, World, build, relative_error, tiny_config

CONTEXT = 5


def verifying(lengths: list[int], most: int = 16, **options: object) -> World:
    """Requests with `CONTEXT` cached tokens each, ready to verify."""
    world = World(build(tiny_config(), max_decode_query_len=most, **options), lengths)
    world.outputs([(request, CONTEXT) for request in range(len(lengths))])
    return world


@pytest.mark.parametrize("drafts", range(1, 17))
def test_every_verification_length_matches_the_oracle(drafts):
    assert verifying([CONTEXT + drafts]).error([(0, drafts)]) < TOLERANCE[torch.float32]


@settings(max_examples=25)
@given(drafts=st.lists(st.integers(0, 16), min_size=1, max_size=5), most=st.sampled_from([1, 4, 16]))
def test_requests_of_one_batch_may_verify_different_lengths(drafts, most):
    world = verifying([CONTEXT + count for count in drafts], most)
    assert world.error(list(enumerate(drafts))) < TOLERANCE[torch.float32]


def test_verification_equals_token_by_token_decode():
    together = verifying([CONTEXT + 7, CONTEXT + 3]).outputs([(0, 7), (1, 3)])
    world = verifying([CONTEXT + 7, CONTEXT + 3], most=1)
    for request, count in ((0, 7), (1, 3)):
        one_by_one = torch.cat([world.outputs([(request, 1)])[0] for _ in range(count)])
        assert relative_error(together[request], one_by_one) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("changed", range(1, 6))
def test_a_draft_token_changes_no_row_before_it(changed):
    outs = []
    for noise in (0.0, 3.0):
        world = verifying([CONTEXT + 6])
        world.requests[0].hidden_SD[CONTEXT + changed] += noise
        outs.append(world.outputs([(0, 6)])[0])
    assert torch.equal(outs[0][:changed], outs[1][:changed])
    assert all(not torch.allclose(a, b) for a, b in zip(outs[0][changed:], outs[1][changed:], strict=True))


def test_a_mask_that_lets_the_next_draft_through_is_noticed():
    world = verifying([CONTEXT + 6])
    with faults.mask_one_too_wide(world):
        assert world.error([(0, 6)]) > 1e-2


def test_a_lost_newest_token_is_noticed():
    world = verifying([CONTEXT + 6])
    with faults.newest_key_lost(world):
        assert world.error([(0, 6)]) > 1e-2


@pytest.mark.parametrize("drafts", [1, 4, 16])
def test_a_request_may_start_with_verification(drafts):
    world = World(build(tiny_config(), max_decode_query_len=16), [drafts])
    assert world.error([(0, drafts)]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("form", ["expand", "absorb"])
@pytest.mark.parametrize("most", [1, 3, 4, 5])
def test_the_same_tokens_give_the_same_numbers_on_both_sides_of_the_limit(most, form):
    """Four new tokens are verification up to the limit, prefill beyond it."""
    world = verifying([CONTEXT + 4], most, prefill_form=form)
    assert world.error([(0, 4)]) < TOLERANCE[torch.float32]


def test_the_decode_kernel_serves_exactly_the_lengths_up_to_the_limit():
    world = verifying([30, 30], most=4)
    step = world.layer.prepare(world.batch([(0, 4), (1, 5)]), world.cache)
    assert [(part.kernel, part.rows) for part in step.parts] == [("mqa", slice(0, 4)), ("mha", slice(4, 9))]


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_rejected_drafts_are_overwritten_by_the_next_step(kept):
    world = verifying([CONTEXT + 12])
    request = world.requests[0]
    right = request.hidden_SD.clone()
    request.hidden_SD[CONTEXT + kept : CONTEXT + 4] += 2.0
    world.outputs([(0, 4)])
    request.hidden_SD, request.done = right, CONTEXT + kept
    assert world.errors([[(0, 4)], [(0, 1)]]) < TOLERANCE[torch.float32]
