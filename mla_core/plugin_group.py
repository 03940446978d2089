"""The plugins of one entry-point group: found in metadata, described by manifests, loaded when chosen."""

from __future__ import annotations

import copy
import difflib
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Generic, Literal, TypeVar

from pydantic import ValidationError

from mla_core.discovery import Claim, canonical, discover
from mla_core.errors import (
    THIS_PROCESS,
    BrokenPlugin,
    DuplicateBackend,
    IncompatiblePlugin,
    UnknownBackend,
)
from mla_core.manifest import PluginInfo, validation_problems
from mla_core.request import Reason

__all__ = ["Entry", "PluginGroup"]

InfoT = TypeVar("InfoT", bound=PluginInfo)
Failure = BrokenPlugin | IncompatiblePlugin
State = Literal["ok", "broken", "incompatible", "duplicate", "disabled"]


@dataclass(frozen=True)
class Entry(Generic[InfoT]):
    """One claim to a name and what became of it; `cause` says why the state is not ok."""

    name: str
    distribution: str
    version: str | None
    state: State
    cause: str | None = None
    info: InfoT | None = None


@dataclass
class _Store(Generic[InfoT]):
    """What is known so far, shared by all views. The lock is never held while a plugin's code runs."""

    claims: list[Claim] | None = None
    outcomes: dict[Claim, InfoT | Failure] = field(default_factory=dict)
    added: dict[str, InfoT] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)


