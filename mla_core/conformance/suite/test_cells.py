"""One test a cell: declared and undeclared values, limits, mixes, and every check with its controls."""

from __future__ import annotations

import pytest

from mla_core.conformance.cells import Cell
from mla_core.conformance.gaps import complaints
from mla_core.conformance.session import Session, today
from mla_core.conformance.verdicts import Verdict

__all__ = [
    "test_any_order_of_requests_equals_solo_runs",
    "test_cache_writes_touch_their_slots_only",
    "test_every_layout_and_dtype_works_together",
    "test_every_value_is_as_declared",
    "test_graphs_replay",
    "test_known_gaps_are_gaps",
    "test_limits_hold_on_both_sides",
    "test_lse",
    "test_mixes_of_values_are_as_declared",
    "test_nothing_to_do",
    "test_numerics",
    "test_pages",
    "test_sparse_selection",
    "test_stages_happen_exactly_once",
    "test_strided_inputs",
    "test_verification_sees_no_future",
    "test_weights_leave_nothing_stale",
]


def check(session: Session, cell: Cell) -> None:
    """Try a cell; skip what cannot be verified here, fail on a failing verdict that is no known gap."""
    result = session.judge(cell)
    message = f"{result.verdict.value}: {cell.id}: {result.detail or cell.layer}"
    if cell.group == "control" and result.noticed is False:
        seen = result.detail or "the check passed"
        pytest.fail(f"{cell.id}: the check does not notice this deliberate fault: {seen}", pytrace=False)
    if result.verdict == Verdict.UNVERIFIED:
        if session.options.require_verified:
            pytest.fail(message, pytrace=False)
        pytest.skip(message)
    gap = session.gaps.get(cell.id)
    if result.fails and gap is not None:
        pytest.skip(f"known gap: {gap.reason} ({gap.link}), until {gap.expires}; {message}")
    if result.fails:
        pytest.fail(message, pytrace=False)


@pytest.mark.mla_cells("value")
def test_every_value_is_as_declared(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("limit")
def test_limits_hold_on_both_sides(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("grid")
def test_every_layout_and_dtype_works_together(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("mix")
def test_mixes_of_values_are_as_declared(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("numerics")
def test_numerics(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("lse")
def test_lse(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("pages")
def test_pages(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("verification")
def test_verification_sees_no_future(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("batch")
def test_any_order_of_requests_equals_solo_runs(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("empties")
def test_nothing_to_do(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("strided")
def test_strided_inputs(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("graphs")
def test_graphs_replay(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("sparse")
def test_sparse_selection(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("cache")
def test_cache_writes_touch_their_slots_only(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("stages")
def test_stages_happen_exactly_once(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


@pytest.mark.mla_cells("weights")
def test_weights_leave_nothing_stale(mla_session: Session, cell: Cell) -> None:
    check(mla_session, cell)


def test_known_gaps_are_gaps(mla_session: Session) -> None:
    known = [cell for cell in mla_session.cells if cell.id in mla_session.gaps]
    verdicts = {cell.id: mla_session.judge(cell).verdict for cell in known}
    every = [cell.id for cell in mla_session.cells]
    found = complaints(mla_session.gaps.values(), verdicts, every, today())
    assert found == [], "\n".join(found)
