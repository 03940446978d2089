"""The README's tables are those of the newest run on a GPU, failures included."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[1]
NEWEST = max((PLUGIN / "evidence").glob("*.json"), key=lambda path: path.stem[-10:])
GROUPS = ("mqa fa3", "mqa fa2", "mha fa3", "mha fa2", "layer")
ERROR = re.compile(r"\b(row|lse|oracle) (\d\.\de[-+]\d\d)")


@pytest.fixture
def found() -> dict:
    return json.loads(NEWEST.read_text(encoding="utf-8"))


def results_table(records: list[dict[str, str]]) -> str:
    """One line a group of checks: how many passed, and the worst errors among those."""
    lines = ["| checks | passed | failed | worst row | worst lse |", "|---|---|---|---|---|"]
    for group in GROUPS:
        mine = [record for record in records if record["what"].startswith(group)]
        passed = [record for record in mine if record["kind"] == "PASS"]
        errors = [pair for record in passed for pair in ERROR.findall(record["result"])]
        rows = [float(size) for kind, size in errors if kind != "lse"]
        lse = [float(size) for kind, size in errors if kind == "lse"]
        worst = (f"{max(rows, default=0):.1e}", f"{max(lse):.1e}" if lse else "–")
        cells = (group, str(len(passed)), str(len(mine) - len(passed)), *worst)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def failures(records: list[dict[str, str]]) -> list[str]:
    return [r["what"] for r in records if r["kind"] in ("FAIL", "GAP") and r["what"] != "all"]


def test_the_readme_shows_the_results_of_the_newest_run(found):
    assert results_table(found["records"]) in (PLUGIN / "README.md").read_text(encoding="utf-8")


def test_the_readme_names_the_run_and_every_failure_in_it(found):
    readme = (PLUGIN / "README.md").read_text(encoding="utf-8")
    missing = [
        what for what in (NEWEST.name, found["date"], *failures(found["records"])) if what not in readme
    ]
    assert missing == []


def test_every_record_says_what_was_checked(found):
    assert [record for record in found["records"] if not all(record.values())] == []
