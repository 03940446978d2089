"""Importing, listing and resolving load no torch; importing mla_core loads nothing at all."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import mla_core

ROOMS = (
    "candidates",
    "capabilities",
    "config",
    "config_hf",
    "discovery",
    "errors",
    "intset",
    "manifest",
    "options",
    "plan",
    "plugin_group",
    "registry",
    "request",
    "resolve",
    "spec",
)
RESOLVING = """
from mla_core.registry import Registry
from mla_core.resolve import resolve
from tests.unit import fakes
registry = fakes.registry(fakes.backend("fast"))
print(resolve(fakes.LAYER, "fast", registry=registry, environ={}))
Registry().entries()
"""


def output_of(code: str) -> list[str]:
    """The lines that a fresh interpreter prints."""
    command = [sys.executable, "-c", code]
    paths = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=paths).stdout.splitlines()


def loaded_after(code: str) -> set[str]:
    """Names of the modules that are loaded after a fresh interpreter ran some code."""
    report = "\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    return set(json.loads(output_of(code + report)[-1]))


def test_no_torch_free_room_loads_torch():
    """One interpreter for all of them: the first room that reports True is the culprit."""
    steps = [f"import mla_core.{room}\nprint('torch' in sys.modules)" for room in ROOMS]
    assert dict(zip(ROOMS, output_of("\n".join(["import sys", *steps])), strict=True)) == dict.fromkeys(
        ROOMS, "False"
    )


def test_listing_and_resolving_load_no_torch():
    assert "torch" not in loaded_after(RESOLVING)


def test_the_wall_notices_torch():
    assert "torch" in loaded_after("from mla_core import MLA")


def test_importing_the_package_loads_only_the_package():
    before = loaded_after("import importlib, __future__")
    assert loaded_after("import mla_core") - before == {"mla_core"}


def test_every_public_name_can_be_had():
    assert [name for name in mla_core.__all__ if getattr(mla_core, name) is None] == []


def test_dir_shows_every_public_name():
    assert sorted(set(mla_core.__all__) - set(dir(mla_core))) == []


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'mla_core' has no attribute 'MLAA'"):
        mla_core.MLAA  # noqa: B018


def test_type_checkers_and_users_see_the_same_names():
    """The block under TYPE_CHECKING repeats the table of homes; they must not drift apart."""
    tree = ast.parse(Path(mla_core.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    typed = {(node.module, alias.name) for node in imports for alias in node.names}
    homes = {(f"mla_core.{home}", name) for name, home in mla_core._HOME.items()}
    assert typed == homes | {("mla_core", name) for name in mla_core._MODULES}


def test_all_lists_exactly_what_has_a_home():
    assert sorted(mla_core.__all__) == sorted([*mla_core._HOME, *mla_core._MODULES])


def test_no_public_name_is_also_a_module_of_the_package():
    """Importing mla_core.x sets the attribute x, which would hide a public name x."""
    modules = {path.stem for path in Path(mla_core.__file__).parent.iterdir()}
    assert sorted(set(mla_core._HOME) & modules) == []
