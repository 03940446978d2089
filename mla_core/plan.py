"""What selection decided and why, as a record that can be stored, compared and printed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from mla_core.capabilities import Kernel
from mla_core.request import LayerRequest, Reason

__all__ = ["KERNELS", "Plan", "Rejection", "SpecSource", "rejection_lines"]

# Entry of `Plan.choices` to the kernel that it chose a backend for.
KERNELS: dict[str, Kernel] = {
    "mha": "mha_prefill",
    "mqa_prefill": "mqa_prefill",
    "mqa": "mqa_decode",
    "append": "append",
}

SpecSource = Literal["argument", "MLA_BACKEND", "config", "auto"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rejection(_Record):
    """One candidate that was not chosen for one kernel, with every reason."""

    backend: str
    kernel: str
    reasons: tuple[Reason, ...]


def rejection_lines(rejected: Iterable[Rejection]) -> list[str]:
    """One line per reason: backend, kernel, reason, in aligned columns."""
    cells = [(row.backend, row.kernel, str(reason)) for row in rejected for reason in row.reasons]
    names = max((len(name) for name, _, _ in cells), default=0)
    kernels = max((len(kernel) for _, kernel, _ in cells), default=0)
    return [f"{name:<{names}}  {kernel:<{kernels}}  {reason}" for name, kernel, reason in cells]


class Plan(_Record):
    """Which backend serves which kernel of a layer; made before weights exist. JSON round trip.

    `choices` has "mha" or "mqa_prefill" (prefill), "mqa" (decode), "append", "rope", "v_up" and "gate", each
    naming a backend or "core", and "sparse" when a sparse hook is named.
    """

    request: LayerRequest
    spec: str
    spec_source: SpecSource
    choices: dict[str, str]
    # Backend or hook name to its validated options, defaults included.
    options: dict[str, dict[str, Any]] = {}
    # Distribution to version: the chosen plugins and the packages they require.
    versions: dict[str, str] = {}
    rejected: tuple[Rejection, ...] = ()
    # Cached tokens that prefill may expand at once, and the most memory that this takes (see chunk_bytes).
    workspace_tokens: int | None = None
    workspace_bytes: int | None = None
    # Environment variables that changed the outcome.
    overrides: dict[str, str] = {}

    def kernels_of(self, name: str) -> frozenset[Kernel]:
        """The kernels that a backend was chosen for."""
        return frozenset(kernel for choice, kernel in KERNELS.items() if self.choices.get(choice) == name)

    def __str__(self) -> str:
        width = max(len(kernel) for kernel in self.choices)
        lines = [f"backend {self.spec!r} ({self.spec_source}) on {self.request.device}"]
        lines += [f"  {kernel:<{width}}  {self._choice(name)}" for kernel, name in self.choices.items()]
        lines += _section("rejected", rejection_lines(self.rejected))
        lines += _section(
            "versions", [f"{name} {version}" for name, version in sorted(self.versions.items())]
        )
        lines += _section("overrides", [f"{name}={value}" for name, value in sorted(self.overrides.items())])
        return "\n".join(lines)

    def _choice(self, name: str) -> str:
        options = ", ".join(f"{key}={value}" for key, value in self.options.get(name, {}).items())
        return f"{name} [{options}]" if options else name


def _section(title: str, lines: list[str]) -> list[str]:
    return [title, *(f"  {line}" for line in lines)] if lines else []
