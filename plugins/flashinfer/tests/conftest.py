"""Fixtures: the plugin importable from its sources, and FlashInfer replaced by a fake in pure torch."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

# Without an installed mla-flashinfer, its sources serve.
sys.path.append(str(Path(__file__).parents[1] / "src"))

from plugins.flashinfer.tests import fake_flashinfer

# What imports FlashInfer, directly or not.
LOADED = ("backend", "library", "paged", "ragged")


@pytest.fixture
def versions(monkeypatch):
    """Versions of distributions as this environment reports them; change it to change them."""
    from importlib import metadata

    installed = {"flashinfer-python": "0.7.4"}
    honest = metadata.version

    def version(name: str) -> str:
        if not name.startswith("flashinfer"):
            return honest(name)
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    return installed


@pytest.fixture
def toolkit(monkeypatch, tmp_path):
    """A CUDA toolkit with a compiler, and a writable kernel cache."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    return nvcc


@pytest.fixture
def fake(monkeypatch, versions, toolkit):
    """FlashInfer in pure torch; `fake.calls` counts, `fake.backend` is the plugin's module over it."""
    calls = fake_flashinfer.install(monkeypatch)
    for module in LOADED:
        monkeypatch.delitem(sys.modules, f"mla_flashinfer.{module}", raising=False)
    backend = import_module("mla_flashinfer.backend")
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "Event", fake_flashinfer.Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return SimpleNamespace(calls=calls, backend=backend)
