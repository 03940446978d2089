"""The table of verdicts, row by row."""

from __future__ import annotations

from datetime import date

import pytest

from mla_core.conformance.gaps import Gap, complaints, read_gaps
from mla_core.conformance.verdicts import FAILURES, Outcome, Verdict, judge
from mla_core.errors import ConfigError

RIGHT, WRONG = Outcome(kind="right"), Outcome(kind="wrong")
NAMED = Outcome(kind="refused", fields=("dtype", "heads"))
VAGUE = Outcome(kind="refused", fields=("latent",))
LATE = Outcome(kind="refused", fields=("dtype",), touched=True)
RAISED, DIED, HUNG = (Outcome(kind=kind) for kind in ("raised", "died", "hung"))
ABSENT = Outcome(kind="unavailable")


@pytest.mark.parametrize(
    ("claim", "outcome", "verdict"),
    [
        ("declared", RIGHT, "verified"),
        ("declared", WRONG, "over-claim"),
        ("declared", NAMED, "over-claim"),
        ("declared", RAISED, "over-claim"),
        ("declared", DIED, "over-claim"),
        ("declared", HUNG, "over-claim"),
        ("declared", ABSENT, "unverified"),
        ("undeclared", NAMED, "honest refusal"),
        ("undeclared", VAGUE, "dirty refusal"),
        ("undeclared", LATE, "dirty refusal"),
        ("undeclared", RIGHT, "under-claim"),
        ("undeclared", WRONG, "silent acceptance"),
        ("undeclared", RAISED, "dirty refusal"),
        ("undeclared", DIED, "dirty refusal"),
        ("undeclared", HUNG, "dirty refusal"),
        ("undeclared", ABSENT, "unverified"),
        ("declined", RIGHT, "declined"),
        ("declined", NAMED, "declined"),
        ("declined", WRONG, "silent acceptance"),
        ("declined", RAISED, "dirty refusal"),
    ],
)
def test_a_claim_and_an_outcome_give_a_verdict(claim, outcome, verdict):
    assert judge(claim, outcome, ["dtype"]).value == verdict


def test_four_verdicts_fail_a_run():
    assert {verdict.value for verdict in FAILURES} == {
        "over-claim",
        "under-claim",
        "silent acceptance",
        "dirty refusal",
    }


def gap(**changes: object) -> Gap:
    made = {"cell": "a/b=1", "reason": "r", "link": "l", "expires": date(2030, 1, 1)}
    return Gap.model_validate({**made, **changes})


@pytest.mark.parametrize(
    ("verdict", "complained"),
    [
        (Verdict.OVER_CLAIM, False),
        (Verdict.UNVERIFIED, False),
        (Verdict.VERIFIED, True),
        (Verdict.HONEST_REFUSAL, True),
    ],
)
def test_a_gap_must_be_a_gap(verdict, complained):
    found = complaints([gap()], {"a/b=1": verdict}, ["a/b=1"], date(2029, 1, 1))
    assert bool(found) is complained


def test_a_gap_may_last_until_its_day():
    assert complaints([gap()], {}, ["a/b=1"], date(2030, 1, 1)) == []


def test_a_gap_expires_after_its_day():
    assert "expired on 2030-01-01" in complaints([gap()], {}, ["a/b=1"], date(2030, 1, 2))[0]


def test_no_file_means_no_gaps(tmp_path):
    assert read_gaps(tmp_path / "known_gaps.toml") == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[gap", "is not TOML"),
        ('[[gap]]\ncell = "x"\nreason = "r"\nlink = "l"\n', "gap.0.expires: Field required"),
        ('[[gaps]]\ncell = "x"\n', "gaps: Extra inputs are not permitted"),
    ],
)
def test_a_gap_file_with_a_mistake_is_refused(tmp_path, text, said):
    path = tmp_path / "known_gaps.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_gaps(path)


def test_a_cell_cannot_be_a_gap_twice(tmp_path):
    path = tmp_path / "known_gaps.toml"
    path.write_text('[[gap]]\ncell = "x"\nreason = "r"\nlink = "l"\nexpires = 2030-01-01\n' * 2)
    with pytest.raises(ConfigError, match="names x more than once"):
        read_gaps(path)
