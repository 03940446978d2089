"""R17: what a layer cannot have is refused when the layer is built, with the value and who said no."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from mla_core import MLA, IntSet, Limit, registry
from mla_core.errors import (
    CacheError,
    ConfigError,
    ContractError,
    MLAError,
    NoBackendFits,
    SpecError,
    UnknownBackend,
    UnsupportedError,
)
from tests import fakes
from tests.fakes import Counting, registered
from tests.support import TOLERANCE, World, build, tiny_config

# Prefill in the absorbed form sees neither N nor V, and would step in.
NO_ABSORBED_PREFILL = {"kernels": {"mha_prefill", "mqa_decode"}}

# For every field of Capabilities: a declaration that lacks something, what a layer then asks in vain, and
# the words that the refusal must have.
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "devices": ({"devices": {"sm_90"}}, {}, "device: wanted cpu, offered sm_90"),
    "kernels": ({"kernels": {"mha_prefill"}}, {}, "kernel: wanted mqa_decode, offered mha_prefill"),
    "dtypes": ({"dtypes": {"bfloat16"}}, {}, "dtype: wanted float32, offered bfloat16"),
    "layouts": ({"layouts": {"bf16": IntSet.of(64)}}, {}, "layout: wanted fp32, offered bf16"),
    "query_len": (
        {"query_len": {"single"}},
        {"max_decode_query_len": 3},
        "query_len: wanted varlen, offered single",
    ),
    "max_query_len": (
        {"max_query_len": 2},
        {"max_decode_query_len": 3},
        r"max_query_len: wanted 3, offered 1\.\.2",
    ),
    "heads": ({"heads": IntSet.multiple_of(16)}, {}, "heads: wanted 3, offered multiples of 16"),
    "latent": ({"latent": IntSet.exact(512)}, {}, "latent: wanted 16, offered 512"),
    "nope": ({"nope": IntSet.of(64, 128), **NO_ABSORBED_PREFILL}, {}, "nope: wanted 10, offered 64, 128"),
    "rope": ({"rope": IntSet.exact(64)}, {}, "rope: wanted 4, offered 64"),
    "value": ({"value": IntSet.range(7, 9), **NO_ABSORBED_PREFILL}, {}, r"value: wanted 6, offered 7\.\.9"),
    "rope_styles": (
        {"owns": {"rope", "append"}, "rope_styles": {"half_split"}},
        {},
        "rope_style: wanted interleaved, offered half_split",
    ),
    "returns": ({"returns": set()}, {}, "lse: wanted returned, offered not returned"),
    "requires": (
        {"requires": ("surely-not-installed>=3",)},
        {},
        "requires: wanted surely-not-installed>=3, offered not installed",
    ),
    "known_bad": ({"known_bad": ("torch>0",)}, {}, "known_bad: wanted not torch>0, offered torch"),
    "limits": (
        {"limits": (Limit(name="l", when={"dtype": ["float32"]}, then={"heads": [4]}, because="so it is"),)},
        {},
        r"heads: wanted 3, offered 4 \(so it is\)",
    ),
    "declined": (
        {"declined": ({"field": "dtype", "value": "float32", "because": "too slow"},)},
        {},
        r"dtype: wanted float32, offered declined \(too slow\)",
    ),
}


@pytest.mark.parametrize("field", REFUSALS)
def test_an_explicit_backend_that_lacks_what_is_asked_fails_at_construction(field):
    lacking, options, message = REFUSALS[field]
    with registered("lacking", Counting, **lacking), pytest.raises(NoBackendFits, match=message):
        MLA(tiny_config(), backend="lacking", dtype=torch.float32, **options)


@pytest.mark.parametrize("field", REFUSALS)
def test_a_chain_goes_on_to_the_next_backend_and_records_why(field):
    lacking, options, message = REFUSALS[field]
    with registered("lacking", Counting, **lacking):
        layer = MLA(tiny_config(), backend="lacking|vanilla", dtype=torch.float32, **options)
    rejected = [str(reason) for row in layer.plan.rejected for reason in row.reasons]
    assert layer.plan.choices["mqa"] == "vanilla" or layer.plan.choices["mha"] == "vanilla"
    assert any(re.search(message, text) for text in rejected), rejected


def test_a_backend_that_fits_is_not_refused():
    with registered("fitting", Counting):
        assert set(build(tiny_config(), backend="fitting").plan.choices.values()) == {"fitting", "core"}


def test_an_unknown_name_fails_and_suggests_the_nearest():
    with pytest.raises(UnknownBackend, match=r"unknown backend 'vanila'(?s:.*)did you mean 'vanilla'"):
        MLA(tiny_config(), backend="vanila")


def test_an_explicit_name_is_never_replaced():
    with (
        registered("lacking", Counting, devices={"sm_90"}),
        pytest.raises(NoBackendFits, match=r"(?s)'lacking' fits.*what would work: backend='vanilla'"),
    ):
        MLA(tiny_config(), backend="lacking", dtype=torch.float32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"backend": "vanilla[fast=1]"}, SpecError, "no option 'fast'"),
        ({"backend": ""}, SpecError, "expected a backend name"),
        ({"dtype": torch.float64}, CacheError, r"torch\.float64"),
        ({"dtype": torch.float64, "cache": "fp32"}, ConfigError, "dtype='float64'"),
        ({"cache": "fp17"}, CacheError, "unknown cache layout 'fp17'; known layouts: auto, fp32"),
        ({"device": "meta"}, ConfigError, "cpu and cuda devices, not on 'meta'"),
        ({"prefill_form": "both"}, ConfigError, "prefill_form='both'.*'auto', 'expand' or 'absorb'"),
        ({"workspace_tokens": 0}, ConfigError, "workspace_tokens must be at least 1, got 0"),
        ({"max_decode_query_len": 0}, ConfigError, "max_decode_query_len must be at least 1, got 0"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_argument_that_makes_no_sense_fails_at_construction(options, error, message):
    with pytest.raises(error, match=message) as raised:
        MLA(tiny_config(), **{"backend": "vanilla", "dtype": torch.float32, **options})
    assert isinstance(raised.value, MLAError)


class Refusing(Counting):
    def __init__(self, context: Any) -> None:
        super().__init__(context)
        raise UnsupportedError("refusing", [])


def test_a_backend_that_refuses_in_its_constructor_fails_the_layers_construction():
    with registered("refusing", Refusing), pytest.raises(UnsupportedError, match="'refusing'"):
        MLA(tiny_config(), backend="refusing", dtype=torch.float32)


@pytest.mark.parametrize(
    ("kind", "owns", "message"),
    [
        (fakes.DecodeOnly, {}, "chosen for mha but its class has no method mha"),
        (fakes.PrefillOnly, {}, "chosen for mqa but its class has no method mqa"),
        (Counting, {"append"}, "chosen for append but its class has no method append"),
        (Counting, {"rope", "append"}, "chosen for append but its class has no method rope_append"),
        (Counting, {"gate"}, "owns the gate, but has no hook implementation"),
    ],
    ids=["mha", "mqa", "append", "rope_append", "gate"],
)
def test_a_backend_that_lacks_what_it_declares_fails_at_construction_by_name(kind, owns, message):
    changes = {"owns": owns, "rope_styles": {"interleaved"}} if owns else {}
    with (
        registered("boasting", kind, **changes),
        pytest.raises(ContractError, match=f"'boasting'.*{message}"),
    ):
        MLA(tiny_config(), backend="boasting", dtype=torch.float32)


def test_a_cache_of_another_layout_is_refused_when_a_step_is_prepared():
    layer, other = build(tiny_config()), build(tiny_config(), dtype=torch.bfloat16)
    world = World(other, [3])
    with pytest.raises(CacheError, match=r"layout 'bf16'.*this layer needs 'fp32'"):
        layer.prepare(world.batch([(0, 3)]), world.cache)


@pytest.mark.parametrize(
    "spec", ["prefill=only;decode=vanilla", "prefill=vanilla;decode=only"], ids=["prefill", "decode"]
)
def test_a_package_may_supply_one_kernel_only(spec):
    kind, kernel = (
        (fakes.PrefillOnly, "mha_prefill") if "prefill=only" in spec else (fakes.DecodeOnly, "mqa_decode")
    )
    with registered("only", kind, kernels={kernel}):
        layer = build(tiny_config(), backend=spec, workspace_tokens=3)
        error = World(layer, [12]).errors([[(0, 5)], [(0, 5)], [(0, 1)], [(0, 1)]])
    chosen = layer.kernels.mha if kernel == "mha_prefill" else layer.kernels.mqa
    assert error < TOLERANCE[torch.float32]
    assert chosen.calls[kernel.split("_")[0]] > 0


def test_every_chosen_kernel_prepares_once_a_step_and_mixed_prefill_once_a_chunk():
    with registered("counting", Counting):
        layer = build(tiny_config(), backend="counting", workspace_tokens=4)
        world = World(layer, [12, 5])
    world.outputs([(0, 9), (1, 4)])
    layer.kernels.mqa.calls.clear()
    world.outputs([(0, 3), (1, 1)])
    # Nine cached tokens are three chunks of four; the new tokens are one call more.
    assert layer.kernels.mqa.calls == {"prepare mqa_decode": 1, "mqa": 1, "prepare mha_prefill": 4, "mha": 4}


def test_lse_from_a_decode_backend_that_does_not_return_it_is_refused_by_name():
    changes = {"kernels": {"mqa_decode"}, "returns": set()}
    with registered("silent", fakes.DecodeOnly, **changes):
        layer = build(tiny_config(), backend="prefill=vanilla;decode=silent")
        world = World(layer, [5])
        step = layer.prepare(world.batch([(0, 1)]), world.cache)
        with pytest.raises(UnsupportedError, match=r"(?s)'silent'.*lse: wanted returned"):
            layer.attention(world.hidden([(0, 1)]), step, return_lse=True)


def test_the_environment_decides_when_no_argument_is_given(monkeypatch):
    with registered("chosen", Counting):
        monkeypatch.setenv("MLA_BACKEND", "chosen")
        layer = MLA(tiny_config(), dtype=torch.float32)
        assert (layer.plan.choices["mqa"], layer.plan.spec_source) == ("chosen", "MLA_BACKEND")
        assert MLA(tiny_config(), backend="vanilla", dtype=torch.float32).plan.choices["mqa"] == "vanilla"


def test_the_config_decides_when_nobody_else_does():
    with registered("chosen", Counting):
        layer = MLA(tiny_config(backend="chosen"), dtype=torch.float32)
    assert (layer.plan.choices["mqa"], layer.plan.spec_source) == ("chosen", "config")


def test_auto_takes_what_fits_with_the_highest_priority():
    with (
        registered("low", Counting, priority=-99),
        registered("high", Counting, priority=5, devices={"sm_90"}),
    ):
        assert MLA(tiny_config(), dtype=torch.float32).plan.choices["mqa"] == "low"
    assert "low" not in registry.names()
