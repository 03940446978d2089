"""Which plugins exist: discovered from metadata, described by their manifests, loaded when chosen.

Three steps, each with its own error. *Discover* reads metadata only. *Describe* imports a manifest, which
loads no kernel and no torch. *Load* imports what the manifest names as its target. A plugin that fails a step
fails alone: it is listed with its cause, and the error is raised when somebody names it.

The functions of this module act on the process's own `Registry`. The environment variables `MLA_PLUGINS`
(distributions to trust, by comma) and `MLA_DISABLE` (names to hide, by comma) filter it; they are read at
every call, and a blank one counts as not set.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from mla_core.manifest import BackendInfo, SparseInfo
from mla_core.plugin_group import Entry, PluginGroup

__all__ = [
    "Entry",
    "Registry",
    "add",
    "default",
    "entries",
    "info",
    "load",
    "names",
    "refresh",
    "remove",
    "sparse",
]

BACKENDS = "mla_core.backends"
SPARSE = "mla_core.sparse"
FILTERS = ("MLA_PLUGINS", "MLA_DISABLE")


class Registry:
    """Dense backends, and under `.sparse` the sparse hooks. Safe to use from several threads.

    `path` is where to look for installed distributions, sys.path unless given.
    """

    def __init__(
        self, *, path: Iterable[str] | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self.environ = os.environ if environ is None else environ
        folders = None if path is None else tuple(path)
        self.backends = PluginGroup(BACKENDS, "backend", BackendInfo, self.environ, folders)
        self.sparse = PluginGroup(SPARSE, "sparse hook", SparseInfo, self.environ, folders)

    def under(self, environ: Mapping[str, str]) -> Registry:
        """A view of the same plugins, filtered by other environment variables."""
        view = Registry(environ=environ)
        view.backends, view.sparse = self.backends.under(environ), self.sparse.under(environ)
        return view

    def names(self) -> list[str]:
        """Every backend name that can be asked for, from metadata alone."""
        return self.backends.names()

    def entries(self) -> list[Entry[BackendInfo]]:
        """Every claim to a backend name with its state and cause, broken and duplicate ones included."""
        return self.backends.entries()

    def info(self, name: str) -> BackendInfo:
        """The manifest of a backend. Raises a RegistryError."""
        return self.backends.info(name)

    def load(self, name: str) -> Any:
        """Import a backend's kernels; returns the target its manifest names. Raises a RegistryError."""
        return self.backends.load(name)

    def add(self, info: BackendInfo | SparseInfo, *, override: bool = False) -> None:
        """Register a backend or sparse hook in this process; a taken name is an error unless `override`."""
        if isinstance(info, BackendInfo):
            self.backends.add(info, override=override)
        else:
            self.sparse.add(info, override=override)

    def remove(self, name: str) -> None:
        """Undo `add`; or hide an installed backend in this process."""
        self.backends.remove(name)

    def refresh(self) -> None:
        """Look again at what is installed; what `add` and `remove` did stays."""
        self.backends.refresh()
        self.sparse.refresh()

    def filters(self) -> dict[str, str]:
        """The environment variables that hide at least one plugin, with their values."""
        groups = (self.backends, self.sparse)
        return {name: self.environ[name] for name in FILTERS if any(g.hidden_by(name) for g in groups)}


_default = Registry()


def default() -> Registry:
    """The process's own registry."""
    return _default


sparse = _default.sparse
names = _default.names
entries = _default.entries
info = _default.info
load = _default.load
add = _default.add
remove = _default.remove
refresh = _default.refresh
