"""Who is considered: `auto`, options and sparse hooks of a backend string."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from mla_core.errors import SpecError, UnknownBackend
from mla_core.manifest import SparseInfo
from mla_core.plan import Plan, Rejection
from mla_core.request import Reason
from mla_core.resolve import resolve
from tests.unit import fakes
from tests.unit.fakes import DECODE_ONLY, GPU, backend, backends, plan, refusal


class Paged(BaseModel):
    page: int = 64


class Needy(BaseModel):
    topk: int


# auto.


def test_auto_takes_the_highest_priority():
    assert backends(plan(None, backend("a"), backend("b", priority=2), backend("c", priority=1))) == (
        "b",
        "b",
    )


def test_auto_takes_the_first_name_among_equals():
    assert backends(plan("auto", backend("b"), backend("a"), backend("c"))) == ("a", "a")


def test_auto_chooses_for_each_phase_alone():
    made = plan("auto", backend("fast", priority=9, **DECODE_ONLY), backend("slow"))
    assert backends(made) == ("slow", "fast")


def test_auto_passes_over_what_does_not_fit_and_says_why():
    made = plan("auto", backend("gpu", priority=9, devices={"sm_90"}, dtypes={"bfloat16"}), backend("slow"))
    why = (
        Reason(field="device", wanted="cpu", offered="sm_90"),
        Reason(field="dtype", wanted="float32", offered="bfloat16"),
    )
    assert made.rejected == (
        Rejection(backend="gpu", kernel="mha_prefill", reasons=why),
        Rejection(backend="gpu", kernel="mqa_decode", reasons=why),
    )


def test_auto_tells_of_backends_that_fit_but_rank_lower():
    made = plan("auto", backend("a"), backend("b"))
    rank = Reason(field="rank", wanted="first that fits", offered="fits, but after a")
    assert [(row.backend, row.reasons) for row in made.rejected] == [("b", (rank,)), ("b", (rank,))]


def test_auto_passes_over_a_backend_that_needs_options():
    made = plan("auto", backend("a", options=Needy), backend("b"))
    assert backends(made) == ("b", "b")
    assert made.rejected[0].reasons == (
        Reason(field="options", wanted="none given", offered="needs some: topk: Field required"),
    )


def test_auto_after_a_name_stands_for_all_others():
    made = plan("gpu|auto", backend("gpu", priority=9, **GPU), backend("slow"))
    assert (backends(made), len(made.rejected)) == (("slow", "slow"), 2)


@pytest.mark.parametrize(
    ("source", "offered", "hint"),
    [
        ("raise OSError('no driver')", "broken", "OSError: no driver"),
        (
            fakes.MANIFEST.replace('name="{name}"', 'name="{name}", api=7'),
            "incompatible",
            "speaks API 7; this mla_core accepts API 1",
        ),
    ],
    ids=["broken", "incompatible"],
)
def test_auto_passes_over_a_plugin_that_cannot_be_used(tmp_path, monkeypatch, source, offered, hint):
    monkeypatch.syspath_prepend(str(tmp_path))
    site = fakes.Site(tmp_path)
    site.install("mla_bad", "bad", source)
    registry = site.registry()
    registry.add(backend("good"))
    made = resolve(fakes.LAYER, "auto", registry=registry, environ={})
    why = (Reason(field="plugin", wanted="ok", offered=offered, hint=hint),)
    assert (backends(made), [row.reasons for row in made.rejected]) == (("good", "good"), [why, why])


def test_auto_passes_over_a_name_that_two_distributions_claim(tmp_path):
    site = fakes.Site(tmp_path)
    site.install("mla_one", "bad")
    site.install("mla_two", "bad")
    registry = site.registry()
    registry.add(backend("good"))
    made = resolve(fakes.LAYER, "auto", registry=registry, environ={})
    assert (backends(made), {row.backend for row in made.rejected}) == (("good", "good"), {"bad"})


def dsa(**changes: object) -> SparseInfo:
    return SparseInfo(name="dsa", target="mla_dsa.hook:Dsa", **changes)


def test_auto_does_not_consider_what_is_hidden_or_has_no_name(tmp_path):
    fakes.Site(tmp_path).metadata("mla_unreadable", "[mla_core.backends\n")
    registry = fakes.Site(tmp_path).registry()
    registry.add(backend("good"))
    registry.add(backend("hidden"))
    made = resolve(fakes.LAYER, "auto", registry=registry, environ={"MLA_DISABLE": "hidden"})
    assert (backends(made), made.rejected) == (("good", "good"), ())


def test_plugins_without_options_are_not_among_the_options():
    assert plan("fast+dsa", backend("fast"), dsa()).options == {}


def test_options_are_recorded_by_name_with_their_defaults():
    made = plan("fast+dsa[topk=2048]", backend("fast", options=Paged), dsa(options=Needy))
    assert made.options == {"fast": {"page": 64}, "dsa": {"topk": 2048}}


def test_only_options_of_chosen_plugins_are_recorded():
    made = plan(
        "gpu[page=1]|slow[page=2]", backend("gpu", options=Paged, **GPU), backend("slow", options=Paged)
    )
    assert made.options == {"slow": {"page": 2}}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "slow|fast[pag=1]",
            "backend: 'fast' has no option 'pag'; did you mean 'page'? (it takes page)\n"
            "  slow|fast[pag=1]\n"
            "            ^",
        ),
        (
            "slow+dsa[tpk=1]",
            "backend: 'dsa' has no option 'tpk'; did you mean 'topk'? (it takes topk)\n"
            "  slow+dsa[tpk=1]\n"
            "           ^",
        ),
        ("slow+dsa", "backend: options of 'dsa': topk: Field required\n  slow+dsa\n       ^"),
        (
            "prefill=fast[page=1];decode=fast",
            "backend: 'fast' serves both phases: give it the same options in both\n"
            "  prefill=fast[page=1];decode=fast\n"
            "                              ^",
        ),
        (
            "prefill=slow+dsa[topk=1];decode=slow",
            "backend: a sparse hook serves both phases, but only one has a backend with '+dsa[topk=1]'\n"
            "  prefill=slow+dsa[topk=1];decode=slow\n"
            "          ^",
        ),
        (
            "prefill=slow;decode=fast+dsa[topk=1]|slow",
            "backend: a sparse hook serves both phases, but only one has a backend with '+dsa[topk=1]'\n"
            "  prefill=slow;decode=fast+dsa[topk=1]|slow\n"
            "                      ^",
        ),
        (
            "prefill=slow|slow+dsa[topk=1];decode=slow+dsa[topk=1]",
            "backend: a sparse hook serves both phases, but only one has a backend with no sparse hook\n"
            "  prefill=slow|slow+dsa[topk=1];decode=slow+dsa[topk=1]\n"
            "          ^",
        ),
    ],
)
def test_a_wrong_option_or_hook_is_refused_where_it_stands(spec, message):
    with pytest.raises(SpecError) as caught:
        plan(spec, backend("fast", options=Paged), backend("slow"), dsa(options=Needy))
    assert str(caught.value) == message


def test_the_same_options_in_both_phases_are_fine():
    made = plan("prefill=fast;decode=fast[page=64]", backend("fast", options=Paged))
    assert made.options == {"fast": {"page": 64}}


def test_a_sparse_hook_is_recorded_among_the_choices():
    assert plan("fast+dsa", backend("fast"), dsa()).choices["sparse"] == "dsa"


def test_without_a_sparse_hook_there_is_no_such_choice():
    assert "sparse" not in plan("fast", backend("fast"), dsa()).choices


def test_both_phases_of_a_layer_get_the_same_hook():
    """The first stack could decode, but nothing under its hook can prefill."""
    made = plan("fast+dsa|slow", backend("fast", **DECODE_ONLY), backend("slow"), dsa())
    assert (backends(made), "sparse" in made.choices) == (("slow", "slow"), False)


def test_a_hook_goes_with_any_backend_of_its_stacks():
    made = plan("fast+dsa|slow+dsa", backend("fast", **DECODE_ONLY), backend("slow"), dsa())
    assert (backends(made), made.choices["sparse"]) == (("slow", "fast"), "dsa")


def test_a_hook_that_works_with_other_backends_only_is_refused():
    told = refusal(
        "slow+dsa", backend("slow"), backend("fast"), dsa(works_with={"fast"}), prefill_form="expand"
    )
    assert told == (
        "nothing in backend='slow+dsa' fits this layer on cpu\n"
        "  slow  mha_prefill  sparse: wanted dsa, offered works with fast\n"
        "  slow  mqa_decode   sparse: wanted dsa, offered works with fast\n"
        "what would work: backend='fast+dsa'"
    )


def test_an_unknown_hook_is_an_error():
    with pytest.raises(UnknownBackend) as caught:
        plan("slow+dsaa", backend("slow"), dsa())
    assert str(caught.value) == "unknown sparse hook 'dsaa'; installed: dsa\n  did you mean 'dsa'?"


def test_a_plan_made_by_selection_round_trips_through_json():
    made = plan("gpu|fast+dsa", backend("gpu", **GPU), backend("fast", options=Paged), dsa())
    assert Plan.model_validate_json(made.model_dump_json()) == made
