"""What the distributions contain and declare."""

from __future__ import annotations

import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.packaging.installation import ROOT
from tests.unit.house_rules import project_files

PACKAGES = {"mla-core": ROOT / "mla_core", "mla-vanilla": ROOT / "plugins/vanilla/src/mla_vanilla"}


def contents(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def read(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [member for member in archive.namelist() if member.endswith(f".dist-info/{name}")]
        return archive.read(member).decode()


def metadata(wheel: Path) -> Message:
    return Parser().parsestr(read(wheel, "METADATA"))


def required(wheel: Path) -> set[str]:
    """Names of the distributions that a plain installation pulls in."""
    lines = metadata(wheel).get_all("Requires-Dist") or []
    return {line.split(">")[0].split("<")[0].strip() for line in lines if "extra ==" not in line}


@pytest.mark.parametrize("distribution", PACKAGES)
def test_a_wheel_holds_every_file_of_its_package_and_nothing_else(wheels, distribution):
    package = PACKAGES[distribution]
    wanted = {
        path.relative_to(package.parent).as_posix() for path in project_files() if package in path.parents
    }
    shipped = {name for name in contents(wheels[distribution]) if ".dist-info/" not in name}
    assert wanted, f"{package} has no files"
    assert shipped == wanted


@pytest.mark.parametrize("distribution", PACKAGES)
def test_a_wheel_carries_the_licence(wheels, distribution):
    assert read(wheels[distribution], "licenses/LICENSE") == (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_the_core_depends_on_no_kernel_package_and_no_plugin(wheels):
    assert required(wheels["mla-core"]) == {
        "entrypoints",
        "packaging",
        "pluggy",
        "pydantic",
        "rich",
        "safetensors",
        "torch",
        "typer",
    }


def test_the_core_installs_the_mla_command(wheels):
    assert read(wheels["mla-core"], "entry_points.txt").split("\n\n")[0].strip() == (
        "[console_scripts]\nmla = mla_core.cli:main"
    )


def test_the_core_declares_its_annotations(wheels):
    assert "mla_core/py.typed" in contents(wheels["mla-core"])


def test_the_vanilla_plugin_is_found_by_its_entry_point(wheels):
    assert read(wheels["mla-vanilla"], "entry_points.txt").strip() == (
        "[mla_core.backends]\nvanilla = mla_vanilla.manifest:INFO"
    )


def test_the_vanilla_plugin_depends_on_the_core_and_torch_only(wheels):
    assert required(wheels["mla-vanilla"]) == {"mla-core", "torch"}


def test_the_plugins_licence_is_the_projects():
    project = (ROOT / "LICENSE").read_text(encoding="utf-8")
    licences = list(ROOT.glob("plugins/*/LICENSE"))
    assert licences, "no plugin carries a licence"
    assert [path for path in licences if path.read_text(encoding="utf-8") != project] == []
