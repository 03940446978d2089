"""`mla new`: what it writes, and that it installs and passes the kit away from this repository as it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mla_core.cli.new import create
from mla_core.errors import ConfigError
from tests.unit.fakes import backend, registry

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/third_party.sh"


@pytest.fixture(scope="module")
def transcript(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the script that makes two plugins, installs their wheels away from here, and runs the kit."""
    folder = tmp_path_factory.mktemp("third_party")
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        [str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def part(transcript: str, command: str) -> str:
    """What one command of the script printed."""
    (found,) = [text for text in transcript.split("\n$ ") if command in text.partition("\n")[0]]
    return found


def test_both_packages_come_from_their_wheels(transcript):
    assert "fresh/lib" in transcript.partition("a fresh environment\n")[2].partition("\n")[0]


def test_two_outside_plugins_are_listed_side_by_side(transcript):
    states = [line.split()[:2] for line in part(transcript, "mla list").splitlines() if "outside_" in line]
    assert states == [["outside_one", "ok"], ["outside_two", "ok"]]


def test_an_outside_plugin_is_selected(transcript):
    assert "  mqa     outside_one\n" in part(transcript, "mla explain")


@pytest.mark.parametrize("command", ["conformance outside_one", "conformance outside_two", "-m pytest"])
def test_the_generated_package_passes_the_kit_as_it_is(transcript, command):
    said = part(transcript, command)
    assert "verified" in said
    assert "honest refusal" in said
    assert not any(verdict in said for verdict in ("over-claim", "under-claim", "silent", "dirty", "FAILED"))


def test_the_friendly_run_ends_with_the_row_of_the_matrix(transcript):
    row = "outside_one  cpu     mqa_decode  bf16    ✓        –        ✓"
    assert row in part(transcript, "conformance outside_one")


def test_a_package_is_named_after_the_backend(tmp_path):
    files = {path.relative_to(tmp_path).as_posix() for path in create("very_fast", tmp_path, registry())}
    assert files == {
        "mla-very-fast/.github/workflows/test.yml",
        "mla-very-fast/.gitignore",
        "mla-very-fast/README.md",
        "mla-very-fast/pyproject.toml",
        "mla-very-fast/src/mla_very_fast/__init__.py",
        "mla-very-fast/src/mla_very_fast/backend.py",
        "mla-very-fast/src/mla_very_fast/manifest.py",
        "mla-very-fast/tests/test_conformance.py",
    }


def test_nothing_is_left_to_fill_in(tmp_path):
    left = ("{name}", "{package}", "{distribution}", "{class_name}")
    texts = [path.read_text() for path in create("very_fast", tmp_path, registry())]
    assert [word for word in left for text in texts if word in text] == []


@pytest.mark.parametrize("name", ["Fast", "2fast", "fast-er", "fast__er", "_fast", "auto", "core", ""])
def test_a_name_that_cannot_be_used_is_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot name a backend"):
        create(name, tmp_path, registry())


def test_a_name_that_is_installed_already_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is installed already"):
        create("taken", tmp_path, registry(backend("taken")))


def test_a_folder_that_holds_something_is_not_touched(tmp_path):
    (tmp_path / "mla-mine").mkdir()
    (tmp_path / "mla-mine/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        create("mine", tmp_path, registry())
    assert [path.name for path in (tmp_path / "mla-mine").iterdir()] == ["notes.txt"]


def test_mla_conformance_fails_and_names_the_claim_that_is_not_true(environ):
    code = "import sys; from mla_core.cli import main; sys.argv[0] = 'mla'; sys.exit(main())"
    command = [sys.executable, "-c", code, "conformance", "over_claimer", "--quick"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "FAILED over-claim: mqa_decode/heads=8: out is wrong" in done.stdout
