"""Typed access to config values."""

from __future__ import annotations

import math

import pytest

from mla_core.config_values import (
    did_you_mean,
    missing,
    number,
    optional_number,
    positive,
    unsupported,
    whole,
)
from mla_core.errors import ConfigError


@pytest.mark.parametrize("value", [True, 1.5, "3", -1, [3]], ids=repr)
def test_a_whole_number_is_nothing_else(value):
    with pytest.raises(ConfigError) as caught:
        whole({"heads": value}, "heads")
    assert str(caught.value) == f"heads={value!r} is not supported; supported: a whole number, at least 0"


def test_zero_is_whole_but_not_positive():
    assert whole({"rope": 0}, "rope") == 0
    with pytest.raises(ConfigError, match="rope=0 is not supported; supported: a whole number, at least 1"):
        positive({"rope": 0}, "rope")


@pytest.mark.parametrize("raw", [{}, {"heads": None}], ids=["absent", "null"])
def test_an_absent_number_is_missing_unless_it_has_a_default(raw):
    assert positive(raw, "heads", 4) == 4
    with pytest.raises(ConfigError, match="heads is missing from the config"):
        positive(raw, "heads")


@pytest.mark.parametrize("value", [True, "1.0", math.nan, math.inf], ids=repr)
def test_a_number_is_finite_and_no_text(value):
    with pytest.raises(ConfigError, match="is not supported; supported: a finite number"):
        optional_number({"factor": value}, "factor")


def test_a_number_becomes_a_float_and_keeps_zero():
    assert [number({"factor": value}, "factor", 3.0) for value in (2, 0, None)] == [2.0, 0.0, 3.0]


def test_errors_carry_their_hint():
    assert str(unsupported("a", 1, "2", "because")) == "a=1 is not supported; supported: 2 (because)"
    assert str(missing("a", "write b")) == "a is missing from the config; write b"


@pytest.mark.parametrize(
    ("name", "suggestion"), [("deepsek-v3", "; did you mean 'deepseek-v3'?"), ("xyz", "")]
)
def test_a_suggestion_appears_only_when_a_name_is_close(name, suggestion):
    assert did_you_mean(name, ["deepseek-v3", "kimi-k2"]) == suggestion
