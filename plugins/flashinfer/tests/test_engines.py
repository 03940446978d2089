"""Which of FlashInfer's implementations serves a layer."""

from __future__ import annotations

import pytest

from mla_core import LayerRequest, UnsupportedError
from mla_flashinfer.engines import choose

DECODE = frozenset({"mqa_decode"})


def request(device: str, **changes) -> LayerRequest:
    dims = {"heads": 16, "latent": 512, "nope": 128, "rope": 64, "value": 128}
    return LayerRequest(**{"device": device, "dtype": "bfloat16", "layout": "bf16", **dims, **changes})


@pytest.fixture(autouse=True)
def _installed(versions):
    """FlashInfer counts as installed."""


@pytest.mark.parametrize(
    ("device", "engine"),
    [
        ("cuda:sm_90a", "fa3"),
        ("cuda:sm_90", "fa3"),
        ("cuda:sm_80", "fa2"),
        ("cuda:sm_100a", "fa2"),
        ("cuda:sm_120a", "fa2"),
    ],
)
def test_auto_takes_fa3_on_hopper_and_fa2_elsewhere(device, engine):
    assert choose("auto", request(device), DECODE) == engine


def test_a_named_implementation_is_taken():
    assert choose("fa2", request("cuda:sm_90a"), DECODE) == "fa2"


def test_fa3_is_refused_off_hopper_by_device():
    with pytest.raises(UnsupportedError) as refusal:
        choose("fa3", request("cuda:sm_100a"), DECODE)
    (reason,) = refusal.value.reasons
    assert (reason.field, reason.wanted, reason.offered) == ("device", "cuda:sm_100a", "sm_90")
    assert "impl=fa3" in str(reason)


@pytest.mark.parametrize("impl", ["cutlass", "trtllm-gen", "xqa", "cute-dsl", "cudnn"])
def test_implementations_that_are_not_offered_are_refused_with_the_cause(impl):
    with pytest.raises(UnsupportedError) as refusal:
        choose(impl, request("cuda:sm_100a"), DECODE)
    (reason,) = refusal.value.reasons
    assert (reason.field, reason.wanted, reason.offered) == ("impl", impl, "auto, fa3, fa2")
    assert reason.hint


def test_a_refusal_of_all_names_each_implementation_once():
    with pytest.raises(UnsupportedError) as refusal:
        choose("auto", request("cuda:sm_75"), frozenset({"mqa_decode", "mha_prefill"}))
    assert [reason.hint for reason in refusal.value.reasons] == ["with impl=fa3", "with impl=fa2"]
