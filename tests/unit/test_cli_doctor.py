"""mla doctor finds what is broken and says how to repair it; a healthy installation has no problems."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from mla_core import registry
from mla_core.cli import doctor
from mla_core.cli.app import app
from mla_core.cli.doctor import diagnose
from tests.unit import fakes


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return fakes.Site(tmp_path)


def problems(found: registry.Registry, **environ: str) -> dict[str, str]:
    """What is wrong, and what to do."""
    return {each.what: each.remedy for each in diagnose(found, environ).problems}


def only(found: registry.Registry, **environ: str) -> tuple[str, str]:
    (problem,) = problems(found, **environ).items()
    return problem


def test_a_healthy_installation_has_no_problems(site):
    site.install("mla_good", "good")
    assert problems(site.registry()) == {}


def test_python_torch_and_plugins_are_reported(site):
    site.install("mla_good", "good", version="3.0")
    found = diagnose(site.registry(), {}).as_json()
    assert found["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert found["torch"]["version"] == sys.modules["torch"].__version__
    assert found["plugins"] == {"good (mla-good 3.0)": "ok"}


def test_variables_that_act_are_reported_and_blank_ones_are_not(site):
    site.install("mla_good", "good")
    found = diagnose(site.registry(), {"MLA_BACKEND": "good", "MLA_DISABLE": " "})
    assert found.variables == {"MLA_BACKEND": "good"}
    assert "MLA_BACKEND  good" in str(found)


def test_a_broken_plugin_is_a_problem_with_its_cause(site):
    site.install("mla_good", "good")
    site.install("mla_sick", "sick", "1 / 0")
    assert only(site.registry()) == (
        "plugin sick of mla-sick is broken: ZeroDivisionError: division by zero",
        "repair or uninstall mla-sick, or set MLA_DISABLE=sick",
    )


def test_a_name_claimed_twice_is_a_problem_for_both(site):
    site.install("mla_good", "good")
    site.install("mla_one", "twin")
    site.install("mla_two", "twin")
    assert sorted(problems(site.registry())) == [
        "plugin twin of mla-one is duplicate: also claimed by mla-two",
        "plugin twin of mla-two is duplicate: also claimed by mla-one",
    ]


def test_a_disabled_plugin_is_no_problem(site):
    site.install("mla_good", "good")
    site.install("mla_sick", "sick", "1 / 0")
    assert problems(site.registry(MLA_DISABLE="sick"), MLA_DISABLE="sick") == {}


def test_no_usable_backend_is_a_problem():
    assert only(fakes.registry())[0] == "no backend can be used: no layer can be built"


def test_kernels_that_do_not_load_are_a_problem_on_a_device_that_is_here(site):
    source = fakes.MANIFEST.replace("{module}:Kernels", "nowhere_at_all:Kernels")
    site.install("mla_hollow", "hollow", source)
    what, remedy = only(site.registry())
    assert "loading nowhere_at_all:Kernels failed: ModuleNotFoundError" in what
    assert remedy == "repair or uninstall mla-hollow, or set MLA_DISABLE=hollow"


def test_kernels_for_a_device_that_is_not_here_are_not_loaded(site):
    site.install("mla_good", "good")
    source = fakes.MANIFEST.replace("{module}:Kernels", "nowhere_at_all:Kernels").replace('"cpu"', '"sm_10"')
    site.install("mla_far", "far", source)
    assert problems(site.registry()) == {}


ABSENT = {"requires": ["no-such-package>=2"]}
ABSENT_TEXT = ("picky requires no-such-package>=2: not installed", "pip install 'no-such-package>=2'")


def notes(found: registry.Registry, **environ: str) -> list[tuple[str, str]]:
    return [(each.what, each.remedy) for each in diagnose(found, environ).notes]


def test_an_absent_package_of_a_backend_that_nobody_names_is_a_note():
    found = fakes.registry(fakes.backend("picky", **ABSENT, **fakes.GPU), fakes.backend("other", **fakes.GPU))
    assert (problems(found), notes(found)) == ({}, [ABSENT_TEXT])


def test_an_absent_package_of_the_backend_that_mla_backend_names_is_a_problem():
    found = fakes.registry(fakes.backend("picky", **ABSENT, **fakes.GPU), fakes.backend("other", **fakes.GPU))
    assert only(found, MLA_BACKEND="picky|other") == ABSENT_TEXT
    assert notes(found, MLA_BACKEND="picky|other") == []


def test_an_absent_package_leaves_no_backend_to_use():
    found = fakes.registry(fakes.backend("picky", **ABSENT, **fakes.GPU))
    assert only(found)[0] == "no backend can be used: no layer can be built"
    assert notes(found) == [ABSENT_TEXT]


def test_notes_are_shown_and_do_not_count_as_problems(monkeypatch):
    found = fakes.registry(fakes.backend("picky", **ABSENT, **fakes.GPU), fakes.backend("other", **fakes.GPU))
    monkeypatch.setattr(registry, "_default", found)
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0
    assert ABSENT_TEXT[0] in shown.output
    assert shown.output.strip().endswith("no problems found")


DOCTOR = """
from mla_core.request import Reason


def missing():
    return [Reason(field="compiler", wanted="one", offered="none", hint="install one")]


def healthy():
    return []


def sick():
    return 1 / 0


def odd():
    return ["a compiler"]
