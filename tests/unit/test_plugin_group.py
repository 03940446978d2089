"""Discover, describe, load: what is imported when, and one plugin's trouble stays its own."""

from __future__ import annotations

import sys

import pytest

from mla_core.errors import BrokenPlugin, IncompatiblePlugin
from mla_core.registry import Registry
from tests.unit import fakes
from tests.unit.fakes import message


@pytest.fixture
def site(tmp_path, monkeypatch) -> fakes.Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    return fakes.Site(tmp_path)


def test_names_are_listed_without_importing_any_manifest(site):
    module = site.install("mla_fast", "fast")
    assert (site.registry().names(), module in sys.modules) == (["fast"], False)


def test_an_installed_backend_is_described_with_its_distribution_and_version(site):
    site.install("mla_fast", "fast", version="2.1")
    info = site.registry().info("fast")
    assert (info.name, info.distribution, info.version) == ("fast", "mla-fast", "2.1")


def test_the_entry_of_a_usable_backend_carries_its_manifest(site):
    site.install("mla_fast", "fast", version="2.1")
    (entry,) = site.registry().entries()
    assert (entry.name, entry.distribution, entry.version, entry.state, entry.cause, entry.info.name) == (
        "fast",
        "mla-fast",
        "2.1",
        "ok",
        None,
        "fast",
    )


def test_a_manifest_may_be_made_by_a_function(site):
    function = fakes.MANIFEST.replace("INFO = ", "def info():\n    return ")
    site.install("mla_fast", "fast", function, attribute="info")
    assert site.registry().info("fast").name == "fast"


def test_loading_gives_the_target_of_the_manifest(site):
    module = site.install("mla_fast", "fast")
    assert site.registry().load("fast") is sys.modules[module].Kernels


def test_an_unknown_name_lists_what_exists_and_suggests_the_closest(site):
    site.install("mla_fast", "fast")
    site.install("mla_slow", "slow")
    assert message(site.registry().info, "fsat") == (
        "unknown backend 'fsat'; installed: fast, slow\n  did you mean 'fast'?"
    )


def test_an_unknown_name_that_is_like_no_other_gets_no_suggestion(site):
    site.install("mla_fast", "fast")
    assert message(site.registry().info, "zzz") == "unknown backend 'zzz'; installed: fast"


def test_an_unknown_name_mentions_a_distribution_whose_metadata_cannot_be_read(site):
    site.metadata("mla_bad", "[mla_core.backends\n")
    told = message(site.registry().info, "zzz")
    assert told.startswith(
        "unknown backend 'zzz'; installed: none\n  mla-bad may have it, but its entry points cannot be read: "
    )


def test_a_name_from_two_distributions_is_an_error_when_it_is_used(site):
    site.install("mla_one", "fast")
    site.install("mla_two", "fast")
    assert message(site.registry().info, "fast") == (
        "backend 'fast' is claimed by mla-one and mla-two\n"
        "  uninstall all but one, or name the distributions to trust in MLA_PLUGINS"
    )


def test_a_name_from_two_distributions_disturbs_no_other_name(site):
    site.install("mla_one", "fast")
    site.install("mla_two", "fast")
    site.install("mla_slow", "slow")
    registry = site.registry()
    assert registry.info("slow").name == "slow"
    assert [(e.name, e.state, e.cause) for e in registry.entries()] == [
        ("fast", "duplicate", "also claimed by mla-two"),
        ("fast", "duplicate", "also claimed by mla-one"),
        ("slow", "ok", None),
    ]


def test_the_same_distribution_twice_on_the_path_is_no_duplicate(tmp_path, monkeypatch):
    first, second = fakes.Site(tmp_path / "first"), fakes.Site(tmp_path / "second")
    for site in (second, first):
        site.folder.mkdir()
        monkeypatch.syspath_prepend(str(site.folder))
        site.install("mla_fast", "fast")
    registry = Registry(path=[str(first.folder), str(second.folder)], environ={})
    assert [(e.name, e.state) for e in registry.entries()] == [("fast", "ok")]


BROKEN = {
    "import fails": ("raise RuntimeError('no driver')", "RuntimeError: no driver"),
    "import exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "module is missing something": (
        "import not_there_at_all",
        "ModuleNotFoundError: No module named 'not_there_at_all'",
    ),
    "syntax": ("def", "SyntaxError: invalid syntax ({module}.py, line 1)"),
    "no attribute": ("", "AttributeError: module '{module}' has no attribute 'INFO'"),
    "not a manifest": (
        "INFO = 'fast'",
        "{module}:INFO is of type str, not BackendInfo",
    ),
    "a sparse manifest among the backends": (
        "from mla_core.manifest import SparseInfo\nINFO = SparseInfo(name='{name}', target='a:B')",
        "{module}:INFO is of type SparseInfo, not BackendInfo",
    ),
    "wrong fields": (
        "from mla_core.manifest import BackendInfo\nINFO = BackendInfo(name='{name}', target='nowhere')",
        "BackendInfo: target: String should match pattern '^[A-Za-z_][\\w.]*:[A-Za-z_][\\w.]*$'; "
        "capabilities: Field required",
    ),
    "another name": (
        fakes.MANIFEST.replace('"{name}"', '"other"'),
        "its entry point says 'fast', its manifest 'other'",
    ),
    "the function fails": ("def INFO():\n    raise OSError('gone')", "OSError: gone"),
}


