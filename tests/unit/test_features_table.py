"""The table of features: every number once, a state for each, tests for all that is claimed."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from tests.unit import house_rules as rules

STATES = {"works", "different", "planned"}


class Row(NamedTuple):
    number: int
    state: str
    tests: list[str]


def rows_of(document: str) -> list[Row]:
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in document.splitlines()]
    return [
        Row(int(cell[0]), cell[2], [match[0] for match in rules.TEST_REFERENCE.findall(cell[4])])
        for cell in cells
        if len(cell) == 5 and cell[0].isdigit()
    ]


def unfounded(rows: list[Row]) -> list[int]:
    """Numbers of rows whose tests do not fit their state."""
    return [
        row.number for row in rows if row.state not in STATES or (row.state == "planned") != (row.tests == [])
    ]


TABLE = rows_of((rules.ROOT / "docs/features.md").read_text(encoding="utf-8"))


def test_every_feature_has_one_row_in_order():
    assert [row.number for row in TABLE] == list(range(1, 96))


def test_what_is_claimed_names_a_test_and_what_is_planned_names_none():
    assert unfounded(TABLE) == []


@pytest.mark.parametrize(
    ("state", "shown", "fits"),
    [
        ("works", "`tests/unit/test_x.py::test_y`", True),
        ("planned", "", True),
        ("works", "", False),
        ("different", "", False),
        ("planned", "`tests/unit/test_x.py::test_y`", False),
        ("perhaps", "`tests/unit/test_x.py::test_y`", False),
    ],
)
def test_a_row_that_claims_without_a_test_is_found(state, shown, fits):
    assert (unfounded(rows_of(f"| 7 | Epsilon | {state} | config | {shown} |")) == []) is fits
