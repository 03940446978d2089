"""The vanilla manifest: readable without torch, and the embedded default that comes last."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mla_core import registry
from mla_core.cache import layout_ids
from mla_vanilla.manifest import INFO


def test_the_manifest_is_read_without_importing_torch():
    code = "import sys, mla_vanilla.manifest; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_the_installed_entry_point_is_this_manifest():
    found = registry.info("vanilla")
    assert (found.capabilities, found.target, found.distribution) == (
        INFO.capabilities,
        INFO.target,
        "mla-vanilla",
    )


def test_anything_else_that_fits_comes_before_it():
    assert INFO.priority < 0


def test_it_declares_no_layout_that_the_core_does_not_have():
    assert INFO.capabilities.layouts.keys() <= set(layout_ids())


@pytest.mark.parametrize("dim", ["heads", "latent", "nope", "value"])
def test_every_positive_width_is_declared(dim):
    offered = getattr(INFO.capabilities, dim)
    assert 0 not in offered
    assert all(value in offered for value in (1, 7, 128, 4096))


def test_models_without_rope_dims_are_declared():
    assert 0 in INFO.capabilities.rope
