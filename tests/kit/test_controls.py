"""Every numeric check notices every deliberate fault it is responsible for."""

from __future__ import annotations

import pytest

from mla_core.conformance.catalogue import CHECKS, CONTROLS
from mla_core.conformance.report import judged

NUMERIC_SUITES = {
    "numerics",
    "lse",
    "pages",
    "verification",
    "batch",
    "empties",
    "strided",
    "stages",
    "sparse",
}


@pytest.mark.parametrize("suite", sorted(NUMERIC_SUITES))
def test_every_numeric_suite_has_a_check_with_a_control(suite):
    assert any(check.controls for check in CHECKS.values() if check.suite == suite)


@pytest.mark.parametrize("control", sorted(CONTROLS))
def test_every_control_is_used_by_a_check(control):
    assert any(control in check.controls for check in CHECKS.values())


def test_no_check_names_a_control_that_does_not_exist():
    named = {control for check in CHECKS.values() for control in check.controls}
    assert named <= CONTROLS.keys()


@pytest.mark.parametrize("control", sorted(CONTROLS))
def test_a_deliberate_fault_is_noticed_by_every_check_that_is_responsible_for_it(trial, control):
    owner = trial("owner")
    cells = [cell for cell in owner.cells.values() if cell.control == control]
    noticed = {cell.id: owner.judge(cell.id).noticed for cell in cells}
    assert noticed, "no cell has this control"
    assert set(noticed.values()) == {True}, [name for name, seen in noticed.items() if not seen]


def test_without_a_fault_the_same_checks_pass(trial):
    owner = trial("owner")
    checks = {cell.id.partition("!")[0] for cell in owner.cells.values() if cell.control is not None}
    assert {owner.judge(name).verdict.value for name in checks} == {"verified"}


def test_a_check_that_cannot_see_a_fault_fails_the_run(trial):
    """Nothing in a call without requests depends on the scale."""
    owner = trial("owner")
    blind = owner.cells["mqa_decode/empties.no_requests"]
    control = blind.model_copy(update={"id": "blind", "group": "control", "control": "scale"})
    assert judged(control, owner.probe.try_cell("owner", control)).fails
