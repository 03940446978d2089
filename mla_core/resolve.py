"""Choose the backend of every kernel of a layer, before weights exist, and write down why.

Who decides: the argument, else `MLA_BACKEND`, else the config's backend, else `auto`. Every candidate gets
every check. A name that is given explicitly is used or refused, never replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from mla_core.candidates import Candidate, Hook, candidates, ranked
from mla_core.capabilities import Kernel, Requirement, Stage
from mla_core.chunks import chunk_bytes
from mla_core.errors import NoBackendFits
from mla_core.manifest import BackendInfo, PluginInfo
from mla_core.options import Asked
from mla_core.plan import Plan, Rejection, SpecSource
from mla_core.registry import Registry, default
from mla_core.request import Installed, LayerRequest, Reason, installed_version
from mla_core.spec import AUTO, Spec

__all__ = ["resolve"]

CORE = "core"
MLA_BACKEND: Literal["MLA_BACKEND"] = "MLA_BACKEND"

_PREFILL: dict[str, tuple[Kernel, ...]] = {
    "expand": ("mha_prefill",),
    "absorb": ("mqa_prefill",),
    "auto": ("mha_prefill", "mqa_prefill"),
}
_DECODE: tuple[Kernel, ...] = ("mqa_decode",)
_CHOICE: dict[Kernel, str] = {"mha_prefill": "mha", "mqa_prefill": "mqa_prefill", "mqa_decode": "mqa"}


def resolve(
    request: LayerRequest,
    spec: str | Spec | None = None,
    *,
    config_spec: str | None = None,
    registry: Registry | None = None,
    environ: Mapping[str, str] | None = None,
    installed: Installed = installed_version,
    refused: Mapping[str, Sequence[Reason]] = MappingProxyType({}),
) -> Plan:
    """The plan for a layer. Raises SpecError, a RegistryError for a wrong name, NoBackendFits.

    `prefill_form` auto prefers any mha_prefill that fits to any mqa_prefill. `installed` tells versions of
    distributions, so that another machine's choice can be explained here. `refused` are backends that said no
    when they were built, with their reasons.
    """
    registry = registry or default()
    if environ is not None:
        registry = registry.under(environ)
    asked, source = _authority(spec, config_spec, registry.environ)
    _check_shared_hooks(asked)
    prefill = candidates(asked, asked.spec.prefill, registry)
    decode = prefill if asked.spec.decode is None else candidates(asked, asked.spec.decode, registry)
    chooser = _Chooser(request, installed, refused)
    pair, rejected = _first_pair(chooser, prefill, decode)
    if pair is None:
        works = _suggestion(chooser, registry, prefill)
        raise NoBackendFits(str(asked), str(request.device), rejected, works=works)
    return Plan(
        request=request,
        spec=str(asked.spec),
        spec_source=source,
        choices=_choices(pair),
        options=_options(asked, pair),
        versions=_versions(pair, installed),
        rejected=rejected,
        workspace_tokens=request.workspace_tokens,
        workspace_bytes=_workspace_bytes(request, pair),
        overrides=_overrides(source, registry),
    )


def _authority(
    spec: str | Spec | None, config_spec: str | None, environ: Mapping[str, str]
) -> tuple[Asked, SpecSource]:
    if spec is not None:
        return Asked.parse(str(spec), "backend"), "argument"
    # A blank variable counts as not set, as it does for most programs.
    if environ.get(MLA_BACKEND, "").strip():
        return Asked.parse(environ[MLA_BACKEND], MLA_BACKEND), MLA_BACKEND
    if config_spec is not None:
        return Asked.parse(config_spec, "config.backend"), "config"
    return Asked.parse(AUTO, "backend"), "auto"


@dataclass(frozen=True)
class _Choice:
    """The candidate for one phase, and the kernel it serves it with."""

    kernel: Kernel
    candidate: Candidate
    info: BackendInfo


@dataclass(frozen=True)
class _Pair:
    prefill: _Choice
    decode: _Choice

    @property
    def hook(self) -> Hook | None:
        return self.decode.candidate.hook


@dataclass(frozen=True)
class _Chooser:
    """Judges candidates against one layer's request."""

    request: LayerRequest
    installed: Installed
    refused: Mapping[str, Sequence[Reason]]

    def pair(
        self, prefill: Sequence[Candidate], decode: Sequence[Candidate]
    ) -> tuple[_Pair | None, tuple[Rejection, ...]]:
        """The first that fits for each phase, and everybody else with reasons."""
        first, rejected = self._first(prefill, _PREFILL[self.request.prefill_form])
        second, also_rejected = self._first(decode, _DECODE)
        pair = None if first is None or second is None else _Pair(first, second)
        return pair, (*rejected, *also_rejected)

    def _first(
        self, found: Sequence[Candidate], kernels: Iterable[Kernel]
    ) -> tuple[_Choice | None, list[Rejection]]:
        rejected: list[Rejection] = []
        for kernel in kernels:
            chosen: _Choice | None = None
            for candidate in found:
                reasons = candidate.objections(self.request, kernel, self.installed)
                reasons += self.refused.get(candidate.name, ())
                if not reasons and chosen is None and candidate.info is not None:
                    chosen = _Choice(kernel, candidate, candidate.info)
                    continue
                after = [] if chosen is None else [_ranked_lower(chosen)]
                rejected.append(
                    Rejection(backend=candidate.name, kernel=kernel, reasons=tuple(reasons or after))
                )
            if chosen is not None:
                return chosen, rejected
        return None, rejected


