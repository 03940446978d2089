"""What every command shares: errors as messages, JSON, aligned columns, and a progress bar on slow work."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from mla_core.errors import MLAError

__all__ = ["FAILED", "USAGE", "columns", "print_json", "progress_bar", "quiet", "reporting"]

# Exit codes: something was checked and is wrong; what was asked cannot be done.
FAILED, USAGE = 1, 2
# Work that is quicker shows no bar.
_PATIENCE_SECONDS = 2.0

Advance = Callable[[int], None]


@contextmanager
def reporting(debug: bool) -> Iterator[None]:
    """Print our own errors as a message, without traceback unless asked for, and exit with code 2."""
    try:
        yield
    except MLAError as error:
        if debug:
            raise
        typer.echo(f"{typer.style('error:', fg='red', bold=True)} {error}", err=True)
        raise typer.Exit(USAGE) from error


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def columns(rows: Iterable[Sequence[object]], right: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Lines of aligned cells; the columns numbered in `right` are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return (indent + "  ".join(padded)).rstrip()

    return [line(row) for row in cells]


@contextmanager
def quiet(description: str, total: int) -> Iterator[Advance]:
    """Progress that nobody sees."""
    yield lambda _: None


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Advance]:
    """A bar on standard error while work takes over two seconds; nothing when that is not a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    # Only here: no other command needs rich, and most of them should start at once.
    from rich.console import Console, RenderableType
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    started = time.monotonic()

    class Patient(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            if time.monotonic() - started > _PATIENCE_SECONDS:
                yield from super().get_renderables()

    shown = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Patient(*shown, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount: bar.advance(task, amount)
