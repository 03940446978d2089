"""Selection: who decides, who is chosen, and what is said when nobody fits."""

from __future__ import annotations

import pytest

from mla_core.capabilities import Capabilities
from mla_core.chunks import chunk_bytes
from mla_core.errors import BrokenPlugin, DuplicateBackend, NoBackendFits, SpecError, UnknownBackend
from mla_core.resolve import resolve
from mla_core.spec import Part, Spec, Stack
from tests.unit import fakes
from tests.unit.fakes import DECODE_ONLY, GPU, backend, backends, plan, refusal

PREFILL_ONLY = {"kernels": {"mha_prefill"}}
ABSORB_ONLY = {"kernels": {"mqa_prefill", "mqa_decode"}}


def sources(**given: str) -> tuple[str, str]:
    """(spec, spec_source) when the argument, the variable and the config may each name a backend."""
    registry = fakes.registry(*(backend(name) for name in ("arg", "env", "conf", "first")))
    environ = {"MLA_BACKEND": given["env"]} if "env" in given else {}
    made = resolve(
        fakes.LAYER, given.get("arg"), config_spec=given.get("conf"), registry=registry, environ=environ
    )
    return made.spec, made.spec_source


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"arg": "arg", "env": "env", "conf": "conf"}, ("arg", "argument")),
        ({"arg": "auto", "env": "env", "conf": "conf"}, ("auto", "argument")),
        ({"env": "env", "conf": "conf"}, ("env", "MLA_BACKEND")),
        ({"env": " ", "conf": "conf"}, ("conf", "config")),
        ({"conf": "conf"}, ("conf", "config")),
        ({}, ("auto", "auto")),
    ],
    ids=str,
)
def test_the_argument_outranks_the_variable_the_config_and_auto(given, expected):
    assert sources(**given) == expected


def test_the_variable_is_recorded_as_an_override_when_it_decided():
    registry = fakes.registry(backend("fast"))
    made = resolve(fakes.LAYER, registry=registry, environ={"MLA_BACKEND": "fast"})
    assert made.overrides == {"MLA_BACKEND": "fast"}


def test_the_variable_is_no_override_when_the_argument_decided():
    registry = fakes.registry(backend("fast"))
    made = resolve(fakes.LAYER, "fast", registry=registry, environ={"MLA_BACKEND": "slow"})
    assert made.overrides == {}


def test_a_variable_that_hides_a_backend_is_recorded_as_an_override():
    registry = fakes.registry(backend("fast", priority=1), backend("slow"))
    made = resolve(fakes.LAYER, registry=registry, environ={"MLA_DISABLE": "fast"})
    assert (backends(made), made.overrides) == (("slow", "slow"), {"MLA_DISABLE": "fast"})


def test_the_environment_of_the_registry_counts_unless_another_is_given():
    registry = fakes.registry(backend("fast"), backend("slow"), environ={"MLA_BACKEND": "slow"})
    assert resolve(fakes.LAYER, registry=registry).spec_source == "MLA_BACKEND"


@pytest.mark.parametrize(
    ("given", "label"),
    [({"arg": "a||b"}, "backend"), ({"env": "a||b"}, "MLA_BACKEND"), ({"conf": "a||b"}, "config.backend")],
)
def test_a_mistake_is_shown_with_the_place_it_came_from(given, label):
    with pytest.raises(SpecError) as caught:
        sources(**given)
    assert str(caught.value) == f"{label}: expected a backend name, or auto\n  a||b\n    ^"


def test_a_parsed_spec_is_accepted_as_well():
    assert backends(plan(Spec((Stack(Part("fast")),)), backend("fast"))) == ("fast", "fast")


def test_a_spec_that_could_not_have_been_written_is_refused():
    with pytest.raises(SpecError):
        plan(Spec((Stack(Part("fast slow")),)), backend("fast"))


def test_an_explicit_name_is_used_whatever_its_rank():
    assert backends(plan("slow", backend("fast", priority=9), backend("slow"))) == ("slow", "slow")


def test_an_explicit_name_never_falls_back():
    assert refusal("gpu", backend("gpu", devices={"sm_90"}, heads=[8]), backend("slow")) == (
        "nothing in backend='gpu' fits this layer on cpu\n"
        "  gpu  mha_prefill  device: wanted cpu, offered sm_90\n"
        "  gpu  mha_prefill  heads: wanted 16, offered 8\n"
        "  gpu  mqa_prefill  device: wanted cpu, offered sm_90\n"
        "  gpu  mqa_prefill  kernel: wanted mqa_prefill, offered mha_prefill, mqa_decode\n"
        "  gpu  mqa_prefill  heads: wanted 16, offered 8\n"
        "  gpu  mqa_decode   device: wanted cpu, offered sm_90\n"
        "  gpu  mqa_decode   heads: wanted 16, offered 8\n"
        "what would work: backend='slow'"
    )