def _ranked_lower(chosen: _Choice) -> Reason:
    return Reason(field="rank", wanted="first that fits", offered=f"fits, but after {chosen.candidate.name}")


def _first_pair(
    chooser: _Chooser, prefill: Sequence[Candidate], decode: Sequence[Candidate]
) -> tuple[_Pair | None, tuple[Rejection, ...]]:
    """Both phases of a layer share its sparse hook: the hooks are tried in the order of the prefill chain."""
    rejected: list[Rejection] = []
    for hook in _hooks(prefill):
        pair, more = chooser.pair(_under(hook, prefill), _under(hook, decode))
        rejected += more
        if pair is not None:
            return pair, tuple(rejected)
    return None, tuple(rejected)


def _hooks(found: Iterable[Candidate]) -> list[Hook | None]:
    hooks: list[Hook | None] = []
    for candidate in found:
        if candidate.hook not in hooks:
            hooks.append(candidate.hook)
    return hooks


def _under(hook: Hook | None, found: Iterable[Candidate]) -> list[Candidate]:
    return [candidate for candidate in found if candidate.hook == hook]


def _check_shared_hooks(asked: Asked) -> None:
    """A sparse hook serves both phases, so both chains must name the same ones."""
    chains = (asked.spec.prefill, asked.spec.decode or asked.spec.prefill)
    for chain, other in (chains, reversed(chains)):
        there = {str(stack.sparse) for stack in other}
        for stack in chain:
            if str(stack.sparse) not in there:
                hook = "no sparse hook" if stack.sparse is None else f"'+{stack.sparse}'"
                problem = f"a sparse hook serves both phases, but only one has a backend with {hook}"
                raise asked.error(problem, stack.backend.position)


def _choices(pair: _Pair) -> dict[str, str]:
    """Kernels to the backends chosen for them, and stages to their owners."""
    prefill, decode = pair.prefill, pair.decode
    both = (decode.info, prefill.info)
    # In the expanded form there is no latent to expand, so only absorb-form kernels can own v_up.
    absorbed = both if prefill.kernel == "mqa_prefill" else (decode.info,)
    rope = _owner("rope", both)
    choices = {
        _CHOICE[prefill.kernel]: prefill.candidate.name,
        _CHOICE[decode.kernel]: decode.candidate.name,
        # Who rotates the keys also stores them.
        "append": _owner("append", both) if rope == CORE else rope,
        "rope": rope,
        "v_up": _owner("v_up", absorbed),
        "gate": _owner("gate", both),
    }
    return choices if pair.hook is None else {**choices, "sparse": pair.hook.info.name}


def _owner(stage: Stage, infos: Iterable[BackendInfo]) -> str:
    return next((info.name for info in infos if stage in info.capabilities.owns), CORE)


def _options(asked: Asked, pair: _Pair) -> dict[str, dict[str, Any]]:
    """One backend is one instance, so both phases must give it the same options."""
    prefill, decode = pair.prefill.candidate, pair.decode.candidate
    if prefill.name == decode.name and prefill.options != decode.options:
        stacks = asked.spec.decode or asked.spec.prefill
        position = next(stack.backend.position for stack in stacks if stack.backend.name == decode.name)
        raise asked.error(f"{decode.name!r} serves both phases: give it the same options in both", position)
    options = {prefill.name: prefill.options, decode.name: decode.options}
    if pair.hook is not None:
        options[pair.hook.info.name] = pair.hook.options
    return {name: given for name, given in options.items() if given}


def _versions(pair: _Pair, installed: Installed) -> dict[str, str]:
    """The core, the chosen plugins, and the packages that they require."""
    infos: list[PluginInfo] = [pair.prefill.info, pair.decode.info]
    infos += [] if pair.hook is None else [pair.hook.info]
    required = {
        Requirement(text).name
        for choice in (pair.prefill, pair.decode)
        for text in choice.info.capabilities.requires
    }
    found = {name: installed(name) for name in ("mla-core", *sorted(required))}
    found |= {info.distribution: info.version for info in infos if info.distribution is not None}
    return {name: version for name, version in found.items() if version is not None}


def _overrides(source: SpecSource, registry: Registry) -> dict[str, str]:
    acted = registry.filters()
    return {MLA_BACKEND: registry.environ[MLA_BACKEND], **acted} if source == MLA_BACKEND else acted


def _workspace_bytes(request: LayerRequest, pair: _Pair) -> int | None:
    """Absorbed prefill reads the cache page by page and expands nothing."""
    if request.workspace_tokens is None:
        return None
    return chunk_bytes(request, request.workspace_tokens) if pair.prefill.kernel == "mha_prefill" else 0


def _suggestion(chooser: _Chooser, registry: Registry, failed: Sequence[Candidate]) -> str | None:
    """A backend string that would work for the same request, None when nothing does."""
    hook = failed[0].hook if failed else None
    found = ranked(registry, hook)
    pair, _ = chooser.pair(found, found)
    if pair is None:
        return None
    prefill, decode = pair.prefill.candidate.label, pair.decode.candidate.label
    return f"backend={prefill!r}" if prefill == decode else f"backend='prefill={prefill};decode={decode}'"
