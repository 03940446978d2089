"""`mla new`: a complete plugin package with one working kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from mla_core.errors import ConfigError
from mla_core.manifest import RESERVED
from mla_core.registry import Registry

if TYPE_CHECKING:
    # Where it lives depends on the version of Python.
    from importlib.abc import Traversable

__all__ = ["create"]

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
# Names that a package of templates cannot have, or that would be taken for the project's own.
_RENAMED = {"github": ".github", "gitignore": ".gitignore"}
_SUFFIX = ".txt"


def create(name: str, into: Path, registry: Registry) -> list[Path]:
    """Write the package into `into`/mla-NAME; returns its files. Raises ConfigError for a name or folder that
    cannot be used.
    """
    _check_name(name, registry)
    distribution = f"mla-{name.replace('_', '-')}"
    folder = into / distribution
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; choose another name or --into")
    values = {
        "name": name,
        "distribution": distribution,
        "package": f"mla_{name}",
        "class_name": "".join(word.capitalize() for word in name.split("_")),
    }
    template = resources.files("mla_core.cli").joinpath("template")
    return [_write(source, folder / place, values) for source, place in _files(template, values["package"])]


def _check_name(name: str, registry: Registry) -> None:
    if not _NAME.fullmatch(name) or name in RESERVED:
        raise ConfigError(
            f"{name!r} cannot name a backend: small letters, digits and single underscores, a letter first, "
            f"and none of {', '.join(RESERVED)}; for example my_backend"
        )
    if name in registry.names():
        raise ConfigError(f"a backend {name!r} is installed already; choose another name")


def _files(template: Traversable, package: str) -> Iterator[tuple[Traversable, Path]]:
    """Every template with the place of its file; what lies in src goes into the package there."""
    for folder in template.iterdir():
        if folder.is_file():
            yield folder, _place(Path(folder.name))
        else:
            inside = Path("src", package) if folder.name == "src" else Path(_renamed(folder.name))
            yield from _below(folder, inside)


def _below(folder: Traversable, place: Path) -> Iterator[tuple[Traversable, Path]]:
    for item in folder.iterdir():
        if item.is_file():
            yield item, place / _place(Path(item.name))
        else:
            yield from _below(item, place / item.name)


def _place(name: Path) -> Path:
    return Path(_renamed(name.name.removesuffix(_SUFFIX)))


def _renamed(name: str) -> str:
    return _RENAMED.get(name, name)


def _write(source: Traversable, target: Path, values: dict[str, str]) -> Path:
    text = source.read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", value)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    return target