def test_an_explicit_name_that_serves_one_phase_only_is_refused_with_what_would_complete_it():
    assert refusal("fast", backend("fast", priority=1, **DECODE_ONLY), backend("slow")) == (
        "nothing in backend='fast' fits this layer on cpu\n"
        "  fast  mha_prefill  kernel: wanted mha_prefill, offered mqa_decode\n"
        "  fast  mqa_prefill  kernel: wanted mqa_prefill, offered mqa_decode\n"
        "what would work: backend='prefill=slow;decode=fast'"
    )


def test_the_refusal_of_a_chain_has_every_candidate():
    told = refusal(
        "gpu|old", backend("gpu", **GPU), backend("old", dtypes={"float16"}), prefill_form="expand"
    )
    assert told == (
        "nothing in backend='gpu|old' fits this layer on cpu\n"
        "  gpu  mha_prefill  device: wanted cpu, offered sm_90\n"
        "  old  mha_prefill  dtype: wanted float32, offered float16\n"
        "  gpu  mqa_decode   device: wanted cpu, offered sm_90\n"
        "  old  mqa_decode   dtype: wanted float32, offered float16\n"
        "nothing that is installed would work"
    )


def test_the_refusal_of_auto_without_any_backend_says_so():
    assert refusal("auto") == (
        "nothing in backend='auto' fits this layer on cpu\n"
        "  no backend is installed\n"
        "nothing that is installed would work"
    )


def test_a_refusal_names_the_place_that_asked():
    registry = fakes.registry(backend("gpu", **GPU))
    with pytest.raises(NoBackendFits, match=r"^nothing in MLA_BACKEND='gpu' fits this layer on cpu"):
        resolve(fakes.LAYER, registry=registry, environ={"MLA_BACKEND": "gpu"})


def test_a_chain_takes_the_first_that_fits():
    made = plan("gpu|slow|fast", backend("gpu", **GPU), backend("slow"), backend("fast", priority=9))
    assert backends(made) == ("slow", "slow")


def test_a_chain_checks_the_candidates_after_the_first_that_fits_too():
    made = plan("slow|gpu|fast", backend("gpu", **GPU), backend("slow"), backend("fast"))
    assert [(row.backend, row.reasons[0].field) for row in made.rejected if row.kernel == "mqa_decode"] == [
        ("gpu", "device"),
        ("fast", "rank"),
    ]


@pytest.mark.parametrize("spec", ["fsat", "slow|fsat", "prefill=slow;decode=fsat"])
def test_an_unknown_name_anywhere_is_an_error(spec):
    with pytest.raises(UnknownBackend) as caught:
        plan(spec, backend("fast"), backend("slow"))
    assert str(caught.value) == "unknown backend 'fsat'; installed: fast, slow\n  did you mean 'fast'?"


@pytest.mark.parametrize(
    ("distributions", "source", "error"),
    [
        (["mla_one"], "raise OSError('no driver')", BrokenPlugin),
        (["mla_one", "mla_two"], fakes.MANIFEST, DuplicateBackend),
    ],
    ids=["broken", "duplicate"],
)
def test_a_plugin_that_cannot_be_used_is_an_error_when_it_is_named(
    tmp_path, monkeypatch, distributions, source, error
):
    monkeypatch.syspath_prepend(str(tmp_path))
    site = fakes.Site(tmp_path)
    for distribution in distributions:
        site.install(distribution, "bad", source)
    registry = site.registry()
    registry.add(backend("good"))
    with pytest.raises(error):
        resolve(fakes.LAYER, "good|bad", registry=registry, environ={})


def test_phases_can_name_different_backends():
    made = plan(
        "prefill=one;decode=gpu|two", backend("one", **PREFILL_ONLY), backend("two"), backend("gpu", **GPU)
    )
    assert (backends(made), made.spec) == (("one", "two"), "prefill=one;decode=gpu|two")


@pytest.mark.parametrize(
    ("form", "choice"),
    [("auto", ("mha", "expand")), ("expand", ("mha", "expand")), ("absorb", ("mqa_prefill", "absorb"))],
)
def test_the_prefill_form_decides_which_kernel_prefill_needs(form, choice):
    kernel, name = choice
    made = plan("absorb|expand", backend("absorb", **ABSORB_ONLY), backend("expand"), prefill_form=form)
    assert made.choices[kernel] == name


def test_prefill_in_the_absorb_form_serves_when_nothing_expands():
    made = plan("absorb", backend("absorb", **ABSORB_ONLY))
    assert (made.choices["mqa_prefill"], "mha" in made.choices) == ("absorb", False)


def test_prefill_must_return_lse_and_decode_need_not():
    made = plan("mute|slow", backend("mute", returns=set()), backend("slow"))
    assert (backends(made), made.rejected[0].reasons[0].field) == (("slow", "mute"), "lse")


