"""The model that a command names: a preset, or a path."""

from __future__ import annotations

from pathlib import Path

from mla_core.config_hf import preset_names
from mla_core.config_values import did_you_mean
from mla_core.errors import ConfigError

__all__ = ["named_model"]


def named_model(
    positional: str | None, preset: str | None, path: Path | None
) -> tuple[str | None, Path | None]:
    """(preset, path), one of them None, from the three ways to name a model. Raises ConfigError."""
    given = [value for value in (positional, preset, path) if value is not None]
    if len(given) != 1:
        asked = f"got {' and '.join(map(str, given))}" if given else "got none"
        raise ConfigError(f"name one model, a preset or a path, {asked}\n  {_presets()}")
    if positional is None:
        return preset, path
    if positional.lower() in preset_names():
        return positional, None
    if not Path(positional).exists():
        hint = did_you_mean(positional.lower(), preset_names())
        raise ConfigError(f"{positional!r} is neither a path nor a preset{hint}\n  {_presets()}")
    return None, Path(positional)


def _presets() -> str:
    return f"presets: {', '.join(preset_names())}"
