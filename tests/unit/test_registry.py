"""The registry of a process: changes after first use, environment variables, sparse hooks, threads."""

from __future__ import annotations

import sys
import threading

import pytest

from mla_core import registry as registry_module
from mla_core.capabilities import Capabilities
from mla_core.errors import DuplicateBackend, UnknownBackend
from mla_core.manifest import BackendInfo, SparseInfo
from mla_core.registry import Registry
from tests.unit import fakes
from tests.unit.fakes import message


@pytest.fixture
def site(tmp_path, monkeypatch) -> fakes.Site:
    monkeypatch.syspath_prepend(str(tmp_path))
    return fakes.Site(tmp_path)


# add, remove, refresh.


def test_an_added_backend_can_be_used_at_once_also_after_first_use(site):
    registry = site.registry()
    before = registry.names()
    registry.add(fakes.backend("mine"))
    assert (before, registry.names(), registry.info("mine").name) == ([], ["mine"], "mine")


@pytest.mark.parametrize("taken", ["installed", "added"])
def test_adding_a_taken_name_is_an_error(site, taken):
    site.install("mla_installed", "installed")
    registry = site.registry()
    registry.add(fakes.backend("added"))
    with pytest.raises(DuplicateBackend):
        registry.add(fakes.backend(taken))


def test_adding_a_taken_name_with_override_replaces_that_name_only(site):
    site.install("mla_fast", "fast")
    site.install("mla_slow", "slow")
    registry = site.registry()
    registry.add(fakes.backend("fast", priority=9), override=True)
    found = {e.name: (e.distribution, e.state) for e in registry.entries()}
    assert found == {"fast": ("this process", "ok"), "slow": ("mla-slow", "ok")}
    assert registry.info("fast").priority == 9


def test_removing_an_override_brings_the_installed_backend_back(site):
    site.install("mla_fast", "fast")
    registry = site.registry()
    registry.add(fakes.backend("fast", priority=9), override=True)
    registry.remove("fast")
    assert registry.info("fast").distribution == "mla-fast"


def test_a_removed_backend_is_gone_until_its_name_is_added(site):
    site.install("mla_fast", "fast")
    registry = site.registry()
    registry.remove("fast")
    assert registry.names() == []
    registry.add(fakes.backend("fast"))
    assert registry.names() == ["fast"]


def test_removing_an_unknown_name_is_an_error(site):
    site.install("mla_fast", "fast")
    assert message(site.registry().remove, "fsat") == (
        "unknown backend 'fsat'; installed: fast\n  did you mean 'fast'?"
    )


def test_refresh_finds_what_was_installed_since(site):
    registry = site.registry()
    before = registry.names()
    site.install("mla_fast", "fast")
    stale = registry.names()
    registry.refresh()
    assert (before, stale, registry.names()) == ([], [], ["fast"])


def test_refresh_describes_a_repaired_plugin_again(site):
    module = site.install("mla_fast", "fast", "raise OSError('half installed')")
    registry = site.registry()
    broken = registry.entries()[0].state
    (site.folder / f"{module}.py").write_text(fakes.MANIFEST.format(name="fast", module=module))
    registry.refresh()
    assert (broken, registry.entries()[0].state) == ("broken", "ok")


def test_refresh_keeps_what_was_added(site):
    registry = site.registry()
    registry.add(fakes.backend("mine"))
    registry.refresh()
    assert registry.names() == ["mine"]


def test_a_disabled_name_is_listed_as_disabled_and_its_manifest_is_not_imported(site):
    module = site.install("mla_fast", "fast")
    registry = site.registry(MLA_DISABLE="slow, fast")
    assert [(e.name, e.state, e.cause) for e in registry.entries()] == [
        ("fast", "disabled", "MLA_DISABLE=slow, fast")
    ]
    assert (registry.names(), module in sys.modules) == ([], False)


def test_naming_a_disabled_backend_tells_what_disabled_it(site):
    site.install("mla_fast", "fast")
    assert message(site.registry(MLA_DISABLE="fast").info, "fast") == (
        "unknown backend 'fast'; installed: none\n  'fast' of mla-fast is hidden by MLA_DISABLE=fast"
    )


def test_only_trusted_distributions_count_whatever_the_spelling(site):
    site.install("mla_fast", "fast")
    site.install("mla_slow", "slow")
    registry = site.registry(MLA_PLUGINS="MLA.Fast")
    assert [(e.name, e.state) for e in registry.entries()] == [("fast", "ok"), ("slow", "disabled")]


