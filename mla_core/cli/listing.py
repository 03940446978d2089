"""`mla list` and `mla show`: what is installed, and what it declares. Reads manifests, loads no kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import typer

from mla_core.capabilities import Capabilities, Declined, IntSet, Limit
from mla_core.cli.console import columns
from mla_core.errors import UnknownBackend
from mla_core.manifest import BackendInfo, PluginInfo, SparseInfo
from mla_core.registry import Entry, Registry

__all__ = ["find", "listing_json", "listing_lines", "plugin_lines"]


def listing_json(registry: Registry) -> dict[str, Any]:
    """Every plugin found, with its state."""
    return {
        "backends": [_entry_json(entry) for entry in registry.entries()],
        "sparse": [_entry_json(entry) for entry in registry.sparse.entries()],
    }


def _entry_json(entry: Entry[Any]) -> dict[str, Any]:
    return {
        "name": entry.name,
        "state": entry.state,
        "version": entry.version,
        "distribution": entry.distribution,
        "summary": None if entry.info is None else entry.info.summary,
        "cause": entry.cause,
    }


def listing_lines(registry: Registry) -> list[str]:
    """Both kinds of plugins as tables; what cannot be used shows the cause instead of its summary."""
    return [
        *_section("backends", registry.entries()),
        *_section("sparse hooks", registry.sparse.entries()),
    ]


def _section(title: str, entries: Sequence[Entry[Any]]) -> list[str]:
    if not entries:
        return [f"{title}: none installed"]
    rows = [("NAME", "STATE", "VERSION", "DISTRIBUTION", "")]
    rows += [(e.name, e.state, e.version or "-", e.distribution, _remark(e)) for e in entries]
    head, *lines = columns(rows)
    # Coloured last: escape codes have no width.
    return [title, head, *(_coloured(line, entry) for line, entry in zip(lines, entries, strict=True))]


def _remark(entry: Entry[Any]) -> str:
    remark = entry.cause if entry.info is None else entry.info.summary
    return " ".join((remark or "").split())


def _coloured(line: str, entry: Entry[Any]) -> str:
    colours = {"ok": None, "disabled": "yellow"}
    return typer.style(line, fg=colours.get(entry.state, "red"))


def find(registry: Registry, name: str) -> BackendInfo | SparseInfo:
    """The manifest of a backend or sparse hook; raises the RegistryError that tells why it cannot be used."""
    if name in registry.names() or name not in registry.sparse.names():
        try:
            return registry.info(name)
        except UnknownBackend as error:
            names = (*error.available, *registry.sparse.names())
            raise UnknownBackend(name, names, kind="plugin", hints=error.hints) from error
    return registry.sparse.info(name)


def plugin_lines(info: BackendInfo | SparseInfo) -> list[str]:
    """A plugin's whole declaration."""
    source = (
        "this process" if info.distribution is None else f"{info.distribution} {info.version or ''}".strip()
    )
    lines = [f"{info.name}: {info.summary}" if info.summary else info.name]
    facts: list[tuple[str, object]] = [("from", source), ("api", info.api), ("target", info.target)]
    if isinstance(info, BackendInfo):
        facts.append(("priority", info.priority))
        lines += [*columns(facts), *_options(info), *_capabilities(info.capabilities)]
    else:
        lines += [*columns([*facts, *_sparse_facts(info)]), *_options(info)]
    return lines


def _options(info: PluginInfo) -> list[str]:
    if info.options is None:
        return ["options: none"]
    rows = [
        (name, "required" if field.is_required() else f"default {field.default!r}", field.description or "")
        for name, field in info.options.model_fields.items()
    ]
    return ["options", *columns(rows)]


def _capabilities(capabilities: Capabilities) -> list[str]:
    """Every field that a request is checked against; an absent value is a no."""
    rules = ("limits", "declined")
    facts = [
        (name, _value(getattr(capabilities, name)))
        for name in type(capabilities).model_fields
        if name not in rules
    ]
    return [
        "declares (what is not here is not supported)",
        *columns(facts),
        *_rules("limits", map(_limit, capabilities.limits)),
        *_rules("declined", map(_declined, capabilities.declined)),
    ]


def _sparse_facts(info: SparseInfo) -> list[tuple[str, object]]:
    own = [name for name in type(info).model_fields if name not in PluginInfo.model_fields]
    return [(name, "any" if getattr(info, name) is None else _value(getattr(info, name))) for name in own]


def _value(value: Any) -> str:
    if value is None:
        return "no limit"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return "; ".join(f"{key} with pages {pages}" for key, pages in sorted(value.items())) or "none"
    if isinstance(value, (frozenset, tuple)):
        return ", ".join(sorted(map(str, value))) or "none"
    return str(value)


def _rules(title: str, rules: Iterable[str]) -> list[str]:
    lines = [f"  {rule}" for rule in rules]
    return [title, *lines] if lines else []


def _limit(limit: Limit) -> str:
    when = " and ".join(f"{field} is {_allowed(allowed)}" for field, allowed in limit.when.items())
    then = " and ".join(f"{field} must be {_allowed(allowed)}" for field, allowed in limit.then.items())
    return (
        f"{limit.name}: when {when}, {then}: {limit.because}"
        if when
        else f"{limit.name}: {then}: {limit.because}"
    )


def _allowed(allowed: IntSet | tuple[str | bool, ...]) -> str:
    return str(allowed) if isinstance(allowed, IntSet) else " or ".join(map(str, allowed))


def _declined(declined: Declined) -> str:
    return f"{declined.field} {declined.value}: {declined.because}"
