"""`mla matrix`: what the installed backends declare, with the evidence of conformance runs."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import typer

from mla_core.cli.console import columns, print_json
from mla_core.conformance.matrix import Matrix, evidence_line, matrix_of
from mla_core.conformance.matrix_html import html
from mla_core.conformance.matrix_text import LEGEND, markdown, terminal_rows
from mla_core.conformance.report import Report, read_report
from mla_core.errors import ConfigError
from mla_core.registry import Registry

__all__ = ["EVIDENCE", "Format", "check", "read_evidence", "rendered", "show"]

Format = Literal["text", "md", "json", "html"]
# Where a repository keeps the reports that its page is made from.
EVIDENCE = Path("docs/evidence")
_BY_SUFFIX: dict[str, Format] = {".md": "md", ".html": "html", ".json": "json", ".txt": "text"}


def read_evidence(folder: Path) -> list[Report]:
    """All reports of a folder. Raises ConfigError for one that cannot be read, or without the folder."""
    if not folder.is_dir():
        if folder == EVIDENCE:
            return []
        raise ConfigError(f"no folder {folder}; write reports into one with mla conformance --report")
    return [read_report(path) for path in sorted(folder.glob("*.json"))]


def matrix(registry: Registry, names: Sequence[str], reports: Sequence[Report]) -> Matrix:
    """The matrix of the named backends, of all usable ones when none is named."""
    if names:
        infos = [registry.info(name) for name in names]
    else:
        infos = [entry.info for entry in registry.entries() if entry.info is not None]
    return matrix_of(infos, reports)


def rendered(found: Matrix, style: Format, command: str) -> str:
    """The matrix in one of its forms."""
    if style == "md":
        return markdown(found, command)
    if style == "html":
        return html(found)
    if style == "json":
        return found.model_dump_json(indent=1) + "\n"
    runs = [f"  {evidence_line(run)}" for run in found.runs]
    return "\n".join([*columns(terminal_rows(found), indent=""), "", LEGEND, *runs]) + "\n"


def show(found: Matrix, style: Format | None, target: Path | None, command: str) -> None:
    """Print it, or write it to a file whose name says the form."""
    if target is None:
        if style == "json":
            print_json(found.model_dump(mode="json"))
        else:
            typer.echo(rendered(found, style or "text", command), nl=False)
        return
    target.write_text(rendered(found, style or _style_of(target), command), encoding="utf-8")
    typer.echo(f"wrote {target}")


def check(found: Matrix, target: Path, command: str) -> list[str]:
    """Differences between a written matrix and what it would be now; empty when it is not stale."""
    now = rendered(found, _style_of(target), command)
    written = target.read_text(encoding="utf-8") if target.is_file() else ""
    changes = difflib.unified_diff(
        written.splitlines(), now.splitlines(), str(target), "now", n=0, lineterm=""
    )
    return list(changes)


def command_line(names: Sequence[str], evidence: Path, target: Path | None) -> str:
    """The command that writes a page again."""
    words = ["mla", "matrix", *names]
    words += [] if evidence == EVIDENCE else ["--evidence", evidence.as_posix()]
    return shlex.join([*words, *([] if target is None else ["--write", target.as_posix()])])


def _style_of(target: Path) -> Format:
    if target.suffix not in _BY_SUFFIX:
        raise ConfigError(f"cannot tell the form of {target.name}; use {', '.join(_BY_SUFFIX)} or --format")
    return _BY_SUFFIX[target.suffix]
