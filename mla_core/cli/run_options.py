"""What `mla run` was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mla_core.errors import ConfigError

__all__ = ["RunOptions", "parse_layers"]


@dataclass(frozen=True)
class RunOptions:
    """The command line, checked; either `model` or `checkpoint` is set."""

    model: str | None
    checkpoint: Path | None
    # None: the first one.
    layers: tuple[int, ...] | None = None
    backend: str | None = None
    cache: str = "auto"
    page_size: int = 64
    dtype: str = "bfloat16"
    device: str = "cpu"
    prefill_form: str = "auto"
    requests: str | None = None
    text: Path | None = None
    workspace_tokens: int | None = None
    seed: int = 0
    threads: int | None = None
    verify: bool = True
    write: Path | None = None


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer indices such as "0,1" or "0-3"; raises ConfigError."""
    found: list[int] = []
    for item in text.split(","):
        first, _, last = item.strip().partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise ConfigError(f"not layers: {text!r}; write 0 or 0,1 or 0-3")
        found += range(int(first), int(last or first) + 1)
    if not found or len(set(found)) != len(found):
        raise ConfigError(f"layers {text!r} must name at least one layer, and none twice; write 0,1 or 0-3")
    return tuple(found)
