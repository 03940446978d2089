"""Every error that mla_core raises on purpose.

    MLAError
    ├── ConfigError (ValueError)          a model's config cannot be read or is not supported
    ├── SpecError (ValueError)            a backend string does not parse or has a wrong option; with a caret
    ├── RegistryError
    │   ├── UnknownBackend (LookupError)  nothing of that name is installed
    │   ├── DuplicateBackend              two distributions claim the name
    │   ├── BrokenPlugin (ImportError)    the plugin is installed but cannot be described or loaded
    │   └── IncompatiblePlugin            the plugin was written for another version of the contract
    ├── UnsupportedError                  one backend says no; `.reasons` says why
    │   └── NoBackendFits                 every candidate says no; `.table` has them all
    ├── BatchError (ValueError)           lengths, tables or slots of a batch contradict each other
    ├── CacheError (ValueError)           a layout, page size, scale or slot that the cache does not have
    ├── CheckpointError                   weights that are missing, unexpected or of the wrong shape
    ├── WeightsNotReady (RuntimeError)    a layer was used before its weights were loaded and prepared
    ├── HookError                         a hook implementation with a wrong name or wrong arguments
    ├── ContractError                     a plugin broke the contract at run time
    └── KernelError                       a kernel failed on the device

    StaleCacheWarning (UserWarning)       weights changed while cached tokens depend on the old ones

Messages follow one rule: what was asked, who said no, wanted against offered, what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_core.plan import Rejection
    from mla_core.request import Reason

__all__ = [
    "BatchError",
    "BrokenPlugin",
    "CacheError",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "DuplicateBackend",
    "HookError",
    "IncompatiblePlugin",
    "KernelError",
    "MLAError",
    "NoBackendFits",
    "RegistryError",
    "SpecError",
    "StaleCacheWarning",
    "UnknownBackend",
    "UnsupportedError",
    "WeightsNotReady",
]


# Stands for the distribution of a plugin that was added in code.
THIS_PROCESS = "this process"


class MLAError(Exception):
    """Base of every error that mla_core raises on purpose."""


class ConfigError(MLAError, ValueError):
    """A model's config cannot be read, or asks for something that is not supported."""


class SpecError(MLAError, ValueError):
    """A backend string does not parse, or names an option that does not exist; `.position` is where."""

    def __init__(self, problem: str, text: str, position: int, *, source: str = "backend") -> None:
        self.problem = problem
        self.text = text
        self.position = position
        self.source = source
        # Blanks of any kind become one column wide, so that the caret stands where it should.
        shown = "".join(" " if character.isspace() else character for character in text)
        super().__init__(f"{source}: {problem}\n  {shown}\n  {' ' * position}^")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_spec_error, (self.problem, self.text, self.position, self.source)


def _rebuild_spec_error(problem: str, text: str, position: int, source: str) -> SpecError:
    return SpecError(problem, text, position, source=source)


class RegistryError(MLAError):
    """A plugin cannot be found or used."""


class UnknownBackend(RegistryError, LookupError):
    """Nothing of that name is installed."""

    def __init__(
        self, name: str, available: Iterable[str], *, kind: str = "backend", hints: Sequence[str] = ()
    ) -> None:
        self.name = name
        self.available = tuple(available)
        self.kind = kind
        self.hints = tuple(hints)
        installed = f"installed: {', '.join(self.available) or 'none'}"
        super().__init__("\n  ".join([f"unknown {kind} {name!r}; {installed}", *self.hints]))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_unknown, (self.name, self.available, self.kind, self.hints)


def _rebuild_unknown(
    name: str, available: tuple[str, ...], kind: str, hints: tuple[str, ...]
) -> UnknownBackend:
    return UnknownBackend(name, available, kind=kind, hints=hints)


