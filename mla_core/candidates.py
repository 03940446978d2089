"""Who could serve a layer: the stacks of a backend string as plugins with options, in order of preference."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from mla_core.capabilities import Kernel
from mla_core.manifest import BackendInfo, SparseInfo, validation_problems
from mla_core.options import Asked, default_options
from mla_core.registry import Entry, Registry
from mla_core.request import Installed, LayerRequest, Reason, reasons
from mla_core.spec import AUTO, Part, Stack

__all__ = ["Candidate", "Hook", "candidates", "ranked"]


@dataclass(frozen=True)
class Hook:
    """A sparse hook with its options; `text` is how the backend string names both."""

    info: SparseInfo
    options: dict[str, Any]
    text: str


@dataclass(frozen=True)
class Candidate:
    """A dense backend that could serve a phase, and the sparse hook on top; no `info`: see `problem`."""

    name: str
    hook: Hook | None = None
    info: BackendInfo | None = None
    options: dict[str, Any] = field(default_factory=dict)
    problem: Reason | None = None

    @property
    def label(self) -> str:
        """The stack as a backend string would name it, with the backend's default options."""
        return self.name if self.hook is None else f"{self.name}+{self.hook.text}"

    def objections(self, request: LayerRequest, kernel: Kernel, installed: Installed) -> list[Reason]:
        """Every reason why it cannot serve one kernel of a layer, its owned append included."""
        found = [] if self.problem is None else [self.problem]
        if self.info is not None:
            capabilities = self.info.capabilities
            found += reasons(capabilities, request.kernel_request(kernel), installed)
            if "append" in capabilities.owns:
                found += reasons(capabilities, request.kernel_request("append"), installed)
        return list(dict.fromkeys([*found, *self._hook_objections()]))

    def _hook_objections(self) -> list[Reason]:
        if self.hook is None or self.hook.info.works_with is None or self.name in self.hook.info.works_with:
            return []
        offered = f"works with {', '.join(sorted(self.hook.info.works_with)) or 'none'}"
        return [Reason(field="sparse", wanted=self.hook.info.name, offered=offered)]


def candidates(asked: Asked, chain: Iterable[Stack], registry: Registry) -> list[Candidate]:
    """The candidates of one phase. Raises a RegistryError or SpecError for any wrong name or option."""
    found: list[Candidate] = []
    for stack in chain:
        hook = None if stack.sparse is None else _hook(asked, stack.sparse, registry)
        if stack.backend.name == AUTO:
            named = {candidate.name for candidate in found if candidate.hook == hook}
            found += [candidate for candidate in ranked(registry, hook) if candidate.name not in named]
        else:
            info = registry.info(stack.backend.name)
            found.append(Candidate(info.name, hook, info, asked.options(stack.backend, info)))
    return found


def ranked(registry: Registry, hook: Hook | None = None) -> list[Candidate]:
    """Everything that is installed: by declared priority, then name; what cannot be used comes last."""
    names = set(registry.names())
    entries = {entry.name: entry for entry in registry.entries() if entry.name in names}
    return [_installed(entry, hook) for entry in sorted(entries.values(), key=_rank)]


def _rank(entry: Entry[BackendInfo]) -> tuple[bool, int, str]:
    priority = 0 if entry.info is None else entry.info.priority
    return entry.info is None, -priority, entry.name


def _installed(entry: Entry[BackendInfo], hook: Hook | None) -> Candidate:
    if entry.info is None:
        problem = Reason(field="plugin", wanted="ok", offered=entry.state, hint=entry.cause)
        return Candidate(entry.name, hook, problem=problem)
    try:
        return Candidate(entry.name, hook, entry.info, default_options(entry.info))
    except ValidationError as error:
        needed = "; ".join(validation_problems(error))
        problem = Reason(field="options", wanted="none given", offered=f"needs some: {needed}")
        return Candidate(entry.name, hook, entry.info, problem=problem)


def _hook(asked: Asked, part: Part, registry: Registry) -> Hook:
    info = registry.sparse.info(part.name)
    return Hook(info, asked.options(part, info), str(part))
