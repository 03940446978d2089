"""Typed access to values read from a config file, and the ConfigErrors that a bad value becomes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from mla_core.errors import ConfigError


def unsupported(field: str, value: Any, supported: str, hint: str | None = None) -> ConfigError:
    """The error for a value that is understood but not supported, or not understood at all."""
    text = f"{field}={value!r} is not supported; supported: {supported}"
    return ConfigError(f"{text} ({hint})" if hint else text)


def missing(field: str, hint: str | None = None) -> ConfigError:
    """The error for a field that the mathematics need and the config does not give."""
    return ConfigError(f"{field} is missing from the config" + (f"; {hint}" if hint else ""))


def from_validation(error: ValidationError, known: Iterable[str], subject: str) -> ConfigError:
    """One ConfigError that names every field pydantic refused, and suggests a name for each unknown one."""
    lines = []
    for detail in error.errors(include_url=False):
        field = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            lines.append(f"{field}: no such field{did_you_mean(field, known)}")
        elif detail["type"] == "missing":
            lines.append(f"{field}: missing")
        elif detail["type"] == "value_error":
            problem = str(detail["ctx"]["error"])
            lines.append(f"{field}: {problem}" if detail["loc"] else problem)
        else:
            lines.append(f"{field}={detail['input']!r}: {detail['msg']}")
    return ConfigError(f"{subject} is not valid: " + "; ".join(lines))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean x?`, or nothing when no known name is close."""
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def whole(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number, at least 0."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise missing(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise unsupported(key, value, "a whole number, at least 0")
    return value


def positive(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A whole number, at least 1."""
    value = whole(raw, key, default)
    if value < 1:
        raise unsupported(key, value, "a whole number, at least 1")
    return value


def optional_number(raw: Mapping[str, Any], key: str) -> float | None:
    """A finite number, or None where the key is absent or null."""
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise unsupported(key, value, "a finite number")
    return float(value)


def number(raw: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number; the default where the key is absent or null."""
    value = optional_number(raw, key)
    return default if value is None else value
