"""What `mla run` found, as text and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from mla_core.cli.console import columns
from mla_core.cli.scenario import Work
from mla_core.plan import Plan

__all__ = ["Report", "StepReport", "WorkReport"]


@dataclass(frozen=True)
class WorkReport:
    """One request of one step; error: the worst of its tokens and layers, None when nothing was verified."""

    work: Work
    error: float | None


@dataclass(frozen=True)
class StepReport:
    """One engine step; seconds of all layers together."""

    name: str
    works: list[WorkReport]
    prepare_seconds: float
    layer_seconds: float

    @property
    def tokens(self) -> int:
        return sum(each.work.tokens for each in self.works)

    @property
    def error(self) -> float | None:
        return max((each.error for each in self.works if each.error is not None), default=None)


@dataclass(frozen=True)
class Report:
    """A finished run."""

    model: str
    layers: list[int]
    plan: Plan
    cache: str
    inputs: str
    steps: list[StepReport]
    weights_bytes: int
    cache_bytes: int
    # Of all layers together.
    cache_bytes_per_token: int
    # None when nothing was verified.
    tolerance: float | None

    @property
    def error(self) -> float | None:
        return max((step.error for step in self.steps if step.error is not None), default=None)

    @property
    def verified(self) -> bool | None:
        """True when every output is within tolerance, None when nobody looked."""
        if self.tolerance is None or self.error is None:
            return None
        return self.error <= self.tolerance

    def __str__(self) -> str:
        memory = f"weights {self.weights_bytes / 1e9:.3g} GB, cache {self.cache_bytes / 1e9:.3g} GB"
        return "\n".join([*_table(self.steps), f"memory   {memory}", self._verdict()])

    def _verdict(self) -> str:
        if self.verified is None:
            return "check    not verified"
        what = "every output agrees with" if self.verified else "FAILED: outputs differ from"
        return (
            f"check    {what} the float64 oracle: largest relative error {self.error:.2e}, "
            f"tolerance {self.tolerance:.0e}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "layers": self.layers,
            "plan": self.plan.model_dump(mode="json"),
            "cache": self.cache,
            "inputs": self.inputs,
            "steps": [_step_json(step) for step in self.steps],
            "weights_bytes": self.weights_bytes,
            "cache_bytes": self.cache_bytes,
            "cache_bytes_per_token": self.cache_bytes_per_token,
            "verified": self.verified,
            "error": _finite(self.error),
            "tolerance": self.tolerance,
        }


def _finite(error: float | None) -> float | None:
    """JSON has no infinity; `verified` says that an output is not even a number."""
    return error if error is not None and math.isfinite(error) else None


def _step_json(step: StepReport) -> dict[str, Any]:
    return {
        "name": step.name,
        "tokens": step.tokens,
        "prepare_ms": 1e3 * step.prepare_seconds,
        "layer_ms": 1e3 * step.layer_seconds,
        "tokens_per_second": step.tokens / step.layer_seconds,
        "error": _finite(step.error),
        "requests": [
            {
                "request": each.work.request,
                "phase": each.work.phase,
                "tokens": each.work.tokens,
                "context": each.work.context,
                "error": _finite(each.error),
            }
            for each in step.works
        ],
    }


def _table(steps: Iterable[StepReport]) -> list[str]:
    """One row for each step, or run of steps of the same name, and one for each request of a mixed step."""
    rows: list[tuple[object, ...]] = [
        ("STEP", "REQUEST", "TOKENS", "PREPARE ms", "LAYERS ms", "TOKENS/s", "ERROR")
    ]
    for name, same in groupby(steps, key=lambda step: step.name):
        rows += _rows(name, list(same))
    return columns(rows, right=(2, 3, 4, 5, 6), indent="")


def _rows(name: str, steps: list[StepReport]) -> list[tuple[object, ...]]:
    """Times are means over the steps."""
    works = [each for step in steps for each in step.works]
    tokens, seconds = sum(step.tokens for step in steps), sum(step.layer_seconds for step in steps)
    prepare = 1e3 * sum(step.prepare_seconds for step in steps) / len(steps)
    worst = max((step.error for step in steps if step.error is not None), default=None)
    label = name if len(steps) == 1 else f"{name} x{len(steps)}"
    what = f"{len(works)} requests" if len(steps) == 1 and len(works) > 1 else str(works[0].work)
    times = (f"{prepare:.2f}", f"{1e3 * seconds / len(steps):.2f}", f"{tokens / seconds:.0f}")
    rows: list[tuple[object, ...]] = [(label, what, tokens, *times, _error(worst))]
    if len(steps) == 1 and len(works) > 1:
        rows += [("", each.work, each.work.tokens, "", "", "", _error(each.error)) for each in works]
    return rows


def _error(error: float | None) -> str:
    return "-" if error is None else f"{error:.1e}"
