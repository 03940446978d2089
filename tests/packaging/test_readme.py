"""What the README shows works as it is written there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
COMMANDS = [
    line for language, text in BLOCKS if not language for line in text.splitlines() if line.startswith("mla ")
]
# Shown at length by tests of their own.
ELSEWHERE = ("mla conformance", "mla matrix", "mla new")


def test_the_readme_has_examples() -> None:
    assert len(PYTHON) == 2
    assert len([command for command in COMMANDS if not command.startswith(ELSEWHERE)]) >= 4


@pytest.mark.parametrize("code", PYTHON, ids=["use", "manifest"])
def test_an_example_in_python_runs(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize("command", [c for c in COMMANDS if not c.startswith(ELSEWHERE)])
def test_a_command_runs(command: str) -> None:
    mla = Path(sys.executable).with_name("mla")
    done = subprocess.run(
        [mla, *shlex.split(command)[1:]], check=False, capture_output=True, text=True, timeout=180, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
