"""A stranger's backend, installed as a wheel beside the project's own, is found, listed, chosen and used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.installation import ROOT, Installation

CHECKPOINT = ROOT / "tests/data/tiny_mla_kjv"
USE_LAYER = Path(__file__).with_name("use_layer.py")
TOLERANCE = 1e-5
MLA = "import sys; from mla_core.cli import main; sys.argv[0] = 'mla'; sys.exit(main())"


def use_layer(installation: Installation, backend: str) -> dict[str, Any]:
    return json.loads(installation.output(str(USE_LAYER), backend, str(CHECKPOINT)))


@pytest.fixture(scope="module")
def used(installation: Installation) -> dict[str, Any]:
    return use_layer(installation, "tiny")


def test_the_layer_comes_from_the_installed_wheel_and_not_from_the_checkout(used, installation):
    assert Path(used["core"]).is_relative_to(installation.site)


def test_the_registry_finds_the_installed_backend_with_its_distribution_and_version(installation):
    code = "from mla_core.registry import info; i = info('tiny'); print(i.distribution, i.version, i.summary)"
    assert installation.output("-c", code).strip() == "mla-tiny 1.2.3 a third party's backend for tests"


def test_mla_list_shows_the_installed_backend(installation):
    listed = json.loads(installation.output("-c", MLA, "list", "--json"))
    (tiny,) = [entry for entry in listed["backends"] if entry["name"] == "tiny"]
    assert (tiny["distribution"], tiny["version"]) == ("mla-tiny", "1.2.3")


def test_a_layer_selects_the_installed_backend_by_name(used):
    assert (used["choices"]["mha"], used["choices"]["mqa"]) == ("tiny", "tiny")


def test_the_plan_records_the_installed_backends_version(used):
    assert used["versions"]["mla-tiny"] == "1.2.3"


def test_a_layer_computes_the_oracles_numbers_with_the_installed_backend(used):
    assert used["error"] < TOLERANCE


def test_the_installed_backends_own_kernels_and_options_act(installation):
    """A gain of 1 % shows in the result: these kernels computed it, and the tolerance notices errors."""
    assert use_layer(installation, "tiny[gain=1.01]")["error"] > 100 * TOLERANCE


def test_the_embedded_backend_works_from_its_wheel(installation):
    assert use_layer(installation, "vanilla")["error"] < TOLERANCE


def test_an_uninstalled_name_is_refused_and_the_installed_ones_are_named(installation):
    done = installation.run(str(USE_LAYER), "tinny", str(CHECKPOINT))
    assert done.returncode != 0
    assert "UnknownBackend" in done.stderr
    assert "tiny" in done.stderr.splitlines()[-1]
