"""Listing fifty installed plugins stays quick and never loads torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.packaging.installation import Installation

PLUGINS = [f"fake{number:02}" for number in range(50)]
BUDGET_SECONDS = 1.0

MANIFEST = """
from mla_core import BackendInfo, Capabilities

INFO = BackendInfo(
    name="{name}",
    target="{name}.backend:Backend",
    summary="one of many",
    capabilities=Capabilities(devices=frozenset({{"cpu"}}), kernels=frozenset({{"mqa_decode"}})),
)
"""

# Reports on stderr, last, so that the command's own output stays what a user sees.
TIMED_LIST = """
import atexit, sys, time
atexit.register(lambda: print("torch" in sys.modules, time.process_time(), file=sys.stderr))
sys.argv = ["mla", "list", "--json"]
from mla_core.cli import main
sys.exit(main())
"""


def install_by_hand(site: Path, name: str) -> None:
    """What an installer leaves behind: a package and its metadata."""
    package, metadata = site / name, site / f"mla_{name}-1.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text("")
    (package / "manifest.py").write_text(MANIFEST.format(name=name))
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mla-{name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[mla_core.backends]\n{name} = {name}.manifest:INFO\n")


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    site = tmp_path_factory.mktemp("crowded")
    for name in PLUGINS:
        install_by_hand(site, name)
    return Installation(site)


def timed_list(crowded: Installation, code: str = TIMED_LIST) -> tuple[str, str, float]:
    """(output, "True" when torch was loaded, CPU seconds) of `mla list --json`."""
    done = crowded.run("-c", code)
    assert done.returncode == 0, done.stderr
    loaded, seconds = done.stderr.split()[-2:]
    return done.stdout, loaded, float(seconds)


def test_mla_list_names_every_one_of_fifty_plugins(crowded):
    output, _, _ = timed_list(crowded)
    names = {entry["name"] for entry in json.loads(output)["backends"]}
    assert set(PLUGINS) <= names


def test_mla_list_of_fifty_plugins_imports_no_torch(crowded):
    _, loaded, _ = timed_list(crowded)
    assert loaded == "False"


def test_mla_list_of_fifty_plugins_takes_under_a_second(crowded):
    """CPU time, the best of three: a busy machine is not the plugins' fault."""
    spent = min(timed_list(crowded)[2] for _ in range(3))
    assert spent < BUDGET_SECONDS, f"mla list took {spent:.2f} s of CPU time"


def test_the_clock_of_this_test_notices_a_plugin_that_loads_torch(crowded):
    _, loaded, spent = timed_list(crowded, f"import torch\n{TIMED_LIST}")
    assert (loaded, spent > BUDGET_SECONDS) == ("True", True)
