"""Each planted liar gets exactly its verdict, and nothing else of it fails."""

from __future__ import annotations

import pytest

DTYPE = "mqa_decode/dtype=bfloat16"
SINGLE_VALUES = ("value", "limit", "grid")


def test_an_honest_backend_has_no_failing_cell(trial):
    assert trial("honest").failing() == {}


def test_every_kind_of_cell_of_an_honest_backend_is_decided(trial):
    verdicts = {result.verdict.value for result in trial("honest").all("value", "check")}
    assert verdicts == {"verified", "honest refusal"}


def test_an_over_claimer_is_caught_at_the_value_it_cannot_do(trial):
    assert trial("over_claimer").failing(*SINGLE_VALUES) == {"mqa_decode/heads=8": "over-claim"}


def test_an_under_claimer_is_caught(trial):
    assert trial("under_claimer").failing(*SINGLE_VALUES) == {DTYPE: "under-claim"}


def test_a_silent_acceptor_is_caught(trial):
    assert trial("silent_acceptor").failing(*SINGLE_VALUES) == {DTYPE: "silent acceptance"}


def test_a_crasher_is_caught_and_costs_one_cell_only(trial):
    assert trial("crasher").failing(*SINGLE_VALUES) == {DTYPE: "dirty refusal"}


def test_a_crash_is_reported_with_its_signal(trial):
    assert "signal 6" in trial("crasher").judge(DTYPE).detail


def test_a_hanger_is_caught_and_costs_one_cell_only(impatient_trial):
    assert impatient_trial.failing("value") == {DTYPE: "dirty refusal"}


def test_a_hang_is_reported_with_the_time_limit(impatient_trial):
    assert impatient_trial.judge(DTYPE).detail == "no answer within 5 s"


def test_a_refusal_with_the_wrong_exception_is_dirty(trial):
    assert trial("raiser").failing(*SINGLE_VALUES) == {DTYPE: "dirty refusal"}


def test_a_refusal_that_does_not_name_the_field_is_dirty(trial):
    assert trial("vague_refuser").failing(*SINGLE_VALUES) == {DTYPE: "dirty refusal"}


def test_a_refusal_after_writing_the_output_is_dirty(trial):
    assert trial("late_refuser").failing(*SINGLE_VALUES) == {DTYPE: "dirty refusal"}


@pytest.mark.parametrize(
    ("liar", "said"), [("outside_writer", "wrote outside out"), ("mutator", "changed its inputs: q")]
)
def test_a_backend_that_writes_where_it_must_not_over_claims_every_value(trial, liar, said):
    results = [result for result in trial(liar).all("value") if result.claim == "declared"]
    assert {(result.verdict.value, result.detail) for result in results} == {("over-claim", said)}


def test_a_declined_value_that_works_is_declined(trial):
    assert trial("decliner").judge(DTYPE).verdict.value == "declined"


def test_a_backend_that_declines_has_no_failing_cell(trial):
    assert trial("decliner").failing(*SINGLE_VALUES) == {}


def test_a_backend_that_holds_to_its_limit_has_no_failing_cell(trial):
    assert trial("limited").failing(*SINGLE_VALUES) == {}


def test_a_named_limit_is_tried_on_both_sides(trial):
    names = {cell.id: cell.claim for cell in trial("limited").cells.values() if cell.group == "limit"}
    assert names == {
        "mqa_decode/limit:one type=kept": "declared",
        "mqa_decode/limit:one type=layout=fp32": "undeclared",
        "mqa_decode/limit:one type=heads=5": "undeclared",
    }


def test_a_backend_that_works_beyond_its_limit_under_claims(trial):
    assert set(trial("limit_breaker").failing("limit").values()) == {"under-claim"}


def test_a_missing_package_leaves_everything_unverified(trial):
    results = trial("needy").all("value")
    declared = {result.verdict.value for result in results if result.claim == "declared"}
    assert declared == {"unverified"}


def test_a_missing_package_is_named(trial):
    detail = trial("needy").judge("mqa_decode/heads=8").detail
    assert "a-package-that-nobody-has>=9, offered not installed" in detail


def test_an_honest_owner_of_every_stage_has_no_failing_cell(trial):
    assert trial("owner").failing() == {}


@pytest.mark.parametrize(
    ("liar", "cell", "verdict"),
    [
        ("wrong_base", "mqa_decode/lse.values", "over-claim"),
        ("page_truster", "mqa_decode/pages.partial_last_page", "over-claim"),
        ("neighbour_reader", "mqa_decode/batch.neighbour_of_nan", "over-claim"),
        ("future_seer", "mqa_decode/verification.no_future", "over-claim"),
        ("dice_roller", "mqa_decode/deterministic=True", "over-claim"),
        ("double_rotator", "layer/stages.once", "over-claim"),
        ("double_rotator", "layer/rope_style=half_split", "over-claim"),
        ("double_rotator", "append/cache.append", "over-claim"),
        ("sloppy_writer", "append/cache.append", "over-claim"),
        ("sloppy_writer", "layer/cache.untargeted_slots", "over-claim"),
        ("stale_owner", "layer/weights.reload", "over-claim"),
        ("stale_owner", "layer/weights.partial_reload", "over-claim"),
        ("gate_forgetter", "layer/stages.gate", "over-claim"),
        ("gate_forgetter", "layer/owns=gate", "over-claim"),
        ("duplicate_counter", "mqa_sparse/sparse.ignored_indices", "over-claim"),
    ],
)
def test_a_fault_in_a_promise_is_caught_by_the_check_for_it(trial, liar, cell, verdict):
    assert trial(liar).judge(cell).verdict.value == verdict


@pytest.mark.parametrize(
    ("liar", "cell"),
    [
        ("stale_owner", "layer/stages.once"),
        ("gate_forgetter", "layer/stages.once"),
        ("duplicate_counter", "mqa_sparse/sparse.all_keys_equal_dense"),
        ("future_seer", "mqa_decode/heads=8"),
        ("neighbour_reader", "mqa_decode/batch.order"),
    ],
)
def test_a_fault_is_not_blamed_on_what_works(trial, liar, cell):
    assert trial(liar).judge(cell).verdict.value == "verified"
