"""What `mla inspect` was asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["InspectOptions"]


@dataclass(frozen=True)
class InspectOptions:
    """The command line. dtype and device None: the checkpoint's and this machine's."""

    checkpoint: Path
    device: str | None = None
    dtype: str | None = None
    cache: str = "auto"
    tp: int = 1
