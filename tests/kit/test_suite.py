"""The suite as a plugin's author runs it: one command, or one line in a test file."""

from __future__ import annotations

import json
import textwrap

import pytest

SUITE = ("--pyargs", "mla_core.conformance.suite", "--mla-quick", "-q")
# A few cells are enough to see what the command does with a verdict.
VALUES = (*SUITE, "-k", "mqa_decode and heads")
USAGE_ERROR = 4


def test_no_backend_is_a_usage_error(run_suite, tmp_path):
    done = run_suite(tmp_path, *SUITE)
    assert done.returncode == USAGE_ERROR
    assert "--mla-backend NAME" in done.stderr


def test_no_backend_is_a_usage_error_for_an_imported_suite_too(run_suite, tmp_path):
    (tmp_path / "test_mine.py").write_text("from mla_core.conformance.suite import *\n")
    done = run_suite(tmp_path, "-q")
    assert done.returncode == USAGE_ERROR
    assert "--mla-backend NAME" in done.stdout + done.stderr


def test_an_unknown_backend_is_a_usage_error_that_names_the_installed_ones(run_suite, tmp_path):
    done = run_suite(tmp_path, *SUITE, "--mla-backend", "honset")
    assert done.returncode == USAGE_ERROR
    assert "did you mean 'honest'?" in done.stdout + done.stderr


def test_a_device_that_is_not_here_is_a_usage_error(run_suite, tmp_path):
    done = run_suite(tmp_path, *SUITE, "--mla-backend", "honest", "--mla-device", "cuda:sm_75")
    assert done.returncode == USAGE_ERROR
    assert "this machine has" in done.stdout + done.stderr


@pytest.fixture(scope="module")
def honest_run(run_suite, tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest")
    (folder / "pytest.ini").write_text("[pytest]\nmla_backend = honest\n")
    (folder / "test_mine.py").write_text("from mla_core.conformance.suite import *\n")
    return run_suite(folder, "-q", "--mla-report", "evidence.json"), folder


def test_one_line_and_one_ini_line_run_the_whole_suite(honest_run):
    done, _ = honest_run
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_run_prints_the_number_of_cells_by_verdict(honest_run):
    done, folder = honest_run
    counts = json.loads((folder / "evidence.json").read_text())["cells"]
    verified = sum(cell["verdict"] == "verified" and cell["noticed"] is None for cell in counts)
    assert verified > 40
    assert f"{verified:6} verified" in done.stdout


def test_the_report_says_on_what_and_with_what_it_was_made(honest_run):
    evidence = json.loads((honest_run[1] / "evidence.json").read_text())["evidence"]
    assert (evidence["backend"], evidence["device"], evidence["distribution"]) == (
        "honest",
        "cpu",
        "mla-liars",
    )
    assert {"python", "torch", "mla-core"} <= evidence["versions"].keys()


def test_the_report_has_every_cell_of_the_declaration(honest_run, trial):
    cells = json.loads((honest_run[1] / "evidence.json").read_text())["cells"]
    honest = trial("honest")
    full = type(honest)(honest.info, honest.probe, quick=False)
    ids = {cell["id"] for cell in cells}
    # The run also tried the layouts that only the core of the child process knows.
    assert full.cells.keys() <= ids


def test_a_liar_fails_the_run_with_verdict_and_cell(run_suite, tmp_path):
    done = run_suite(tmp_path, *VALUES, "--mla-backend", "over_claimer")
    assert done.returncode == 1
    assert "over-claim: mqa_decode/heads=8: out is wrong" in done.stdout


def test_a_manifest_that_imports_torch_fails_the_run(run_suite, tmp_path):
    done = run_suite(tmp_path, *SUITE, "-k", "loads_no_torch", "--mla-backend", "heavy")
    assert done.returncode == 1
    assert "over-claim: a manifest is read without kernels, but importing it loads ['torch']" in done.stdout


def test_an_unverified_cell_is_skipped_with_its_reason(run_suite, tmp_path):
    done = run_suite(tmp_path, *VALUES, "--mla-backend", "needy", "-rs")
    assert done.returncode == 0, done.stdout[-2000:]
    assert "offered not installed" in done.stdout


def test_an_unverified_cell_fails_when_verification_is_required(run_suite, tmp_path):
    done = run_suite(tmp_path, *VALUES, "--mla-backend", "needy", "--mla-require-verified")
    assert done.returncode == 1


GAP = """
[[gap]]
cell = "{cell}"
reason = "tiles hold seven heads"
link = "https://example.org/issues/7"
expires = {expires}
"""


@pytest.mark.parametrize(
    ("backend", "cell", "expires", "code", "said"),
    [
        ("over_claimer", "mqa_decode/heads=8", "2999-01-01", 0, "known gap: tiles hold seven heads"),
        ("over_claimer", "mqa_decode/heads=8", "2020-01-01", 1, "expired on 2020-01-01"),
        ("honest", "mqa_decode/heads=8", "2999-01-01", 1, "no longer a gap; remove it"),
        ("honest", "mqa_decode/heads=77", "2999-01-01", 1, "no such cell; remove the gap"),
    ],
)
def test_known_gaps_are_strict_in_both_directions(run_suite, tmp_path, backend, cell, expires, code, said):
    (tmp_path / "gaps.toml").write_text(GAP.format(cell=cell, expires=expires))
    arguments = ("-k", "mqa_decode and heads or known_gaps", "--mla-known-gaps", "gaps.toml", "-rs")
    done = run_suite(tmp_path, *SUITE, *arguments, "--mla-backend", backend)
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout[-2000:]


def test_an_unreadable_gap_file_is_a_usage_error(run_suite, tmp_path):
    (tmp_path / "gaps.toml").write_text('[[gap]]\ncell = "x"\n')
    done = run_suite(tmp_path, *SUITE, "--mla-backend", "honest", "--mla-known-gaps", "gaps.toml")
    assert done.returncode == USAGE_ERROR
    assert "gap.0.reason: Field required" in done.stdout + done.stderr


def test_an_ordinary_run_is_left_alone(run_suite, tmp_path):
    (tmp_path / "test_other.py").write_text(
        textwrap.dedent("""
        import sys

        def test_nothing_heavy_was_loaded():
            assert "torch" not in sys.modules
            assert "mla_core.conformance.session" not in sys.modules
        """)
    )
    done = run_suite(tmp_path, "-q", "-W", "error")
    assert done.returncode == 0, done.stdout
    assert "mla" not in done.stdout


def test_two_outside_plugins_are_tested_in_one_process(environ, trial):
    honest, owner = trial("honest"), trial("owner")
    verdicts = [run.judge("mqa_decode/heads=8").verdict.value for run in (honest, owner)]
    assert verdicts == ["verified", "verified"]
    assert honest.probe is owner.probe
