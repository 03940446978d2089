#!/usr/bin/env python3
"""Put one deliberate fault at a time into a copy of the last commit, and see who notices: kit or unit tests.

    python scripts/mutation_check.py [--only TEXT] [--slice 0:12] [--jobs 2] [--json FILE]

The faults are in faults.toml. Exit code 1 when one goes unnoticed, or when the copy fails without any.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import tomllib

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300
KIT = "import sys; from mla_core.cli import main; sys.argv[0] = 'mla'; sys.exit(main())"


@dataclass(frozen=True)
class Fault:
    """One textual change, and the unit tests that should notice it."""

    name: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]

    def plant(self, tree: Path) -> None:
        path = tree / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.find) != 1:
            raise SystemExit(
                f"{self.name!r}: {self.find!r} occurs {text.count(self.find)} times in {self.file}"
            )
        path.write_text(text.replace(self.find, self.replace), encoding="utf-8")


@dataclass(frozen=True)
class Noticed:
    """Who noticed a fault: cells of the kit, and unit tests."""

    fault: str
    cells: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def line(self) -> str:
        kit = f"{len(self.cells):3} cells, first {self.cells[0]}" if self.cells else "  - cells"
        unit = self.tests[0] if self.tests else "-"
        outcome = "caught" if self.cells or self.tests else "MISSED"
        return f"{outcome} {self.fault}\n       kit:  {kit}\n       unit: {unit}"


def faults() -> list[Fault]:
    """All faults of the table."""
    table = tomllib.loads((ROOT / "scripts/faults.toml").read_text(encoding="utf-8"))["fault"]
    return [Fault(**{**row, "tests": tuple(row["tests"])}) for row in table]


def check(fault: Fault | None, tests: tuple[str, ...]) -> Noticed:
    """Run the kit and these tests on a copy of the tree with a fault, or without one."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(tree)], check=True)
        if fault is not None:
            fault.plant(tree)
        return Noticed("none" if fault is None else fault.name, kit(tree), unit(tree, tests))


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(tree), str(tree / "plugins/vanilla/src")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )


def kit(tree: Path) -> tuple[str, ...]:
    """Problems that the conformance kit reports."""
    done = run(tree, "-c", KIT, "conformance", "vanilla", "--quick", "--timeout", "30", "--json")
    if not done.stdout.startswith("{"):
        return (f"the kit did not run: {done.stderr.strip().splitlines()[-1:]}",)
    return tuple(problem.partition("\n")[0][:150] for problem in json.loads(done.stdout)["problems"])


def unit(tree: Path, tests: tuple[str, ...]) -> tuple[str, ...]:
    """Names of failing unit tests; stops at the third."""
    there = [test for test in tests if (tree / test).exists()]
    done = run(tree, "-m", "pytest", "-q", "--maxfail=3", "-p", "no:cacheprovider", *there)
    if done.returncode not in (0, 1):
        return (f"pytest ended with {done.returncode}",)
    return tuple(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, flags=re.MULTILINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="faults whose name contains this text")
    parser.add_argument("--slice", default=":", help="faults by number, as 0:12")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    asked = parser.parse_args()
    start, _, end = asked.slice.partition(":")
    chosen = [f for f in faults() if asked.only in f.name][int(start or 0) : int(end) if end else None]
    if not chosen:
        raise SystemExit("no fault has that name or number")
    clean = check(None, tuple(sorted({test for fault in chosen for test in fault.tests})))
    if clean.cells or clean.tests:
        raise SystemExit(f"fails without any fault:\n{clean.line}")
    with ThreadPoolExecutor(asked.jobs) as pool:
        results = []
        for result in pool.map(lambda fault: check(fault, fault.tests), chosen):
            results.append(result)
            print(result.line, flush=True)
    missed = [result.fault for result in results if not (result.cells or result.tests)]
    print(f"{len(results) - len(missed)} of {len(results)} faults caught; missed: {missed or 'none'}")
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
