"""The layer: what it is built from, what it plans, and how layers share a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_core import MLA, Batch
from mla_core.errors import ConfigError
from mla_core.plan import Plan
from tests.support import World, build, random_weights, tiny_config

STAGES = ("create_output", "project", "rope", "append", "attend", "gate", "project_out")


def test_forward_runs_every_stage_once_in_the_order_of_the_pipeline(monkeypatch):
    world = World(build(tiny_config()), [5])
    order: list[str] = []

    def recording(name: str) -> Any:
        stage = getattr(world.layer.program, name)

        def run(*arguments: Any) -> Any:
            order.append(name)
            return stage(*arguments)

        return run

    recorded = {name: recording(name) for name in STAGES}
    monkeypatch.setattr(world.layer, "program", replace(world.layer.program, **recorded))
    world.outputs([(0, 5)])
    assert order == list(STAGES)


def test_the_plan_is_a_record_that_survives_json():
    plan = build(tiny_config()).plan
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert plan.choices == {
        "mha": "vanilla",
        "mqa": "vanilla",
        "append": "core",
        "rope": "core",
        "v_up": "core",
        "gate": "core",
    }


def test_the_plan_is_made_before_any_weight_is_loaded():
    layer = MLA(tiny_config(), backend="vanilla", workspace_tokens=77)
    assert (layer.ready, layer.plan.workspace_tokens) == (False, 77)


def test_layers_built_alike_have_one_signature():
    assert build(tiny_config(), layer_idx=0).signature is build(tiny_config(), layer_idx=7).signature


@pytest.mark.parametrize(
    "other",
    [
        {"workspace_tokens": 9},
        {"max_decode_query_len": 2},
        {"prefill_form": "absorb"},
        {"dtype": torch.bfloat16},
        {"cache": "bf16"},
        {"config": {"softmax_scale_override": 0.1}},
        {"config": {"rope": {"theta": 77.0}}},
    ],
    ids=str,
)
def test_layers_built_otherwise_have_signatures_of_their_own(other):
    changes = dict(other)
    config = tiny_config(**changes.pop("config", {}))
    mine = MLA(config, **{"backend": "vanilla", "dtype": torch.float32, **changes})
    assert mine.signature is not build(tiny_config()).signature


def test_absorbed_weights_are_the_halves_of_kv_b_proj_head_by_head():
    weights = random_weights(tiny_config())
    layer = build(tiny_config(), weights)
    kv_b_HXL = weights["kv_b_proj.weight"].view(3, 10 + 6, 16)
    assert torch.equal(layer.w_uk_HNL, kv_b_HXL[:, :10])
    assert torch.equal(layer.w_uv_HLV, kv_b_HXL[:, 10:].transpose(1, 2))


def test_a_new_cache_is_made_for_its_layer():
    cache = build(tiny_config(), layer_idx=4).new_cache(3, 8)
    assert (cache.layer_idx, cache.num_pages, cache.page_size, cache.layout.id) == (4, 3, 8, "fp32")


@pytest.mark.parametrize(
    ("cache", "dtype", "expected"),
    [
        ("auto", torch.float32, "fp32"),
        ("auto", torch.bfloat16, "bf16"),
        ("auto", torch.float16, "fp16"),
        ("bf16", torch.float32, "bf16"),
        ("fp32", torch.bfloat16, "fp32"),
    ],
)
def test_the_cache_stores_the_layers_dtype_unless_told_otherwise(cache, dtype, expected):
    assert MLA(tiny_config(), backend="vanilla", cache=cache, dtype=dtype).layout.id == expected


def test_a_cache_of_another_float_type_is_read_and_written_with_its_own_rounding():
    world = World(build(tiny_config(), cache="bf16"), [12])
    error = world.errors([[(0, 6)], [(0, 4)], [(0, 1)], [(0, 1)]])
    assert 1e-5 < error < 1e-2


def test_expand_is_the_form_of_prefill_unless_told_otherwise():
    assert "mha" in build(tiny_config()).plan.choices
    assert "mha" in build(tiny_config(), prefill_form="expand").plan.choices
    absorbed = build(tiny_config(), prefill_form="absorb")
    assert absorbed.kernels.mha is None
    assert absorbed.plan.choices["mqa_prefill"] == "vanilla"


@pytest.mark.parametrize("name", ["workspace_tokens", "max_decode_query_len"])
@pytest.mark.parametrize("value", [0, -5])
def test_counts_below_one_are_refused_by_name_and_value(name, value):
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, got {value}"):
        MLA(tiny_config(), backend="vanilla", **{name: value})


def test_weights_never_require_gradients():
    assert not any(
        parameter.requires_grad for parameter in build(tiny_config(gate={"kind": "per_head"})).parameters()
    )


def test_state_dict_holds_parameters_and_no_derived_buffers():
    assert set(build(tiny_config()).state_dict()) == {
        "o_proj.weight",
        "projections.q_a_layernorm.weight",
        "projections.q_b_proj.weight",
        "projections.qkv_a_proj.weight",
        "projections.kv_a_layernorm.weight",
        "projections.kv_b_proj.weight",
    }


def test_a_layer_serves_batches_of_any_size_after_one_another():
    layer = build(tiny_config())
    cache = layer.new_cache(8, 4)
    for queries in ([3], [1, 1, 1, 1], [7, 2]):
        batch = Batch.build(queries, [0] * len(queries), [[2 * i, 2 * i + 1] for i in range(len(queries))], 4)
        out_TD = layer(torch.randn(sum(queries), 40), layer.prepare(batch, cache))
        assert out_TD.shape == (sum(queries), 40)
