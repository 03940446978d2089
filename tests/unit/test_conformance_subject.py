"""Which backend a run is about: a name, or a name with options."""

from __future__ import annotations

from datetime import date

import pytest
from pydantic import BaseModel

from mla_core import BackendInfo, Capabilities, registry
from mla_core.conformance.gaps import Gap
from mla_core.conformance.session import Options, Session
from mla_core.conformance.subject import Subject
from mla_core.errors import ConfigError, SpecError, UnknownBackend


class Knobs(BaseModel):
    impl: str = "auto"
    parts: int = 4


@pytest.fixture
def tunable():
    capabilities = Capabilities(devices={"cpu"}, kernels={"mqa_decode"}, dtypes={"float32"})
    info = BackendInfo(name="tunable", target="nobody:Tunable", options=Knobs, capabilities=capabilities)
    registry.add(info)
    yield info
    registry.remove("tunable")


def test_a_name_alone_has_the_default_options(tunable):
    assert Subject.parse("tunable").options == {"impl": "auto", "parts": 4}


def test_named_options_are_validated_and_kept_as_text(tunable):
    subject = Subject.parse("tunable[parts=8]")
    assert (subject.options["parts"], subject.named_options, str(subject)) == (
        8,
        {"parts": "8"},
        "tunable[parts=8]",
    )


def test_an_unknown_option_is_refused_before_any_cell_is_tried(tunable):
    with pytest.raises(SpecError, match="'tunable' has no option 'part'; did you mean 'parts'"):
        Session(Options("tunable[part=8]")).info  # noqa: B018


@pytest.mark.parametrize("text", ["tunable|other", "prefill=a;decode=b", "tunable+sparse", "auto"])
def test_more_than_one_backend_is_refused(text):
    with pytest.raises(ConfigError, match="backend to test: one name, with options or without"):
        Subject.parse(text)


def test_an_unknown_name_is_the_registrys_error():
    with pytest.raises(UnknownBackend):
        Session(Options("nobody_has_this")).info  # noqa: B018


@pytest.mark.parametrize(("impl", "applies"), [("auto", True), ("fa3", True), ("fa2", False)])
def test_a_gap_may_hold_with_some_options_only(impl, applies):
    gap = Gap(cell="x", reason="r", link="l", expires=date(2030, 1, 1), options={"impl": ("auto", "fa3")})
    assert gap.applies({"impl": impl, "parts": 4}) is applies


def test_a_gap_without_options_holds_with_all():
    assert Gap(cell="x", reason="r", link="l", expires=date(2030, 1, 1)).applies({"impl": "fa2"})