def test_trusting_one_of_two_distributions_settles_a_duplicate_name(site):
    site.install("mla_one", "fast")
    site.install("mla_two", "fast")
    assert site.registry(MLA_PLUGINS="mla-two").info("fast").distribution == "mla-two"


def test_what_this_process_added_needs_no_trust(site):
    registry = site.registry(MLA_PLUGINS="mla-fast")
    registry.add(fakes.backend("mine"))
    assert registry.names() == ["mine"]


@pytest.mark.parametrize("variable", ["MLA_PLUGINS", "MLA_DISABLE"])
def test_a_blank_variable_counts_as_not_set(site, variable):
    site.install("mla_fast", "fast")
    assert site.registry(**{variable: " "}).names() == ["fast"]


def test_variables_count_at_every_call(site):
    site.install("mla_fast", "fast")
    environ: dict[str, str] = {}
    registry = Registry(path=[str(site.folder)], environ=environ)
    before = registry.names()
    environ["MLA_DISABLE"] = "fast"
    assert (before, registry.names()) == (["fast"], [])


def test_only_variables_that_hide_something_are_reported(site):
    site.install("mla_fast", "fast")
    registry = site.registry(MLA_DISABLE="fast", MLA_PLUGINS="mla-fast")
    assert registry.filters() == {"MLA_DISABLE": "fast"}


def test_a_view_under_other_variables_shares_the_plugins(site):
    registry = site.registry()
    view = registry.under({"MLA_DISABLE": "hidden"})
    registry.add(fakes.backend("mine"))
    registry.add(fakes.backend("hidden"))
    assert (view.names(), registry.names()) == (["mine"], ["hidden", "mine"])


def test_sparse_hooks_have_names_of_their_own(site):
    registry = site.registry()
    registry.add(SparseInfo(name="dsa", target="mla_dsa.hook:Dsa"))
    registry.add(fakes.backend("dsa"))
    assert (registry.names(), registry.sparse.names()) == (["dsa"], ["dsa"])


def test_sparse_hooks_are_discovered_in_their_own_group(site):
    module = site.module(
        "from mla_core.manifest import SparseInfo\nINFO = SparseInfo(name='dsa', target='mla_dsa.hook:Dsa')"
    )
    site.metadata("mla_dsa", f"[mla_core.sparse]\ndsa = {module}:INFO\n")
    registry = site.registry()
    assert (registry.names(), registry.sparse.info("dsa").distribution) == ([], "mla-dsa")


def test_an_unknown_sparse_hook_is_called_by_its_kind(site):
    assert message(site.registry().sparse.info, "dsa") == "unknown sparse hook 'dsa'; installed: none"


def test_threads_that_use_a_registry_first_at_once_get_the_same_manifest(site):
    slow = "import time\ntime.sleep(0.05)\n" + fakes.MANIFEST.replace("INFO = ", "def info():\n    return ")
    site.install("mla_fast", "fast", slow, attribute="info")
    registry = site.registry()
    barrier = threading.Barrier(8)
    found: list[BackendInfo] = []

    def use() -> None:
        barrier.wait()
        found.append(registry.info("fast"))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len({id(info) for info in found})) == (8, 1)


def test_a_manifest_may_use_the_registry_from_another_thread_while_it_is_described(site):
    """The registry holds no lock while a plugin's code runs: holding one would deadlock here."""
    source = (
        "import threading\nimport mla_test_hook\n"
        "thread = threading.Thread(target=mla_test_hook.registry.names, daemon=True)\n"
        "thread.start()\nthread.join(10)\nstuck = thread.is_alive()\n"
    )
    module = site.install("mla_fast", "fast", source + fakes.MANIFEST)
    registry = site.registry()
    sys.modules["mla_test_hook"] = type(sys)("mla_test_hook")
    sys.modules["mla_test_hook"].registry = registry
    try:
        registry.entries()
    finally:
        del sys.modules["mla_test_hook"]
    assert sys.modules[module].stuck is False


def test_the_functions_of_the_module_act_on_the_default_registry():
    info = BackendInfo(name="only_here", target="nowhere:Nothing", capabilities=Capabilities())
    registry_module.add(info)
    try:
        assert registry_module.info("only_here") is registry_module.default().info("only_here")
    finally:
        registry_module.remove("only_here")
    with pytest.raises(UnknownBackend):
        registry_module.info("only_here")