def test_decode_must_return_lse_when_the_layer_asks():
    made = plan("mute|slow", backend("mute", returns=set()), backend("slow"), lse=True)
    assert backends(made) == ("slow", "slow")


def owners(spec: str, *infos: object, **changes: object) -> dict[str, str]:
    choices = plan(spec, *infos, **changes).choices
    return {stage: choices[stage] for stage in ("append", "rope", "v_up", "gate")}


CORE = {"append": "core", "rope": "core", "v_up": "core", "gate": "core"}
TWO_PHASES = "prefill=one;decode=two"


@pytest.mark.parametrize(
    ("one", "two", "owned"),
    [
        ({}, {}, {}),
        ({}, fakes.ROPE_OWNER, {"append": "two", "rope": "two"}),
        (fakes.ROPE_OWNER, {}, {"append": "one", "rope": "one"}),
        (fakes.ROPE_OWNER, fakes.ROPE_OWNER, {"append": "two", "rope": "two"}),
        # Who rotates the keys also stores them.
        (fakes.ROPE_OWNER, {"owns": {"append"}}, {"append": "one", "rope": "one"}),
        ({"owns": {"append"}}, {}, {"append": "one"}),
        ({}, {"owns": {"v_up", "gate"}}, {"v_up": "two", "gate": "two"}),
        # The expanded form has no latent to expand.
        ({"owns": {"v_up", "gate"}}, {}, {"gate": "one"}),
    ],
)
def test_a_stage_belongs_to_the_backend_that_owns_it_decode_first(one, two, owned):
    assert owners(TWO_PHASES, backend("one", **one), backend("two", **two)) == {**CORE, **owned}


def test_an_absorbing_prefill_can_own_v_up():
    one = backend("one", kernels={"mqa_prefill"}, owns={"v_up"})
    assert owners(TWO_PHASES, one, backend("two"))["v_up"] == "one"


def test_an_owner_of_rope_must_do_the_style_of_the_layer():
    assert refusal(
        "fast", backend("fast", **fakes.ROPE_OWNER), rope_style="half_split", prefill_form="expand"
    ) == (
        "nothing in backend='fast' fits this layer on cpu\n"
        "  fast  mha_prefill  rope_style: wanted half_split, offered interleaved\n"
        "  fast  mqa_decode   rope_style: wanted half_split, offered interleaved\n"
        "nothing that is installed would work"
    )


def test_an_owner_of_append_must_know_the_layout_even_if_it_only_does_prefill():
    one = backend("one", **PREFILL_ONLY, owns={"append"}, layouts={"bf16": [64]})
    assert refusal(TWO_PHASES, one, backend("two"), prefill_form="expand") == (
        "nothing in backend='prefill=one;decode=two' fits this layer on cpu\n"
        "  one  mha_prefill  layout: wanted fp32, offered bf16\n"
        "what would work: backend='two'"
    )


def test_versions_of_plugins_and_of_what_they_require_are_recorded(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    site = fakes.Site(tmp_path)
    full = Capabilities.model_validate({**fakes.FULL, "requires": ["quick-lib>=1"]}).model_dump_json()
    source = (
        "from mla_core.capabilities import Capabilities\n"
        "from mla_core.manifest import BackendInfo\n"
        f"CAPABILITIES = Capabilities.model_validate_json({full!r})\n"
        "INFO = BackendInfo(name='fast', target='a:B', capabilities=CAPABILITIES)\n"
    )
    module = site.module(source)
    site.metadata("mla_fast", f"[mla_core.backends]\nfast = {module}:INFO\n", "2.1")
    versions = {"quick-lib": "1.5", "mla-core": "0.9", "unrelated": "3"}
    made = resolve(fakes.LAYER, "fast", registry=site.registry(), installed=versions.get)
    assert made.versions == {"mla-core": "0.9", "mla-fast": "2.1", "quick-lib": "1.5"}


def test_a_plan_keeps_the_request_and_its_workspace():
    made = plan("fast", backend("fast"), workspace_tokens=4096)
    assert (made.request.workspace_tokens, made.workspace_tokens) == (4096, 4096)


def test_a_plan_states_the_bytes_of_its_workspace():
    made = plan("fast", backend("fast"), workspace_tokens=4096)
    assert made.workspace_bytes == chunk_bytes(made.request, 4096)


def test_absorbed_prefill_needs_no_workspace():
    absorbing = backend("fast", **ABSORB_ONLY)
    assert plan("fast", absorbing, workspace_tokens=4096).workspace_bytes == 0


def test_a_plan_without_a_workspace_states_no_bytes():
    assert plan("fast", backend("fast")).workspace_bytes is None


def test_an_explicit_choice_imports_no_other_manifest(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    site = fakes.Site(tmp_path)
    site.install("mla_bad", "bad", "raise KeyboardInterrupt")
    registry = site.registry()
    registry.add(backend("good"))
    assert backends(resolve(fakes.LAYER, "good", registry=registry, environ={})) == ("good", "good")