"""
NEEDS = ("picky needs compiler: wanted one, found none", "install one")


def examined(site, function: str, **declared: object) -> registry.Registry:
    """A registry with a backend that has a doctor, and one that nothing is wrong with."""
    info = fakes.backend("picky", **{**fakes.GPU, **declared})
    doctor = f"{site.module(DOCTOR)}:{function}"
    return fakes.registry(info.model_copy(update={"doctor": doctor}), fakes.backend("other", **fakes.GPU))


def test_what_a_plugins_doctor_finds_for_a_device_that_is_not_here_is_a_note(site):
    found = examined(site, "missing")
    assert (problems(found), notes(found)) == ({}, [NEEDS])


def test_what_a_plugins_doctor_finds_is_a_problem_when_its_backend_serves_here(site):
    source = fakes.MANIFEST.replace("{module}:Kernels", '{module}:Kernels", doctor="{module}:check')
    source += DOCTOR.replace("def missing", "def check")
    site.install("mla_picky", "picky", source)
    assert only(site.registry()) == NEEDS


def test_what_a_plugins_doctor_finds_is_a_problem_when_its_backend_is_named(site):
    assert only(examined(site, "missing"), MLA_BACKEND="picky") == NEEDS


def test_a_doctor_that_finds_nothing_is_silent(site):
    found = examined(site, "healthy")
    assert (problems(found), notes(found)) == ({}, [])


@pytest.mark.parametrize(
    ("function", "cause"),
    [("sick", "ZeroDivisionError: division by zero"), ("odd", "which is no list of Reason"), ("no", "'no'")],
)
def test_a_doctor_that_fails_is_reported_with_its_cause(site, function, cause):
    ((what, _),) = notes(examined(site, function))
    assert cause in what


@pytest.mark.parametrize(
    ("declared", "what", "remedy"),
    [
        (
            {"requires": ["pytest<1"]},
            f"picky requires pytest<1: {pytest.__version__}",
            "pip install 'pytest<1'",
        ),
        (
            {"known_bad": [f"pytest=={pytest.__version__}"]},
            f"picky requires not pytest=={pytest.__version__}: {pytest.__version__}",
            "install another version of pytest",
        ),
    ],
    ids=["too new", "known bad"],
)
def test_a_package_of_another_version_is_a_problem(declared, what, remedy):
    infos = (fakes.backend("picky", **declared), fakes.backend("other", **fakes.GPU))
    assert only(fakes.registry(*infos)) == (what, remedy)


def test_a_package_that_holds_is_reported():
    found = diagnose(fakes.registry(fakes.backend("picky", requires=["pytest>=1"])), {})
    assert [(need.requirement, need.holds) for need in found.packages] == [("pytest>=1", True)]


def test_a_requirement_of_another_platform_is_passed_over():
    declared = {"requires": ['no-such-package; python_version < "3"']}
    assert diagnose(fakes.registry(fakes.backend("picky", **declared)), {}).packages == ()


@pytest.mark.parametrize(
    ("variable", "value", "what"),
    [
        ("MLA_BACKEND", "good|", "MLA_BACKEND cannot be used: MLA_BACKEND: expected a backend name"),
        ("MLA_BACKEND", "goood", "MLA_BACKEND cannot be used: unknown backend 'goood'"),
        ("MLA_BACKEND", "good+hook", "MLA_BACKEND cannot be used: unknown sparse hook 'hook'"),
        ("MLA_DISABLE", "other", "MLA_DISABLE names 'other', which is not installed"),
        ("MLA_PLUGINS", "mla-good, mla-other", "MLA_PLUGINS names 'mla-other', which is not installed"),
    ],
)
def test_a_variable_that_names_nothing_is_a_problem(site, variable, value, what):
    site.install("mla_good", "good")
    found = problems(site.registry(**{variable: value}), **{variable: value})
    assert [each for each in found if each.startswith(what)], found


def test_a_trusted_distribution_may_be_spelled_in_any_way(site):
    site.install("mla_good", "good")
    assert problems(site.registry(MLA_PLUGINS="MLA.Good"), MLA_PLUGINS="MLA.Good") == {}


def test_a_torch_that_cannot_be_imported_is_a_problem(site, monkeypatch):
    site.install("mla_good", "good")
    monkeypatch.setitem(sys.modules, "torch", None)
    what, remedy = only(site.registry())
    assert what.startswith("torch cannot be used: ModuleNotFoundError")
    assert remedy.startswith("reinstall torch")


def test_a_requirement_of_the_core_that_does_not_hold_is_a_problem(site, monkeypatch):
    site.install("mla_good", "good")
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["no-such-package>=1"])
    what = "mla-core requires no-such-package>=1: it is not installed"
    assert only(site.registry()) == (what, "pip install 'no-such-package>=1'")


@pytest.mark.parametrize(("sick", "code"), [(False, 0), (True, 1)], ids=["healthy", "sick"])
def test_the_exit_code_tells_whether_something_is_broken(site, monkeypatch, sick, code):
    site.install("mla_good", "good")
    if sick:
        site.install("mla_sick", "sick", "1 / 0")
    monkeypatch.setattr(registry, "_default", site.registry())
    shown = CliRunner().invoke(app, ["doctor", "--json"])
    assert shown.exit_code == code
    assert len(json.loads(shown.stdout)["problems"]) == code


def test_the_text_ends_with_problems_and_remedies(site):
    site.install("mla_good", "good")
    site.install("mla_sick", "sick", "1 / 0")
    assert str(diagnose(site.registry(), {})).splitlines()[-3:] == [
        "problems: 1",
        "  plugin sick of mla-sick is broken: ZeroDivisionError: division by zero",
        "    repair or uninstall mla-sick, or set MLA_DISABLE=sick",
    ]
