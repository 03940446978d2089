"""`mla doctor`: what is installed, which variables act, what is broken and how to repair it.

A problem is something broken. What a backend lacks that is merely installed, for a device that is not here or
without its optional packages, is a note: other backends serve, and naming it says what is missing.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from mla_core.capabilities import DevicePattern, Requirement
from mla_core.cli.console import columns
from mla_core.discovery import canonical
from mla_core.errors import MLAError, RegistryError
from mla_core.manifest import BackendInfo, PluginInfo
from mla_core.registry import Entry, Registry
from mla_core.request import DeviceInfo, installed_version
from mla_core.spec import AUTO, Spec, parse

__all__ = ["Diagnosis", "diagnose"]

VARIABLES = ("MLA_BACKEND", "MLA_PLUGINS", "MLA_DISABLE")


@dataclass(frozen=True)
class Problem:
    """Something broken or missing, and what to do about it."""

    what: str
    remedy: str


@dataclass(frozen=True)
class Torch:
    """The installed torch, or why it cannot be imported."""

    version: str | None
    cuda: str | None = None
    devices: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class PackageNeed:
    """A package that a plugin requires, and whether it holds here."""

    plugin: str
    requirement: str
    installed: str | None
    holds: bool


@dataclass(frozen=True)
class Diagnosis:
    """All that was looked at, and the problems found."""

    python: str
    mla_core: str | None
    torch: Torch
    triton: str | None
    plugins: dict[str, str]
    packages: tuple[PackageNeed, ...]
    variables: dict[str, str]
    problems: tuple[Problem, ...] = field(default=())
    notes: tuple[Problem, ...] = field(default=())

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        torch = self.torch.error or f"{self.torch.version}, CUDA {self.torch.cuda or 'not built in'}"
        facts = [
            ("python", self.python),
            ("mla-core", self.mla_core or "not installed: running from source"),
            ("torch", torch),
            ("devices", ", ".join(("cpu", *self.torch.devices))),
            ("triton", self.triton or "not installed"),
        ]
        facts += [(name, value) for name, value in self.variables.items()]
        lines = columns(facts, indent="")
        if self.plugins:
            lines += ["plugins", *columns(list(self.plugins.items()))]
        if self.packages:
            lines += ["required packages", *columns([_package_row(need) for need in self.packages])]
        if self.notes:
            lines += ["notes", *_paragraphs(self.notes)]
        if not self.problems:
            return "\n".join([*lines, "no problems found"])
        return "\n".join([*lines, f"problems: {len(self.problems)}", *_paragraphs(self.problems)])


def _paragraphs(found: tuple[Problem, ...]) -> list[str]:
    return [f"  {each.what}\n    {each.remedy}" for each in found]


def _package_row(need: PackageNeed) -> tuple[str, str, str]:
    verdict = "holds" if need.holds else "does not hold"
    return need.plugin, need.requirement, f"{verdict}: {need.installed or 'not installed'}"


def diagnose(registry: Registry, environ: Mapping[str, str] = os.environ) -> Diagnosis:
    """Look at everything. Imports torch, and the kernels of plugins made for a device that is here."""
    torch, devices = _torch()
    entries: list[Entry[Any]] = [*registry.entries(), *registry.sparse.entries()]
    packages = tuple(need for entry in entries if entry.info is not None for need in _needs(entry.info))
    named = _named(environ)
    lacking = {need.plugin for need in packages if not need.holds}
    infos = [entry.info for entry in entries if entry.info is not None]
    serving = [info for info in infos if info.name not in lacking and _serves(info, devices)]
    wanted = [info for info in infos if info in serving or info.name in named]
    problems = [
        *_core_problems(torch),
        *_nothing_usable(infos, lacking),
        *(problem for entry in entries for problem in _plugin_problems(entry)),
        *(_unmet(need) for need in packages if not need.holds and not _optional(need, named)),
        *_load_problems(registry, serving),
        *(problem for info in wanted for problem in _examined(registry, info)),
        *_variable_problems(registry, entries, environ),
    ]
    notes = [
        *(_unmet(need) for need in packages if _optional(need, named)),
        *(note for info in infos if info not in wanted for note in _examined(registry, info)),
    ]
    return Diagnosis(
        python=f"{platform.python_version()} on {platform.platform()}",
        mla_core=installed_version("mla-core"),
        torch=torch,
        triton=installed_version("triton"),
        plugins={f"{e.name} ({e.distribution} {e.version or '-'})": e.state for e in entries},
        packages=packages,
        variables={name: environ[name] for name in VARIABLES if environ.get(name, "").strip()},
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _torch() -> tuple[Torch, list[DeviceInfo]]:
    here = [DeviceInfo(kind="cpu")]
    # The torch wall: only commands that need it import torch; a broken one may fail in any way.
    try:
        import torch

        from mla_core.device import device_info

        here += [device_info(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        names = tuple(f"{device} {device.name}" for device in here[1:])
        return Torch(torch.__version__, torch.version.cuda, names), here
    except Exception as error:  # noqa: BLE001
        return Torch(
            installed_version("torch"), error=f"cannot be used: {type(error).__name__}: {error}"
        ), here


def _core_problems(torch: Torch) -> Iterator[Problem]:
    if torch.error is not None:
        yield Problem(f"torch {torch.error}", "reinstall torch; see https://pytorch.org/get-started/locally")
    try:
        required = metadata.requires("mla-core") or []
    except metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, required):
        version = installed_version(requirement.name)
        if requirement.applies() and (version is None or not requirement.allows(version)):
            found = "it is not installed" if version is None else f"{version} is installed"
            yield Problem(
                f"mla-core requires {requirement.text}: {found}", f"pip install '{requirement.text}'"
            )


def _needs(info: PluginInfo) -> Iterator[PackageNeed]:
    capabilities = info.capabilities if isinstance(info, BackendInfo) else None
    for requirement in map(Requirement, capabilities.requires if capabilities else ()):
        if requirement.applies():
            version = installed_version(requirement.name)
            holds = version is not None and requirement.allows(version)
            yield PackageNeed(info.name, requirement.text, version, holds)
    for bad in map(Requirement, capabilities.known_bad if capabilities else ()):
        version = installed_version(bad.name)
        if bad.applies() and version is not None and bad.allows(version):
            yield PackageNeed(info.name, f"not {bad.text}", version, holds=False)


def _unmet(need: PackageNeed) -> Problem:
    if need.requirement.startswith("not "):
        remedy = f"install another version of {Requirement(need.requirement.removeprefix('not ')).name}"
    else:
        remedy = f"pip install '{need.requirement}'"
    return Problem(f"{need.plugin} requires {need.requirement}: {need.installed or 'not installed'}", remedy)


def _optional(need: PackageNeed, named: set[str]) -> bool:
    """Is the package absent, and does nobody ask for its backend?"""
    return need.installed is None and need.plugin not in named


def _named(environ: Mapping[str, str]) -> set[str]:
    """Plugins that MLA_BACKEND names; `_variable_problems` tells when it cannot be read."""
    try:
        spec = parse(environ.get("MLA_BACKEND", ""), source="MLA_BACKEND")
    except MLAError:
        return set()
    stacks = (*spec.prefill, *(spec.decode or ()))
    return {use.name for stack in stacks for use in (stack.backend, stack.sparse) if use is not None}


def _examined(registry: Registry, info: PluginInfo) -> Iterator[Problem]:
    """What the plugin's own doctor finds."""
    group = registry.backends if isinstance(info, BackendInfo) else registry.sparse
    try:
        found = group.examine(info.name)
    except RegistryError as error:
        what, _, remedy = str(error).partition("\n")
        yield Problem(what, remedy.strip())
        return
    for reason in found:
        what = f"{info.name} needs {reason.field}: wanted {reason.wanted}, found {reason.offered}"
        yield Problem(what, reason.hint or "see its documentation")