class PluginGroup(Generic[InfoT]):
    """Plugins of one kind by name. Nothing is discovered before it is asked for."""

    def __init__(
        self,
        group: str,
        kind: str,
        info_type: type[InfoT],
        environ: Mapping[str, str],
        path: Iterable[str] | None = None,
    ) -> None:
        self._group = group
        self._kind = kind
        self._info_type = info_type
        self._environ = environ
        self._path = None if path is None else tuple(path)
        self._store: _Store[InfoT] = _Store()

    def under(self, environ: Mapping[str, str]) -> PluginGroup[InfoT]:
        """A view of the same plugins, filtered by other environment variables."""
        view = copy.copy(self)
        view._environ = environ
        return view

    def names(self) -> list[str]:
        """Every name that can be asked for, from metadata alone: also of broken plugins, not of disabled."""
        return sorted({claim.name for claim in self._visible() if not claim.whole_file})

    def entries(self) -> list[Entry[InfoT]]:
        """Every claim with its state, sorted by name; describes all plugins that are not disabled."""
        claims = sorted(self._claims(), key=lambda claim: (claim.name, claim.distribution))
        return [self._entry(claim) for claim in claims]

    def info(self, name: str) -> InfoT:
        """The manifest of a plugin. Raises the RegistryError that tells why it cannot be used."""
        found = [claim for claim in self._visible() if claim.name == name]
        # A distribution whose metadata cannot be read answers to its own name, unless a plugin has that name.
        found = [claim for claim in found if not claim.whole_file] or found
        if not found:
            raise self._unknown(name)
        if len(found) > 1:
            raise DuplicateBackend(name, [claim.distribution for claim in found], self._kind)
        outcome = self._describe(found[0])
        if isinstance(outcome, Failure):
            # A copy: an exception that is raised twice collects the tracebacks of both.
            raise copy.copy(outcome) from outcome.__cause__
        return outcome

    def load(self, name: str) -> Any:
        """Import what the plugin's manifest names as its target. Raises as `info` does."""
        info = self.info(name)
        try:
            return _import(info.target)
        # A plugin's import may fail in any way; the cause is in the error.
        except (Exception, SystemExit) as error:
            cause = f"loading {info.target} failed: {_text(error)}"
            raise BrokenPlugin(name, info.distribution or THIS_PROCESS, cause, self._kind) from error

    def examine(self, name: str) -> list[Reason]:
        """Ask the plugin's own doctor what is missing on this machine. Raises as `load` does."""
        info = self.info(name)
        if info.doctor is None:
            return []
        try:
            return _reasons(_import(info.doctor)())
        # A plugin's code may fail in any way; the cause is in the error.
        except (Exception, SystemExit) as error:
            cause = f"its doctor {info.doctor} failed: {_text(error)}"
            raise BrokenPlugin(name, info.distribution or THIS_PROCESS, cause, self._kind) from error

    def add(self, info: InfoT, *, override: bool = False) -> None:
        """Register a plugin in this process. A taken name is DuplicateBackend unless `override`."""
        with self._store.lock:
            holders = [claim.distribution for claim in self._claims() if claim.name == info.name]
            if holders and not override:
                raise DuplicateBackend(info.name, [*holders, THIS_PROCESS], self._kind)
            self._store.added[info.name] = info

    def remove(self, name: str) -> None:
        """Undo `add`; or hide an installed plugin in this process, until `add` takes its name."""
        with self._store.lock:
            if name not in {claim.name for claim in self._claims()}:
                raise self._unknown(name)
            if self._store.added.pop(name, None) is None:
                self._store.removed.add(name)

    def refresh(self) -> None:
        """Forget what was discovered and described; what `add` and `remove` did stays."""
        with self._store.lock:
            self._store.claims = None
            self._store.outcomes.clear()

    def hidden_by(self, variable: str) -> bool:
        """True when an environment variable (MLA_PLUGINS or MLA_DISABLE) hides at least one plugin."""
        return any(self._hidden_by(claim) == variable for claim in self._claims())

    def _claims(self) -> list[Claim]:
        with self._store.lock:
            if self._store.claims is None:
                self._store.claims = discover(self._group, self._path)
            mine = self._store.added
            kept = [c for c in self._store.claims if c.name not in mine and c.name not in self._store.removed]
            return [*kept, *(Claim(name, THIS_PROCESS) for name in mine)]

    def _visible(self) -> list[Claim]:
        return [claim for claim in self._claims() if self._hidden_by(claim) is None]

    def _hidden_by(self, claim: Claim) -> str | None:
        if claim.name in _words(self._environ.get("MLA_DISABLE", "")):
            return "MLA_DISABLE"
        trusted = {canonical(word) for word in _words(self._environ.get("MLA_PLUGINS", ""))}
        if trusted and claim.distribution not in (THIS_PROCESS, *trusted):
            return "MLA_PLUGINS"
        return None

    def _entry(self, claim: Claim) -> Entry[InfoT]:
        variable = self._hidden_by(claim)
        if variable is not None:
            cause = f"{variable}={self._environ[variable]}"
            return Entry(claim.name, claim.distribution, claim.version, "disabled", cause)
        others = [c.distribution for c in self._visible() if c.name == claim.name and c != claim]
        if others and not claim.whole_file:
            cause = f"also claimed by {', '.join(others)}"
            return Entry(claim.name, claim.distribution, claim.version, "duplicate", cause)
        outcome = self._describe(claim)
        if isinstance(outcome, Failure):
            state: State = "broken" if isinstance(outcome, BrokenPlugin) else "incompatible"
            return Entry(claim.name, claim.distribution, claim.version, state, outcome.cause)
        return Entry(claim.name, claim.distribution, claim.version, "ok", info=outcome)

    def _describe(self, claim: Claim) -> InfoT | Failure:
        with self._store.lock:
            if claim.distribution == THIS_PROCESS:
                return self._store.added[claim.name]
            known = self._store.outcomes.get(claim)
        if known is not None:
            return known
        outcome = self._manifest(claim)
        with self._store.lock:
            # Another thread may have been first; everybody gets its result.
            return self._store.outcomes.setdefault(claim, outcome)

    def _manifest(self, claim: Claim) -> InfoT | Failure:
        if claim.target is None:
            return self._broken(claim, claim.problem or "")
        try:
            info = _import(claim.target)
            if callable(info):
                info = info()
        except IncompatiblePlugin as error:
            return IncompatiblePlugin(claim.name, claim.distribution, error.api, error.accepted, self._kind)
        # A plugin's code may fail in any way; the cause is recorded and raised when the plugin is named.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            broken = self._broken(claim, _text(error))
            broken.__cause__ = error
            return broken
        return self._checked(claim, info)

    def _checked(self, claim: Claim, info: object) -> InfoT | Failure:
        if not isinstance(info, self._info_type):
            wanted = self._info_type.__name__
            return self._broken(claim, f"{claim.target} is of type {type(info).__name__}, not {wanted}")
        if info.name != claim.name:
            return self._broken(claim, f"its entry point says {claim.name!r}, its manifest {info.name!r}")
        return info.model_copy(update={"distribution": claim.distribution, "version": claim.version})

    def _broken(self, claim: Claim, cause: str) -> BrokenPlugin:
        return BrokenPlugin(claim.name, claim.distribution, cause, self._kind)

    def _unknown(self, name: str) -> UnknownBackend:
        names = self.names()
        hints = [f"did you mean {close!r}?" for close in difflib.get_close_matches(name, names, n=1)]
        for claim in self._claims():
            variable = self._hidden_by(claim)
            if claim.name == name and variable is not None:
                hints.append(
                    f"{name!r} of {claim.distribution} is hidden by {variable}={self._environ[variable]}"
                )
            elif claim.whole_file:
                hints.append(f"{claim.distribution} may have it, but {claim.problem}")
        return UnknownBackend(name, names, kind=self._kind, hints=hints)


def _reasons(found: object) -> list[Reason]:
    """What a doctor returned. Raises TypeError when it is no list of Reason."""
    if isinstance(found, list) and all(isinstance(item, Reason) for item in found):
        return found
    raise TypeError(f"it returned {found!r:.80}, which is no list of Reason")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _import(target: str) -> Any:
    module, _, attributes = target.partition(":")
    found: Any = import_module(module)
    for attribute in filter(None, attributes.split(".")):
        found = getattr(found, attribute)
    return found


def _text(error: BaseException) -> str:
    if isinstance(error, ValidationError):
        return f"{error.title}: {'; '.join(validation_problems(error))}"
    return f"{type(error).__name__}: {error}"
