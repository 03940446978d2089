"""The command line as a whole: help, errors, exit codes, and which commands load torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from mla_core.cli.app import app
from mla_core.errors import ConfigError

COMMANDS = ("run", "list", "show", "explain", "inspect", "doctor")
# Reports on stderr, so that the command's own output stays what a user sees.
REPORTING = """
import atexit, sys
atexit.register(lambda: print("torch" in sys.modules, "rich" in sys.modules, file=sys.stderr))
from mla_core.cli import main
main()
"""


def mla(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def loaded(*arguments: str) -> str:
    """Whether a command in a process of its own imported torch and rich."""
    command = [sys.executable, "-c", REPORTING, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    return done.stderr.splitlines()[-1]


def test_help_names_every_command():
    listed = mla("--help").stdout
    assert [name for name in COMMANDS if f"\n  {name} " not in listed] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples_and_json(command):
    shown = mla(command, "--help")
    assert shown.exit_code == 0
    assert f"Examples:\n    mla {command}" in shown.stdout
    assert "--json" in shown.stdout
    assert "--debug" in shown.stdout


@pytest.mark.parametrize(
    "arguments", [["list"], ["show", "vanilla"], ["explain", "deepseek-v3"]], ids=COMMANDS[1:4]
)
def test_commands_that_plan_load_neither_torch_nor_rich(arguments):
    assert loaded(*arguments) == "False False"


def test_the_report_of_loaded_modules_notices_torch():
    assert loaded("doctor").startswith("True")


def test_an_error_is_a_message_on_stderr_with_exit_code_2():
    shown = mla("explain", "--model", "deepsek-v3")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith("error: unknown preset 'deepsek-v3'; did you mean 'deepseek-v3'?")


def test_an_error_shows_no_traceback():
    assert "Traceback" not in mla("explain", "--model", "nothing").stderr


def test_debug_lets_the_error_through():
    assert isinstance(mla("explain", "--model", "nothing", "--debug").exception, ConfigError)


def test_an_unknown_option_is_a_usage_error():
    shown = mla("list", "--jsn")
    assert shown.exit_code == 2
    assert "--jsn" in shown.stderr


def test_the_installed_program_exits_with_the_commands_code():
    program = "import sys; sys.argv[0] = 'mla'; from mla_core.cli import main; main()"
    command = [sys.executable, "-c", program, "show", "nothing"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown plugin 'nothing'; installed: ")


def test_json_output_is_one_document():
    assert json.loads(mla("list", "--json").stdout).keys() == {"backends", "sparse"}
