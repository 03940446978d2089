"""Whole layers through the backend's kernels, against the textbook layer in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mla_core import DeviceInfo, LayerContext, LayerRequest, UnsupportedError, registry
from mla_trtllm_like.backend import TrtllmLike
from plugins.trtllm_like.tests.interpreted import CPU_INFO
from tests.support import SCENARIOS, TOLERANCE, tiny_config

TINY = {"heads": 3, "latent": 16, "nope": 10, "rope": 4, "value": 6}


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    registry.add(CPU_INFO)
    yield
    registry.remove(CPU_INFO.name)


def context(**changes) -> LayerContext:
    request = LayerRequest(
        **{
            "device": DeviceInfo.parse("cuda:sm_90a"),
            "dtype": "bfloat16",
            "layout": "bf16",
            **TINY,
            **changes,
        }
    )
    device = torch.device("cpu")
    return LayerContext(request, frozenset({"mqa_decode"}), {}, 0.1, device, torch.bfloat16)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_layer_agrees_with_the_textbook(scenario):
    error = SCENARIOS[scenario].error(tiny_config(), backend="interpreted")
    assert error < TOLERANCE[torch.float32]


@pytest.mark.parametrize("style", ["half_split", "none"])
def test_a_layer_rotates_in_every_style(style):
    config = tiny_config(rope={"style": style})
    assert SCENARIOS["decode"].error(config, backend="interpreted") < TOLERANCE[torch.float32]


@pytest.mark.parametrize("form", ["rows", "columns"])
def test_a_layer_in_bfloat16_decodes_in_both_forms(form):
    backend = f"interpreted[form={form},parts=3]"
    error = SCENARIOS["verify"].error(tiny_config(), backend=backend, dtype=torch.bfloat16)
    assert error < TOLERANCE[torch.bfloat16]


def test_a_layer_with_rotation_left_out_is_noticed(monkeypatch):
    """Negative control of the whole-layer tests."""

    def unrotated(self, cache, targets, q_rope_THR, latent_TL, k_rope_TR, rope):
        self.append(cache, targets, latent_TL, k_rope_TR)

    monkeypatch.setattr(TrtllmLike, "rope_append", unrotated)
    error = SCENARIOS["decode"].error(tiny_config(), backend="interpreted")
    assert error > 10 * TOLERANCE[torch.float32]


def test_the_backend_rotates_appends_and_attends():
    world = SCENARIOS["decode"].world(tiny_config(), backend="interpreted")
    chosen = {kernel: world.layer.plan.choices[kernel] for kernel in ("mha", "mqa", "rope", "append")}
    assert set(chosen.values()) == {"interpreted"}, chosen


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": DeviceInfo.parse("cpu")}, "device"),
        ({"device": DeviceInfo.parse("cuda:sm_100a")}, "device"),
        ({"heads": 129}, "heads"),
        ({"latent": 513}, "latent"),
        ({"layout": "idx_fp8"}, "layout"),
    ],
)
def test_what_is_not_declared_is_refused_when_a_layer_is_built(changes, field):
    with pytest.raises(UnsupportedError) as refusal:
        TrtllmLike(context(**changes))
    assert [reason.field for reason in refusal.value.reasons] == [field]


def test_what_is_declared_is_accepted():
    assert TrtllmLike(context()).options.parts is None
