"""`mla conformance`: the suite with a progress bar, its verdicts, and the backend's row of the matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from mla_core.cli.console import columns, progress_bar
from mla_core.conformance.gaps import complaints
from mla_core.conformance.matrix import matrix_of
from mla_core.conformance.matrix_text import LEGEND, terminal_rows
from mla_core.conformance.report import Report
from mla_core.conformance.session import Options, Session, manifest_facts, today
from mla_core.conformance.verdicts import Verdict

__all__ = ["Result", "run"]


@dataclass(frozen=True)
class Result:
    """A finished run: its report, and everything that makes it fail."""

    report: Report
    problems: tuple[str, ...]

    def lines(self) -> list[str]:
        """Problems, counts by verdict, and the matrix row."""
        about = self.report.evidence
        counts = [(count, verdict) for verdict, count in self.report.counts().items() if count]
        controls = [cell for cell in self.report.cells if cell.noticed is not None]
        noticed = sum(cell.noticed is True for cell in controls)
        head = f"{about.backend} on {about.device} ({about.device_name})"
        counted = columns([*counts, (noticed, f"of {len(controls)} deliberate faults noticed")], right=(0,))
        return [*(f"FAILED {problem}" for problem in self.problems), head, *counted]

    def matrix_lines(self, session: Session) -> list[str]:
        found = matrix_of([session.info], [self.report])
        return [*columns(terminal_rows(found), indent=""), "", LEGEND]


def run(options: Options, report_file: Path | None) -> tuple[Result, list[str]]:
    """Try every cell, write the report when asked, and give the result with the matrix row."""
    session = Session(options)
    try:
        with progress_bar(f"testing {options.backend}", len(session.cells)) as advance:
            for cell in session.cells:
                session.judge(cell)
                advance(1)
        report = Report(evidence=session.evidence, cells=tuple(session.results.values()))
        result = Result(report, tuple(_problems(session)))
        if report_file is not None:
            report_file.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
            typer.echo(f"wrote {report_file}", err=True)
        return result, result.matrix_lines(session)
    finally:
        session.close()


def _problems(session: Session) -> list[str]:
    """What makes the run fail: the manifest, cells, blind checks, known gaps."""
    found = []
    loaded = manifest_facts(session.info.name)["loaded"]
    if loaded:
        found.append(f"over-claim: importing the manifest loads {loaded}")
    for cell in session.results.values():
        if cell.noticed is False:
            found.append(f"{cell.id}: the check does not notice this deliberate fault")
        elif cell.fails and cell.id not in session.gaps:
            found.append(f"{cell.verdict.value}: {cell.id}: {cell.detail}")
        elif cell.verdict == Verdict.UNVERIFIED and session.options.require_verified:
            found.append(f"unverified: {cell.id}: {cell.detail}")
    verdicts = {name: cell.verdict for name, cell in session.results.items()}
    known = [cell.id for cell in session.cells]
    return found + complaints(session.gaps.values(), verdicts, known, today())