@pytest.mark.parametrize(("source", "cause"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_listed_with_its_cause(site, source, cause):
    module = site.install("mla_fast", "fast", source)
    (entry,) = site.registry().entries()
    assert (entry.state, entry.cause) == ("broken", cause.format(module=module))


@pytest.mark.parametrize(("source", "cause"), BROKEN.values(), ids=BROKEN)
def test_a_broken_plugin_is_raised_when_it_is_named(site, source, cause):
    module = site.install("mla_fast", "fast", source)
    assert message(site.registry().info, "fast") == (
        f"backend 'fast' of mla-fast is broken: {cause.format(module=module)}\n"
        "  repair or uninstall mla-fast, or set MLA_DISABLE=fast"
    )


def test_a_broken_plugin_disturbs_no_other(site):
    site.install("mla_fast", "fast", "raise SystemExit(3)")
    site.install("mla_slow", "slow")
    registry = site.registry()
    assert [(e.name, e.state) for e in registry.entries()] == [("fast", "broken"), ("slow", "ok")]
    assert registry.info("slow").name == "slow"


def test_a_broken_plugin_carries_the_original_exception_each_time_it_is_raised(site):
    site.install("mla_fast", "fast", "raise RuntimeError('no driver')")
    registry = site.registry()
    raised = []
    for _ in range(2):
        with pytest.raises(BrokenPlugin) as caught:
            registry.info("fast")
        raised.append(caught.value)
    assert [type(error.__cause__) for error in raised] == [RuntimeError, RuntimeError]
    assert raised[0] is not raised[1]


def test_interrupting_the_import_of_a_manifest_is_not_taken_for_a_broken_plugin(site):
    site.install("mla_fast", "fast", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        site.registry().entries()


def test_an_entry_point_that_does_not_parse_is_a_broken_plugin(site):
    site.metadata("mla_fast", "[mla_core.backends]\nfast = what is this\n")
    assert message(site.registry().info, "fast") == (
        "backend 'fast' of mla-fast is broken: "
        "its entry point 'what is this' does not parse; write module:ATTRIBUTE\n"
        "  repair or uninstall mla-fast, or set MLA_DISABLE=fast"
    )


def test_a_distribution_whose_metadata_cannot_be_read_is_listed_as_broken(site):
    site.metadata("mla_bad", "[mla_core.backends\n")
    site.install("mla_fast", "fast")
    registry = site.registry()
    assert [(e.name, e.state) for e in registry.entries()] == [("fast", "ok"), ("mla-bad", "broken")]
    assert registry.names() == ["fast"]


def test_a_distribution_whose_metadata_cannot_be_read_is_raised_when_it_is_named(site):
    site.metadata("mla_bad", "[mla_core.backends\n")
    with pytest.raises(BrokenPlugin, match="its entry points cannot be read"):
        site.registry().info("mla-bad")


def test_a_plugin_may_have_the_name_of_an_unreadable_distribution(site):
    site.metadata("fast", "[mla_core.backends\n")
    site.install("mla_fast", "fast")
    assert site.registry().info("fast").distribution == "mla-fast"


def test_a_plugin_of_another_api_is_listed_and_raised_as_incompatible(site):
    source = fakes.MANIFEST.replace('name="{name}"', 'name="{name}", api=7, invented_later=True')
    site.install("mla_fast", "fast", source)
    registry = site.registry()
    (entry,) = registry.entries()
    assert (entry.state, entry.cause) == ("incompatible", "speaks API 7; this mla_core accepts API 1")
    with pytest.raises(IncompatiblePlugin) as caught:
        registry.info("fast")
    assert str(caught.value) == (
        "backend 'fast' of mla-fast speaks API 7; this mla_core accepts API 1\n"
        "  install a release of mla-fast for API 1, or another mla-core"
    )


@pytest.mark.parametrize(
    ("target", "cause"),
    [
        ("{module}:Missing", "AttributeError: module '{module}' has no attribute 'Missing'"),
        ("not_there_at_all:Fast", "ModuleNotFoundError: No module named 'not_there_at_all'"),
    ],
)
def test_kernels_that_cannot_be_loaded_make_a_broken_plugin(site, target, cause):
    module = site.install("mla_fast", "fast", fakes.MANIFEST.replace("{module}:Kernels", target))
    assert message(site.registry().load, "fast") == (
        f"backend 'fast' of mla-fast is broken: loading {target.format(module=module)} failed: "
        f"{cause.format(module=module)}\n"
        "  repair or uninstall mla-fast, or set MLA_DISABLE=fast"
    )
