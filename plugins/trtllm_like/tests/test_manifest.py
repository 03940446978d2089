"""The manifest: importable without kernels, and what its options take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mla_core import registry
from mla_core.errors import SpecError
from mla_core.resolve import resolve
from mla_trtllm_like.manifest import INFO
from plugins.trtllm_like.tests.test_backend import context


def test_the_manifest_imports_neither_torch_nor_triton():
    source = Path(__file__).parents[1] / "src"
    code = (
        f"import sys; sys.path.append({str(source)!r}); import mla_trtllm_like.manifest; "
        "print(sorted({'torch', 'triton'} & sys.modules.keys()))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert found.stdout.strip() == "[]"


@pytest.fixture
def registered():
    fresh = registry.Registry(environ={"MLA_PLUGINS": ""})
    fresh.add(INFO)
    return fresh


@pytest.mark.parametrize("option", ["parts=0", "parts=many", "form=diagonal", "splits=2"])
def test_options_that_mean_nothing_are_refused(registered, option):
    with pytest.raises(SpecError):
        resolve(context().request, f"trtllm_like[{option}]", registry=registered, environ={})


def test_options_reach_the_plan(registered):
    plan = resolve(context().request, "trtllm_like[parts=64,form=rows]", registry=registered, environ={})
    assert plan.options["trtllm_like"] == {"parts": 64, "form": "rows"}
