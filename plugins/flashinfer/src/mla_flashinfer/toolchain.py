"""Can FlashInfer compile its kernels here? Looked up as FlashInfer does, without importing it. Torch-free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from mla_core import Reason

__all__ = ["problems"]

# A distribution with the kernels already compiled.
_PRECOMPILED = "flashinfer-jit-cache"
_USUAL_HOME = "/usr/local/cuda"


def problems(environ: Mapping[str, str] = os.environ) -> list[Reason]:
    """What keeps FlashInfer from compiling kernels at first use; empty when nothing does."""
    found = [] if _precompiled() else [_compiler(environ)]
    return [reason for reason in (*found, _cache(environ)) if reason is not None]


def _precompiled() -> bool:
    try:
        metadata.version(_PRECOMPILED)
    except metadata.PackageNotFoundError:
        return False
    return True


def _compiler(environ: Mapping[str, str]) -> Reason | None:
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home is None and shutil.which("nvcc", path=environ.get("PATH", "")):
        return None
    nvcc = Path(home or _USUAL_HOME, "bin", "nvcc")
    if nvcc.is_file():
        return None
    return Reason(
        field="nvcc",
        wanted="a CUDA compiler: kernels are compiled at first use",
        offered=f"no {nvcc}" if home else f"none in PATH, no {nvcc}",
        hint=f"install the CUDA toolkit and set CUDA_HOME, or pip install {_PRECOMPILED}",
    )


def _cache(environ: Mapping[str, str]) -> Reason | None:
    folder = Path(environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home(), ".cache", "flashinfer")
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return None
    return Reason(
        field="kernel cache",
        wanted=f"a writable folder {folder}",
        offered=f"{existing} is not writable",
        hint="set FLASHINFER_WORKSPACE_BASE to a folder that is",
    )
