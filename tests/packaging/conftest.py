"""Build wheels and lay them out as an installation, all without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.installation import ROOT, Installation, build_wheel


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The project's own wheels and a third party's, by distribution name."""
    out = tmp_path_factory.mktemp("wheels")
    sources = {
        "mla-core": ROOT,
        "mla-vanilla": ROOT / "plugins/vanilla",
        "mla-tiny": ROOT / "tests/packaging/tiny_backend",
    }
    return {name: build_wheel(folder, out / name) for name, folder in sources.items()}


@pytest.fixture(scope="session")
def installation(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """An environment with exactly these wheels of ours, and torch and friends from this one."""
    site = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site)]
    quiet = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*install, *map(str, wheels.values())], check=True, capture_output=True, env=quiet)
    return Installation(site)
