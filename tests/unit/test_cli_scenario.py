"""The request language of mla run, and what its default scenario holds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from mla_core.cli.scenario import EXAMPLE, PHASES, Work, default_scenario, parse_requests
from mla_core.errors import ConfigError


def works(text: str) -> list[str]:
    (step,) = parse_requests(text).steps
    return [str(work) for work in step.work]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prefill:512", ["prefill 512"]),
        ("chunk:256+1024", ["chunk 256+1024"]),
        ("decode:1+40x3", ["decode 1+40"] * 3),
        ("prefill:5x2", ["prefill 5"] * 2),
        (" verify:3+7 , prefill:2 ", ["verify 3+7", "prefill 2"]),
    ],
)
def test_requests_are_read_in_order(text, expected):
    assert works(text) == expected


def test_the_example_of_the_help_text_has_every_phase():
    (step,) = parse_requests(EXAMPLE).steps
    assert {work.phase for work in step.work} == set(PHASES)


def test_each_request_has_a_name_and_its_cached_tokens():
    scenario = parse_requests("prefill:2,decode:1+9x2")
    assert [(request.name, request.cached) for request in scenario.requests] == [
        ("request0", 0),
        ("request1", 9),
        ("request2", 9),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not a request: ''"),
        ("prefil:3", "not a request: 'prefil:3'"),
        ("prefill:3-4", "not a request: 'prefill:3-4'"),
        ("prefill:0", "new tokens and count must be at least 1"),
        ("prefill:1x0", "new tokens and count must be at least 1"),
        ("prefill:3+4", "write chunk:3+4"),
        ("chunk:3", "write chunk:3+100"),
        ("decode:2+4", "write verify:2+4 or chunk:2+4"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_with_a_better_one(text, problem):
    with pytest.raises(ConfigError) as caught:
        parse_requests(text)
    assert problem in str(caught.value)
    assert EXAMPLE in str(caught.value)


def test_the_longest_verification_counts_as_decode():
    assert parse_requests("prefill:64,verify:5+9,decode:1+3").max_decode_query_len == 5


def test_without_verification_only_single_tokens_count_as_decode():
    assert parse_requests("prefill:64,chunk:5+9").max_decode_query_len == 1


def test_new_tokens_and_lengths_add_up_over_the_steps():
    scenario = default_scenario()
    assert scenario.new_tokens == {"main": 172, "copy1": 1, "copy2": 3, "copy3": 1, "other": 40}
    assert scenario.lengths == {"main": 172, "copy1": 149, "copy2": 151, "copy3": 149, "other": 40}


def test_every_request_of_the_default_scenario_continues_where_it_was():
    scenario = default_scenario()
    done = {request.name: 0 if request.parent is None else None for request in scenario.requests}
    for step in scenario.steps:
        parents = dict(done)
        for work in step.work:
            if done[work.request] is None:
                done[work.request] = parents["main"]
            assert work.context == done[work.request], work
            done[work.request] += work.tokens


def test_the_default_scenario_mixes_every_phase_in_one_step():
    assert {work.phase for work in default_scenario().steps[-1].work} == set(PHASES)


def test_decode_and_prefill_requests_of_the_mixed_step_are_not_grouped():
    phases = [work.phase in ("decode", "verify") for work in default_scenario().steps[-1].work]
    assert sum(first != second for first, second in pairwise(phases)) > 2


def test_a_work_without_context_does_not_mention_it():
    assert str(Work("a", "prefill", 3, 0)) == "prefill 3"
