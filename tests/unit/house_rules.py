"""The house rules as functions from files to offences; an empty list means clean."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES = 400
BACKEND_NAME = re.compile(r"vanilla|flashinfer|trtllm|sparse_dsa", re.IGNORECASE)
MACHINE_PATH = re.compile(r"(?<![\w.$~{}/-])/(?:work|home|root|Users|opt|mnt)/\w")
TEST_REFERENCE = re.compile(r"([\w./-]+\.py)::(\w+(?:::\w+)*)")


class Import(NamedTuple):
    """One imported name: `from mla_core.errors import MLAError` is ("mla_core.errors", "MLAError")."""

    module: str
    name: str | None

    @property
    def dotted(self) -> str:
        return self.module if self.name is None else f"{self.module}.{self.name}"


def project_files(pattern: str = "*") -> list[Path]:
    """Every file of the project that git does not ignore, committed or about to be."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", pattern]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def oversized(paths: Iterable[Path]) -> list[str]:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    return [f"{label(path)}: {count} lines" for path, count in lengths.items() if count > MAX_LINES]


def imports(path: Path) -> list[Import]:
    """Every import of a file, wherever it stands; relative ones are banned by ruff."""
    return list(_imports(ast.parse(path.read_text(encoding="utf-8"))))


def _imports(tree: ast.AST) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(node.module or "", alias.name) for alias in node.names)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def foreign_to_plugin(path: Path, own: str, public: set[str]) -> list[str]:
    """Imports a plugin may not have: another plugin, or a name that mla_core does not publish."""
    offences = []
    for item in imports(path):
        if within(item.module, "mla_core"):
            allowed = item.dotted in public or (item.name is None and _publishes(item.module, public))
        else:
            allowed = not item.module.startswith("mla_") or within(item.module, own)
        if not allowed:
            offences.append(f"{label(path)}: {item.dotted}")
    return offences


def _publishes(module: str, public: set[str]) -> bool:
    return any(name.startswith(f"{module}.") for name in public)


def mla_imports_outside(path: Path, allowed: tuple[str, ...]) -> list[str]:
    """Imports of our own packages that lie outside the allowed ones."""
    ours = [item for item in imports(path) if item.module.split(".")[0].startswith("mla_")]
    return [
        f"{label(path)}: {item.dotted}"
        for item in ours
        if not any(within(item.module, package) or within(item.dotted, package) for package in allowed)
    ]


def backend_names(path: Path) -> list[str]:
    """Backend names in code: identifiers and strings count, docstrings and comments are documentation."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(text) for node in ast.walk(tree) if (text := _docstring(node)) is not None}
    return [
        f"{label(path)}:{getattr(node, 'lineno', 0)}: {text}"
        for node in ast.walk(tree)
        if id(node) not in prose
        for text in _texts(node)
        if BACKEND_NAME.search(text)
    ]


def _docstring(node: ast.AST) -> ast.Constant | None:
    first = getattr(node, "body", None)
    if isinstance(first, list) and first and isinstance(first[0], ast.Expr):
        value = first[0].value
        return value if isinstance(value, ast.Constant) else None
    return None


def _texts(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    fields = ("id", "attr", "name", "arg", "module")
    return [text for field in fields if isinstance(text := getattr(node, field, None), str)]


def hasattr_probes(path: Path) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        f"{label(path)}:{node.lineno}: hasattr"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"
    ]


def machine_paths(paths: Iterable[Path]) -> list[str]:
    """Absolute paths of somebody's machine in text files; files that are not text are passed over."""
    return [
        f"{label(path)}:{number}: {line.strip()[:100]}"
        for path in paths
        for number, line in enumerate(_lines(path), start=1)
        if MACHINE_PATH.search(line)
    ]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []


def broken_test_references(document: str) -> list[str]:
    """`path::test_name` references of a document whose file or function does not exist."""
    references = TEST_REFERENCE.findall(document)
    return [f"{path}::{name}" for path, name in references if not _test_exists(ROOT / path, name)]


def _test_exists(path: Path, name: str) -> bool:
    if not path.is_file():
        return False
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("::"):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not found:
            return False
        body = found[-1].body
    return True


def declared_all(path: Path) -> list[str] | None:
    """A module's literal `__all__`, or None when it has none."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return [str(name) for name in ast.literal_eval(node.value)]
    return None


def module_name(path: Path) -> str:
    """`mla_core/cache/pool.py` is mla_core.cache.pool, a package's __init__.py is the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
