"""Loading a checkpoint: which tensors a model has, of which shapes, and where they go."""

from __future__ import annotations

import pytest
import torch

from mla_core import MLA
from mla_core.config import GateConfig
from mla_core.errors import CheckpointError
from mla_core.weights import expected_shapes
from tests.support import build, random_weights, tiny_config

PLAIN = {
    "q_a_proj.weight": (24, 40),
    "q_a_layernorm.weight": (24,),
    "q_b_proj.weight": (42, 24),
    "kv_a_proj_with_mqa.weight": (20, 40),
    "kv_a_layernorm.weight": (16,),
    "kv_b_proj.weight": (48, 16),
    "o_proj.weight": (40, 18),
}
LITE = {name: shape for name, shape in PLAIN.items() if not name.startswith("q_")} | {
    "q_proj.weight": (42, 40)
}


def fresh(**changes: object) -> MLA:
    return MLA(tiny_config(**changes), backend="vanilla", dtype=torch.float32)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, PLAIN),
        ({"q_lora_rank": None}, LITE),
        (
            {"attention_bias": True},
            PLAIN | {"q_a_proj.bias": (24,), "kv_a_proj_with_mqa.bias": (20,), "o_proj.bias": (40,)},
        ),
        (
            {"attention_bias": True, "q_lora_rank": None, "output_bias": False},
            LITE | {"kv_a_proj_with_mqa.bias": (20,)},
        ),
        ({"output_bias": True}, PLAIN | {"o_proj.bias": (40,)}),
        ({"gate": GateConfig(kind="per_head")}, PLAIN | {"g_proj.weight": (3, 40)}),
        ({"gate": GateConfig(kind="elementwise", weight_name="w")}, PLAIN | {"w.weight": (18, 40)}),
    ],
    ids=[
        "plain",
        "no_query_lora",
        "biases",
        "biases_lite",
        "output_bias",
        "gate_per_head",
        "gate_elementwise",
    ],
)
def test_a_model_needs_exactly_the_tensors_of_its_config(changes, expected):
    assert expected_shapes(fresh(**changes)) == expected


def test_shapes_are_those_of_the_whole_checkpoint_on_every_rank():
    whole = expected_shapes(fresh(num_heads=4))
    rank = MLA(
        tiny_config(num_heads=4), backend="vanilla", tp_size=2, tp_rank=1, reduce=lambda partial: partial
    )
    assert expected_shapes(rank) == whole


def test_a_report_names_what_was_loaded_and_what_was_left():
    extra = {"rotary_emb.inv_freq": torch.ones(2), "indexer.wk.weight": torch.ones(2, 2)}
    report = fresh().load_hf({**random_weights(tiny_config()), **extra})
    assert sorted(report.loaded) == sorted(PLAIN)
    assert report.ignored == ("indexer.wk.weight", "rotary_emb.inv_freq")


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_both_down_projections_land_in_their_own_rows(fused):
    weights = random_weights(tiny_config(attention_bias=True))
    layer = build(tiny_config(attention_bias=True), weights, fuse_qkv_a=fused)
    hidden_TD = torch.randn(3, 40)
    q_a_TQ, kv_a_TX = layer.projections.down(hidden_TD)
    for out, name in ((q_a_TQ, "q_a_proj"), (kv_a_TX, "kv_a_proj_with_mqa")):
        expected = hidden_TD @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_heads_of_every_matrix_with_heads(rank):
    config = tiny_config(num_heads=4)
    weights = random_weights(config)
    layer = build(config, weights, tp_size=2, tp_rank=rank, reduce=lambda partial: partial)
    heads = slice(2 * rank, 2 * rank + 2)
    kv_b = weights["kv_b_proj.weight"].view(4, 16, 16)[heads].flatten(0, 1)
    q_b = weights["q_b_proj.weight"].view(4, 14, 24)[heads].flatten(0, 1)
    o = weights["o_proj.weight"].view(40, 4, 6)[:, heads].flatten(1)
    assert torch.equal(layer.projections.kv_b_proj.weight, kv_b)
    assert torch.equal(layer.projections.q_b_proj.weight, q_b)
    assert torch.equal(layer.o_proj.weight, o)


@pytest.mark.parametrize(("rank", "present"), [(0, True), (1, False)])
def test_the_output_bias_is_added_by_the_first_rank_only(rank, present):
    config = tiny_config(num_heads=4, output_bias=True)
    weights = random_weights(config)
    layer = build(config, weights, tp_size=2, tp_rank=rank, reduce=lambda partial: partial)
    assert torch.equal(layer.o_proj.bias, weights["o_proj.bias"] if present else torch.zeros(40))


def test_every_load_counts_as_a_new_version():
    layer = build(tiny_config())
    layer.load_hf({"o_proj.weight": torch.zeros(40, 18)}, partial=True)
    assert layer.weights_version == 2


def test_a_partial_load_still_refuses_names_and_shapes_that_do_not_fit():
    layer = build(tiny_config())
    with pytest.raises(CheckpointError, match=r"unexpected extra \[1\]"):
        layer.load_hf({"extra": torch.zeros(1)}, partial=True)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight has shape \[3, 3\], expected \[40, 18\]"):
        layer.load_hf({"o_proj.weight": torch.zeros(3, 3)}, partial=True)


def test_the_error_of_a_checkpoint_names_the_model_and_its_heads():
    with pytest.raises(CheckpointError, match="weights for a custom layer of 3 heads do not fit"):
        fresh().load_hf({"o_proj.weight": torch.zeros(40, 18)})
