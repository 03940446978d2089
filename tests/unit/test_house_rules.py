"""The rules of the house, checked on every file; each checker is also shown an offence."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from tests.unit import house_rules as rules

ROOT = rules.ROOT
PYTHON_FILES = rules.project_files("*.py")
CORE_FILES = [path for path in PYTHON_FILES if path.is_relative_to(ROOT / "mla_core")]
PUBLIC_NAMES = (Path(__file__).parent / "public_names.txt").read_text(encoding="utf-8").split()
IMPORT_BUDGET_SECONDS = 0.15
# Modules that export names to the rest of the core only; plugins and users may not rely on them.
INTERNAL = {
    f"mla_core.{name}"
    for name in (
        "admission",
        "bind",
        "candidates",
        "checkpoint_names",
        "checkpoint_weights",
        "checkpoint_writer",
        "chunks",
        "config_hf",
        "device",
        "discovery",
        "intset",
        "layer_request",
        "options",
        "planner",
        "plugin_group",
        "projections",
        "projections_quantised",
        "step",
        "weight_places",
        "weights",
        "weights_quantised",
    )
}
TORCH_FREE = (
    "mla_core",
    "mla_core.errors",
    "mla_core.capabilities",
    "mla_core.request",
    "mla_core.config",
    "mla_core.config_hf",
    "mla_core.spec",
    "mla_core.manifest",
    "mla_core.registry",
    "mla_core.plan",
    "mla_core.resolve",
)


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def plugin_files(*parts: str) -> list[tuple[str, Path]]:
    """(own package, file) of every plugin file below the given folders."""
    split = [(path.relative_to(ROOT).parts, path) for path in PYTHON_FILES]
    return [(f"mla_{names[1]}", path) for names, path in split if names[0] == "plugins" and names[2] in parts]


@pytest.fixture
def planted(tmp_path: Path):
    """Write a file with the given source, so that a checker can be shown an offence."""

    def write(source: str) -> Path:
        path = tmp_path / "planted.py"
        path.write_text(source, encoding="utf-8")
        return path

    return write


def test_no_python_file_is_longer_than_400_lines():
    assert PYTHON_FILES, "git lists no python file: the rules would judge nothing"
    assert rules.oversized(PYTHON_FILES) == []


@pytest.mark.parametrize(("lines", "offences"), [(400, 0), (401, 1)])
def test_the_length_rule_allows_400_lines_and_reports_401(planted, lines, offences):
    assert len(rules.oversized([planted("x = 1\n" * lines)])) == offences


def test_torch_free_rooms_do_not_import_torch():
    steps = [f"import {room}\nprint({room!r}, 'torch' in sys.modules)" for room in TORCH_FREE]
    assert run_python("\n".join(["import sys", *steps])).splitlines() == [
        f"{room} False" for room in TORCH_FREE
    ]


def test_mypy_checks_every_module_that_the_torch_free_rooms_load():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    checked = {path for pattern in settings["files"] for path in ROOT.glob(pattern)}
    imported = "\n".join(f"import {room}" for room in TORCH_FREE)
    ours = "[m.__file__ for name, m in sys.modules.items() if name.split('.')[0] == 'mla_core']"
    loaded = {Path(name) for name in run_python(f"import sys\n{imported}\nprint(*{ours}, sep='\\n')").split()}
    assert sorted(map(str, loaded - checked)) == []


def test_a_plugin_imports_only_its_own_package_and_public_names_of_the_core():
    public = set(PUBLIC_NAMES)
    third_party = [("mla_tiny", path) for path in PYTHON_FILES if "tiny_backend" in path.parts]
    judged = [*plugin_files("src"), *third_party]
    assert [x for own, path in judged for x in rules.foreign_to_plugin(path, own, public)] == []


@pytest.mark.parametrize(
    "source",
    [
        "from mla_core.layer import _secret",
        "import mla_core.stages.attend",
        "from mla_core.errors import not_published",
        "import mla_other",
        "def late():\n    from mla_other.backend import Other",
    ],
)
def test_the_plugin_import_rule_reports_private_names_and_other_plugins(planted, source):
    assert len(rules.foreign_to_plugin(planted(source), "mla_mine", {"mla_core.errors.MLAError"})) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from mla_core.errors import MLAError",
        "import mla_core.errors",
        "import mla_core",
        "from mla_mine.backend import Mine",
        "import torch",
    ],
)
def test_the_plugin_import_rule_allows_public_names_and_the_own_package(planted, source):
    assert rules.foreign_to_plugin(planted(source), "mla_mine", {"mla_core.errors.MLAError"}) == []


def test_the_core_imports_no_plugin():
    assert [x for path in CORE_FILES for x in rules.mla_imports_outside(path, ("mla_core",))] == []


def test_the_oracle_imports_no_other_tensor_room():
    oracle = [path for path in CORE_FILES if path.is_relative_to(ROOT / "mla_core/reference")]
    allowed = ("mla_core.reference", *TORCH_FREE[1:])
    assert oracle, "mla_core/reference has no files"
    assert [x for path in oracle for x in rules.mla_imports_outside(path, allowed)] == []


@pytest.mark.parametrize("source", ["from mla_core.stages import rope", "from mla_core import MLA"])
def test_the_oracle_import_rule_reports_another_room(planted, source):
    assert len(rules.mla_imports_outside(planted(source), ("mla_core.reference", "mla_core.errors"))) == 1


def test_the_core_names_no_backend():
    judged = [path for path in CORE_FILES if not path.is_relative_to(ROOT / "mla_core/cli")]
    assert [x for path in judged for x in rules.backend_names(path)] == []


@pytest.mark.parametrize(
    ("source", "offences"),
    [
        ('if backend == "vanilla":\n    pass', 1),
        ("use_flashinfer = True", 1),
        ("def trtllm_path(): ...", 1),
        ('def f():\n    """As in vanilla[x=1]."""\n    return 1  # like flashinfer', 0),
    ],
)
def test_the_backend_name_rule_reads_code_and_not_documentation(planted, source, offences):
    assert len(rules.backend_names(planted(source))) == offences


def test_the_core_does_not_probe_with_hasattr():
    assert [x for path in CORE_FILES for x in rules.hasattr_probes(path)] == []


def test_the_hasattr_rule_reports_a_probe(planted):
    assert len(rules.hasattr_probes(planted("fast = hasattr(backend, 'fast')"))) == 1


def test_public_modules_export_exactly_the_listed_names():
    """Adding a public name is a review topic: it needs a line in public_names.txt."""
    modules = sorted({name.rpartition(".")[0] for name in PUBLIC_NAMES})
    exported = {f"{module}.{name}" for module in modules for name in exported_names(module)}
    assert sorted(exported) == sorted(PUBLIC_NAMES)


def test_every_module_at_the_top_of_the_core_is_either_public_or_internal():
    listed = {name.rpartition(".")[0] for name in PUBLIC_NAMES}
    top = [path for path in CORE_FILES if path.parent == ROOT / "mla_core" and not path.name.startswith("_")]
    exporting = {rules.module_name(path) for path in top if rules.declared_all(path)}
    assert sorted(exporting - listed) == sorted(INTERNAL)


def exported_names(module: str) -> list[str]:
    folder = ROOT / module.replace(".", "/")
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return rules.declared_all(path) or []


def test_tracked_files_hold_no_absolute_machine_paths():
    assert rules.machine_paths(rules.project_files()) == []


@pytest.mark.parametrize("root", ["home", "root", "work", "Users", "opt", "mnt"])
def test_the_machine_path_rule_reports_a_path_in_a_string(planted, root):
    assert len(rules.machine_paths([planted(f'cache = "/{root}/somebody/cache"')])) == 1


@pytest.mark.parametrize("source", ["https://example.org/home/page", "docs/work/plan.md", "$ROOT/home/x"])
def test_the_machine_path_rule_allows_addresses_and_relative_paths(planted, source):
    assert rules.machine_paths([planted(source)]) == []


@pytest.mark.parametrize("target", ["make demo", "make test"])
def test_the_readme_shows_how_to_run_the_demo_and_the_tests(target):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^\s*{target}\b", readme, re.MULTILINE), f"README.md does not show `{target}`"
    assert re.search(rf"^{target.split()[1]}:", makefile, re.MULTILINE), f"Makefile lacks {target}"


def test_every_test_named_in_the_feature_table_exists():
    document = (ROOT / "docs/features.md").read_text(encoding="utf-8")
    assert rules.broken_test_references(document) == []


@pytest.mark.parametrize(
    ("reference", "broken"),
    [
        ("tests/unit/test_house_rules.py::test_the_hasattr_rule_reports_a_probe", False),
        ("tests/unit/test_house_rules.py::test_that_nobody_wrote", True),
        ("tests/unit/test_nowhere.py::test_the_hasattr_rule_reports_a_probe", True),
        ("tests/unit/house_rules.py::Import::dotted", False),
        ("tests/unit/house_rules.py::Import::undotted", True),
    ],
)
def test_the_feature_table_rule_finds_references_without_a_test(reference, broken):
    assert bool(rules.broken_test_references(f"| 17 | YaRN scale | `{reference}` |")) is broken


def cpu_seconds(statement: str, runs: int = 5) -> float:
    """CPU time of an interpreter that runs one statement; wall time would measure the neighbours."""
    code = f"{statement}\nimport time\nprint(time.process_time())"
    return statistics.median(float(run_python(code)) for _ in range(runs))


def test_importing_the_core_is_fast():
    spent = cpu_seconds("import mla_core") - cpu_seconds("pass")
    assert spent < IMPORT_BUDGET_SECONDS, f"import mla_core takes {spent:.3f} s of CPU time"


def test_the_import_clock_notices_torch():
    assert cpu_seconds("import torch", runs=1) - cpu_seconds("pass", runs=1) > IMPORT_BUDGET_SECONDS