def _nothing_usable(infos: list[PluginInfo], lacking: set[str]) -> Iterator[Problem]:
    if not [info for info in infos if isinstance(info, BackendInfo) and info.name not in lacking]:
        yield Problem(
            "no backend can be used: no layer can be built",
            "pip install mla-vanilla, or change MLA_PLUGINS and MLA_DISABLE",
        )


def _plugin_problems(entry: Entry[Any]) -> Iterator[Problem]:
    remedies = {
        "broken": f"repair or uninstall {entry.distribution}, or set MLA_DISABLE={entry.name}",
        "incompatible": f"install a release of {entry.distribution} that fits this mla-core",
        "duplicate": "uninstall all but one, or name the distributions to trust in MLA_PLUGINS",
    }
    if entry.state in remedies:
        what = f"plugin {entry.name} of {entry.distribution} is {entry.state}: {entry.cause}"
        yield Problem(what, remedies[entry.state])


def _load_problems(registry: Registry, serving: list[PluginInfo]) -> Iterator[Problem]:
    """Backends that say they serve a device that is here, have what they require, and still do not load."""
    for info in serving:
        if not isinstance(info, BackendInfo):
            continue
        try:
            registry.load(info.name)
        except RegistryError as error:
            what, _, remedy = str(error).partition("\n")
            yield Problem(what, remedy.strip())


def _serves(info: PluginInfo, devices: list[DeviceInfo]) -> bool:
    """Is a device here that the plugin's kernels are made for? Those of a sparse hook are not declared."""
    if not isinstance(info, BackendInfo):
        return True
    patterns = [DevicePattern.parse(text) for text in info.capabilities.devices]
    return any(pattern.fits(device.kind, device.arch) for pattern in patterns for device in devices)


def _variable_problems(
    registry: Registry, entries: list[Entry[Any]], environ: Mapping[str, str]
) -> Iterator[Problem]:
    yield from _backend_variable(registry, environ.get("MLA_BACKEND", "").strip())
    known = {"MLA_DISABLE": {e.name for e in entries}, "MLA_PLUGINS": {e.distribution for e in entries}}
    for variable, names in known.items():
        words = [word.strip() for word in environ.get(variable, "").split(",") if word.strip()]
        for word in words:
            if (canonical(word) if variable == "MLA_PLUGINS" else word) not in names:
                found = ", ".join(sorted(names)) or "none"
                yield Problem(
                    f"{variable} names {word!r}, which is not installed", f"correct it; found: {found}"
                )


def _backend_variable(registry: Registry, text: str) -> Iterator[Problem]:
    if not text:
        return
    try:
        _check_names(registry, parse(text, source="MLA_BACKEND"))
    except MLAError as error:
        yield Problem(f"MLA_BACKEND cannot be used: {error}", "correct or unset MLA_BACKEND")


def _check_names(registry: Registry, spec: Spec) -> None:
    """Every name of a backend string can be used. Raises a RegistryError."""
    for stack in (*spec.prefill, *(spec.decode or ())):
        if stack.backend.name != AUTO:
            registry.info(stack.backend.name)
        if stack.sparse is not None:
            registry.sparse.info(stack.sparse.name)
