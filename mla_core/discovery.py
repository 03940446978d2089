"""Find the entry points of installed distributions, from metadata alone: nothing is imported.

The parsing is the `entrypoints` package's. The walk is ours, one distribution at a time, so that metadata
that cannot be read costs only its own distribution.
"""

from __future__ import annotations

import configparser
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import entrypoints

__all__ = ["Claim", "canonical", "discover"]


@dataclass(frozen=True)
class Claim:
    """A distribution's claim to a name. `target` None: its metadata cannot be read, `problem` says why.

    When the whole file cannot be read, the distribution's name stands in for the names in it.
    """

    name: str
    distribution: str
    version: str | None = None
    target: str | None = None
    problem: str | None = None
    whole_file: bool = False


@dataclass(frozen=True)
class _Source:
    """How to read the entry_points.txt of one distribution; None: it has none."""

    distribution: str
    version: str | None
    read: Callable[[], bytes] | None


def canonical(distribution: str) -> str:
    """The one spelling of a distribution's name: lower case, runs of `-`, `_` and `.` are one `-`."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def discover(group: str, path: Iterable[str] | None = None) -> list[Claim]:
    """Every claim in an entry-point group, duplicates included; `path` is sys.path unless given.

    A distribution that is found again later on the path is shadowed, as it is for imports.
    """
    seen: set[str] = set()
    claims: list[Claim] = []
    for folder in sys.path if path is None else path:
        for source in _sources(folder or "."):
            if source.distribution not in seen:
                seen.add(source.distribution)
                claims += _claims(source, group)
    return claims


def _sources(folder: str) -> Iterator[_Source]:
    if zipfile.is_zipfile(folder):
        yield from _zipped_sources(folder)
        return
    place = Path(folder)
    found = [*place.glob("*.dist-info"), *place.glob("*.egg-info"), *place.glob("EGG-INFO")]
    for metadata in sorted(found):
        file = metadata / "entry_points.txt"
        name = place.name if metadata.name == "EGG-INFO" else metadata.name
        yield _source(name, file.read_bytes if file.is_file() else None)


def _zipped_sources(file: str) -> Iterator[_Source]:
    with zipfile.ZipFile(file) as archive:
        for member in sorted(archive.namelist()):
            folder, _, name = member.rpartition("/")
            if name == "entry_points.txt" and folder.endswith(("dist-info", "egg-info", "EGG-INFO")):
                egg = Path(file).name
                yield _source(egg if folder == "EGG-INFO" else folder, partial(archive.read, member))


def _source(folder: str, read: Callable[[], bytes] | None) -> _Source:
    stem = re.sub(r"\.(dist-info|egg-info|egg)$", "", folder)
    parsed = entrypoints.Distribution.from_name_version(stem)
    return _Source(canonical(parsed.name), parsed.version, read)


def _claims(source: _Source, group: str) -> Iterator[Claim]:
    if source.read is None:
        return
    try:
        config = entrypoints.CaseSensitiveConfigParser(delimiters=("=",))
        config.read_string(source.read().decode(), source=f"entry_points.txt of {source.distribution}")
    except (configparser.Error, UnicodeDecodeError, OSError, zipfile.BadZipFile) as error:
        problem = f"its entry points cannot be read: {error}"
        name = source.distribution
        yield Claim(name, source.distribution, source.version, problem=problem, whole_file=True)
        return
    for name in config[group] if config.has_section(group) else ():
        yield _claim(source, name, config.get(group, name, raw=True))


def _claim(source: _Source, name: str, text: str) -> Claim:
    try:
        point = entrypoints.EntryPoint.from_string(text, name)
    except entrypoints.BadEntryPoint:
        problem = f"its entry point {text!r} does not parse; write module:ATTRIBUTE"
        return Claim(name, source.distribution, source.version, problem=problem)
    target = f"{point.module_name}:{point.object_name or ''}"
    return Claim(name, source.distribution, source.version, target=target)
