"""mla list shows every plugin with its state; mla show shows all of one declaration."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field

from mla_core.capabilities import Capabilities, Declined, Limit
from mla_core.cli.listing import find, listing_json, listing_lines, plugin_lines
from mla_core.errors import BrokenPlugin, UnknownBackend
from mla_core.manifest import SparseInfo
from tests.unit import fakes

SPARSE = SparseInfo(name="picker", target="picker.hook:Hook", summary="picks", works_with={"a", "b"})


class Options(BaseModel):
    splits: int = Field(default=4, description="how many ways")
    kind: str


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return fakes.Site(tmp_path)


def listed(registry, name):
    (entry,) = [entry for entry in listing_json(registry)["backends"] if entry["name"] == name]
    return entry


def test_a_working_plugin_is_listed_with_version_and_summary(site):
    site.install("mla_good", "good", version="2.1")
    assert listed(site.registry(), "good") == {
        "name": "good",
        "state": "ok",
        "version": "2.1",
        "distribution": "mla-good",
        "summary": "",
        "cause": None,
    }


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("broken", "ZeroDivisionError: division by zero"),
        ("incompatible", "speaks API 99"),
        ("duplicate", "also claimed by mla-second"),
        ("disabled", "MLA_DISABLE=sick"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_listed_with_its_cause(site, state, cause):
    source = {
        "broken": "1 / 0",
        "incompatible": fakes.MANIFEST.replace("target=", "api=99, target="),
    }.get(state, fakes.MANIFEST)
    site.install("mla_first", "sick", source)
    if state == "duplicate":
        site.install("mla_second", "sick")
    registry = site.registry(MLA_DISABLE="sick" if state == "disabled" else "")
    entries = [entry for entry in listing_json(registry)["backends"] if entry["distribution"] == "mla-first"]
    assert [entry["state"] for entry in entries] == [state]
    assert cause in entries[0]["cause"]
    assert any(cause in line and state in line for line in listing_lines(registry))


def test_sparse_hooks_have_a_section_of_their_own():
    lines = listing_lines(fakes.registry(fakes.backend("dense"), SPARSE))
    assert "dense" in "".join(lines[: lines.index("sparse hooks")])
    assert "picker" in lines[-1]


def test_nothing_installed_says_so():
    assert listing_lines(fakes.registry()) == ["backends: none installed", "sparse hooks: none installed"]


def test_a_cause_of_several_lines_takes_one_line(site):
    site.install("mla_sick", "sick", 'raise ImportError("one\\n  two")')
    assert "ImportError: one two" in listing_lines(site.registry())[2]


def test_show_names_every_field_of_a_declaration():
    text = "\n".join(plugin_lines(fakes.backend("dense")))
    fields = [name for name in Capabilities.model_fields if name not in ("limits", "declined")]
    assert [name for name in fields if f"\n  {name} " not in text] == []


def test_show_reads_sets_layouts_and_absence():
    lines = plugin_lines(fakes.backend("dense"))
    assert [
        line.split(maxsplit=1)[1] for line in lines if line.split()[0] in ("kernels", "layouts", "sparse")
    ] == [
        "mha_prefill, mqa_decode",
        "fp32 with pages 16, 64",
        "none",
    ]


def test_show_explains_options_with_defaults_and_descriptions():
    lines = plugin_lines(fakes.backend("dense", options=Options))
    start = lines.index("options")
    assert [" ".join(line.split()) for line in lines[start + 1 : start + 3]] == [
        "splits default 4 how many ways",
        "kind required",
    ]


def test_show_tells_limits_and_what_is_declined():
    limit = Limit(
        name="narrow", when={"dtype": ["float32"]}, then={"heads": [16]}, because="registers run out"
    )
    declined = Declined(field="layout", value="fp16", because="never measured")
    text = "\n".join(plugin_lines(fakes.backend("dense", limits=[limit], declined=[declined])))
    assert "narrow: when dtype is float32, heads must be 16: registers run out" in text
    assert "layout fp16: never measured" in text


def test_show_finds_a_sparse_hook():
    info = find(fakes.registry(fakes.backend("dense"), SPARSE), "picker")
    assert info == SPARSE
    assert any("works_with" in line and "a, b" in line for line in plugin_lines(info))


def test_show_of_an_unknown_name_lists_both_kinds():
    with pytest.raises(UnknownBackend) as caught:
        find(fakes.registry(fakes.backend("dense"), SPARSE), "dens")
    assert str(caught.value) == "unknown plugin 'dens'; installed: dense, picker\n  did you mean 'dense'?"


def test_show_of_a_broken_plugin_raises_its_error(site):
    site.install("mla_sick", "sick", "1 / 0")
    with pytest.raises(BrokenPlugin, match="division by zero"):
        find(site.registry(), "sick")
