"""Fixtures: the plugin importable from its sources, its kernels interpreted where there is no CUDA."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

# Without an installed mla-trtllm-like, its sources serve.
sys.path.append(str(Path(__file__).parents[1] / "src"))

# Kernels choose when they are defined, so this comes before any of them is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _quiet_interpreter() -> Iterator[None]:
    """Infinities and NaN are what several tests are about; numpy need not warn of them."""
    with np.errstate(all="ignore"):
        yield