class DuplicateBackend(RegistryError):
    """Two distributions claim the same name."""

    def __init__(self, name: str, distributions: Iterable[str], kind: str = "backend") -> None:
        self.name = name
        self.distributions = tuple(distributions)
        self.kind = kind
        super().__init__(
            f"{kind} {name!r} is claimed by {' and '.join(self.distributions)}\n"
            f"  uninstall all but one, or name the distributions to trust in MLA_PLUGINS"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return DuplicateBackend, (self.name, self.distributions, self.kind)


class BrokenPlugin(RegistryError, ImportError):
    """The plugin is installed, but describing or loading it failed; `.cause` is what went wrong."""

    def __init__(self, name: str, distribution: str, cause: str, kind: str = "backend") -> None:
        mend = f"repair or uninstall {distribution}"
        if distribution == THIS_PROCESS:
            mend = "add it again with a target that imports"
        super().__init__(
            f"{kind} {name!r} of {distribution} is broken: {cause}\n  {mend}, or set MLA_DISABLE={name}"
        )
        # After super().__init__: ImportError's own constructor clears `name`.
        self.name = name
        self.distribution = distribution
        self.cause = cause
        self.kind = kind

    def __reduce__(self) -> tuple[object, ...]:
        return BrokenPlugin, (self.name, self.distribution, self.cause, self.kind)


class IncompatiblePlugin(RegistryError):
    """The plugin was written for a version of the contract that this mla_core does not speak."""

    def __init__(
        self, name: str, distribution: str, api: object, accepted: Iterable[int], kind: str = "backend"
    ) -> None:
        self.name = name
        self.distribution = distribution
        self.api = api
        self.accepted = tuple(accepted)
        self.kind = kind
        versions = " or ".join(str(version) for version in self.accepted)
        self.cause = f"speaks API {api}; this mla_core accepts API {versions}"
        super().__init__(
            f"{kind} {name!r} of {distribution} {self.cause}\n"
            f"  install a release of {distribution} for API {self.accepted[-1]}, or another mla-core"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return IncompatiblePlugin, (self.name, self.distribution, self.api, self.accepted, self.kind)


class UnsupportedError(MLAError):
    """One backend says no to a request; `.reasons` has every field that does not fit."""

    def __init__(self, backend: str, reasons: Iterable[Reason], *, kernel: str | None = None) -> None:
        self.backend = backend
        self.reasons = tuple(reasons)
        self.kernel = kernel
        asked = f"{backend!r} does not support this {kernel or 'request'}"
        super().__init__("\n  ".join([asked, *(str(reason) for reason in self.reasons)]))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_unsupported, (self.backend, self.reasons, self.kernel)


def _rebuild_unsupported(backend: str, reasons: tuple[Reason, ...], kernel: str | None) -> UnsupportedError:
    return UnsupportedError(backend, reasons, kernel=kernel)


class NoBackendFits(UnsupportedError):
    """Every candidate says no; `.table` has a Rejection per candidate and kernel, `.works` what would fit."""

    def __init__(
        self, asked: str, device: str, table: Iterable[Rejection], *, works: str | None = None
    ) -> None:
        self.table = tuple(table)
        self.works = works
        self.asked = asked
        self.device = device
        super().__init__(asked, [reason for row in self.table for reason in row.reasons])
        self.args = (self._message(),)

    def _message(self) -> str:
        from mla_core.plan import rejection_lines

        rows = [f"  {line}" for line in rejection_lines(self.table)] or ["  no backend is installed"]
        advice = f"what would work: {self.works}" if self.works else "nothing that is installed would work"
        return "\n".join([f"nothing in {self.asked} fits this layer on {self.device}", *rows, advice])

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_no_fit, (self.asked, self.device, self.table, self.works)


def _rebuild_no_fit(
    asked: str, device: str, table: tuple[Rejection, ...], works: str | None
) -> NoBackendFits:
    return NoBackendFits(asked, device, table, works=works)


class BatchError(MLAError, ValueError):
    """Lengths, tables or slots of a batch contradict each other."""


class CacheError(MLAError, ValueError):
    """A layout, page size, scale or slot that the cache does not have."""


class CheckpointError(MLAError):
    """Weights are missing, unexpected or of the wrong shape."""


class WeightsNotReady(MLAError, RuntimeError):
    """A layer was used before its weights were loaded and prepared."""


class HookError(MLAError):
    """A hook implementation has a name or an argument that the hook does not know."""


class ContractError(MLAError):
    """A plugin broke the contract at run time."""


class KernelError(MLAError):
    """A kernel failed on the device."""


class StaleCacheWarning(UserWarning):
    """Weights changed while cached tokens still depend on the old ones."""
