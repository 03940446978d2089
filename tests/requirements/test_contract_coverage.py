"""Every hook and every field of a declaration is exercised by some test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mla_core import Capabilities
from mla_core.hooks import HookSpecs
from tests.requirements.test_r17_selection import REFUSALS
from tests.unit.house_rules import broken_test_references, project_files

HOOKS = sorted(name for name in vars(HookSpecs) if not name.startswith("_"))
# Fields that a layer cannot ask for by itself yet, and the test that has a case for every field.
BY_REQUEST = dict.fromkeys(
    ("cuda_graph", "deterministic", "batch_invariant", "sparse"),
    "tests/unit/test_request.py::test_every_field_of_capabilities_has_a_case",
)
BY_OWNER = {
    "owns": "tests/unit/test_bind.py::test_an_owner_of_a_stage_gives_the_oracles_result_in_every_phase"
}


def implemented_hooks(path: Path) -> set[str]:
    """Names of the methods that a file marks with @hookimpl."""
    functions = [
        n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)
    ]
    return {
        function.name
        for function in functions
        if any("hookimpl" in ast.dump(d) for d in function.decorator_list)
    }


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_implemented_by_a_plugin_of_the_tests(hook):
    files = project_files("tests/unit/test_hooks.py")
    assert hook in implemented_hooks(files[0]), f"tests/unit/test_hooks.py implements no {hook}"


def test_a_hook_without_a_plugin_would_be_noticed(tmp_path):
    planted = tmp_path / "planted.py"
    planted.write_text("class P:\n    @hookimpl\n    def gate(self): ...\n    def attend(self): ...\n")
    assert implemented_hooks(planted) == {"gate"}


@pytest.mark.parametrize("field", sorted(Capabilities.model_fields))
def test_every_field_of_a_declaration_is_refused_somewhere(field):
    assert field in REFUSALS.keys() | BY_REQUEST.keys() | BY_OWNER.keys()


@pytest.mark.parametrize("reference", sorted({*BY_REQUEST.values(), *BY_OWNER.values()}))
def test_the_tests_that_stand_in_exist(reference):
    assert broken_test_references(reference) == []
