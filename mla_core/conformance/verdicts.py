"""What trying one cell can show about a backend's declaration: the outcomes, and the verdicts on them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["FAILURES", "Claim", "Outcome", "Verdict", "judge"]

Claim = Literal["declared", "undeclared", "declined"]
Kind = Literal["right", "wrong", "refused", "raised", "died", "hung", "unavailable"]


class Verdict(str, Enum):
    """What a cell's outcome says about the declaration."""

    VERIFIED = "verified"
    OVER_CLAIM = "over-claim"
    UNVERIFIED = "unverified"
    HONEST_REFUSAL = "honest refusal"
    UNDER_CLAIM = "under-claim"
    SILENT_ACCEPTANCE = "silent acceptance"
    DIRTY_REFUSAL = "dirty refusal"
    DECLINED = "declined"


FAILURES = frozenset(
    {Verdict.OVER_CLAIM, Verdict.UNDER_CLAIM, Verdict.SILENT_ACCEPTANCE, Verdict.DIRTY_REFUSAL}
)


class Outcome(BaseModel):
    """What happened when a cell was tried.

    right and wrong: an answer came, judged by the oracle. refused: UnsupportedError, with the fields it
    named; `touched` when outputs or cache were written before. raised: any other exception. died and hung:
    the process ended or had to be ended. unavailable: the cell cannot be tried here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Kind
    detail: str = ""
    fields: tuple[str, ...] = ()
    touched: bool = False
    # Worst error over its tolerance, of an answer that was compared with the oracle.
    error: float | None = None
    seconds: float = 0.0


def judge(claim: Claim, outcome: Outcome, refused_fields: Iterable[str] = ()) -> Verdict:
    """The verdict on one cell; `refused_fields` are those that a refusal should name, any one of them."""
    if outcome.kind == "unavailable":
        return Verdict.UNVERIFIED
    if claim == "declared":
        return Verdict.VERIFIED if outcome.kind == "right" else Verdict.OVER_CLAIM
    if outcome.kind == "wrong":
        return Verdict.SILENT_ACCEPTANCE
    if outcome.kind == "right":
        return Verdict.DECLINED if claim == "declined" else Verdict.UNDER_CLAIM
    named = not set(outcome.fields).isdisjoint(refused_fields)
    if outcome.kind != "refused" or outcome.touched or not named:
        return Verdict.DIRTY_REFUSAL
    return Verdict.DECLINED if claim == "declined" else Verdict.HONEST_REFUSAL
