"""Columns, and a progress bar that only slow work on a terminal shows."""

from __future__ import annotations

import io
import sys

import pytest
import typer

from mla_core.cli import console
from mla_core.cli.console import columns, progress_bar, reporting
from mla_core.errors import ConfigError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown_by(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch, patience: float) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(console, "_PATIENCE_SECONDS", patience)
    with progress_bar("reading weights", 2) as advance:
        advance(1)
    return stream.getvalue()


def test_columns_are_as_wide_as_their_widest_cell():
    assert columns([("a", 1), ("long", 22)], right=(1,)) == ["  a      1", "  long  22"]


def test_columns_end_where_their_text_ends():
    assert columns([("a", ""), ("b", "c")]) == ["  a", "  b  c"]


def test_slow_work_on_a_terminal_shows_a_bar(monkeypatch):
    assert "reading weights" in shown_by(Terminal(), monkeypatch, patience=-1)


def test_quick_work_shows_no_bar(monkeypatch):
    assert "reading weights" not in shown_by(Terminal(), monkeypatch, patience=60)


def test_nothing_is_shown_where_nobody_watches(monkeypatch):
    assert shown_by(io.StringIO(), monkeypatch, patience=-1) == ""


def test_our_errors_become_exit_code_2(capsys):
    with pytest.raises(typer.Exit) as caught, reporting(debug=False):
        raise ConfigError("no such thing")
    assert caught.value.exit_code == 2
    assert "no such thing" in capsys.readouterr().err


def test_errors_that_are_not_ours_are_not_hidden():
    with pytest.raises(ZeroDivisionError), reporting(debug=False):
        raise ZeroDivisionError
