"""Quantised checkpoints in a layer: right numbers in every form, in place reloads, complete error reports."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from mla_core import MLA
from mla_core.config import GateConfig
from mla_core.errors import CheckpointError
from mla_core.projections import Linear, QuantisedLinear, SplitUp
from mla_core.quant.weight import multiply
from tests.quantise import FORMATS, checkpoint, quantise
from tests.support import SCENARIOS, World, build, random_weights, tiny_config

# Heads of 60 and 68 rows, 24 columns: a rank's share begins inside blocks of 128 and groups of 32.
CONFIG = tiny_config(
    hidden_size=160,
    num_heads=4,
    q_lora_rank=96,
    kv_lora_rank=64,
    qk_nope_head_dim=44,
    qk_rope_head_dim=16,
    v_head_dim=24,
    attention_bias=True,
    gate=GateConfig(kind="elementwise"),
)
WEIGHTS = random_weights(CONFIG, seed=0)
NEWER = random_weights(CONFIG, seed=1)
TOLERANCE = 1e-5
STEPS = [[(0, 6)], [(0, 4)], [(0, 1)], [(0, 1)]]
EVERY_FORMAT = pytest.mark.parametrize("kind", FORMATS)
MATRICES = [name for name, value in WEIGHTS.items() if value.dim() == 2]


def loaded(given: dict[str, Tensor], **options: object) -> MLA:
    return build(CONFIG, given, **options)


def error(layer: MLA, dense: dict[str, Tensor]) -> float:
    """Prefill, chunk and decode of one request against the oracle with these dense weights."""
    return World(layer, [12], weights=dense).errors(STEPS)


@EVERY_FORMAT
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "dequantised"])
def test_a_layer_computes_with_the_values_that_the_tensors_stand_for(kind, keep):
    given, dense = checkpoint(kind, WEIGHTS)
    assert error(loaded(given, keep_quantised=keep), dense) < TOLERANCE


@EVERY_FORMAT
def test_weights_before_quantisation_give_other_numbers(kind):
    given, _ = checkpoint(kind, WEIGHTS)
    assert error(loaded(given), WEIGHTS) > 100 * TOLERANCE


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_phase_and_mix_computes_with_the_values(name):
    given, dense = checkpoint("fp8_block", WEIGHTS)
    scenario = SCENARIOS[name]
    world = World(loaded(given, **scenario.options), scenario.lengths, weights=dense)
    assert world.errors(scenario.steps) < TOLERANCE


@pytest.mark.parametrize("name", MATRICES)
def test_one_quantised_matrix_among_dense_ones_is_recognised_by_its_scale(name):
    given, dense = dict(WEIGHTS), dict(WEIGHTS)
    stored = quantise("fp8_block", given.pop(name))
    given |= {name.removesuffix("weight") + part: tensor for part, tensor in stored.tensors.items()}
    dense[name] = stored.values
    layer = loaded(given)
    assert error(layer, dense) < TOLERANCE
    assert error(layer, WEIGHTS) > 10 * TOLERANCE


def test_only_o_proj_in_nvfp4_is_how_some_checkpoints_come():
    given, dense = dict(WEIGHTS), dict(WEIGHTS)
    stored = quantise("nvfp4", given.pop("o_proj.weight"))
    given |= {f"o_proj.{part}": tensor for part, tensor in stored.tensors.items()}
    layer = loaded(given)
    assert isinstance(layer.o_proj, QuantisedLinear)
    assert layer.projections.fused
    assert error(layer, {**dense, "o_proj.weight": stored.values}) < TOLERANCE


# Where the weights live.


def test_quantised_weights_stay_as_the_checkpoint_has_them():
    given, _ = checkpoint("fp8_block", WEIGHTS)
    layer = loaded(given)
    for module, name in ((layer.o_proj, "o_proj"), (layer.projections.q_b_proj, "q_b_proj")):
        for part, tensor in module.stored.tensors.items():
            assert torch.equal(tensor.view(torch.uint8), given[f"{name}.{part}"].view(torch.uint8))
    assert isinstance(layer.projections.kv_b_proj, SplitUp)


def test_dequantised_weights_are_plain():
    given, _ = checkpoint("fp8_block", WEIGHTS)
    layer = loaded(given, keep_quantised=False)
    assert layer.projections.fused
    assert not any(isinstance(module, (QuantisedLinear, SplitUp)) for module in layer.modules())


def test_the_down_projections_stay_apart_when_one_is_quantised():
    stored = quantise("fp8_block", WEIGHTS["q_a_proj.weight"])
    given = {name: value for name, value in WEIGHTS.items() if name != "q_a_proj.weight"}
    given |= {f"q_a_proj.{part}": tensor for part, tensor in stored.tensors.items()}
    projections = loaded(given).projections
    assert not projections.fused
    assert isinstance(projections.q_a_proj, QuantisedLinear)
    assert isinstance(projections.kv_a_proj_with_mqa, Linear)


def test_the_absorbed_weights_come_from_the_dequantised_kv_b_proj():
    given, dense = checkpoint("fp8_block", WEIGHTS)
    layer = loaded(given)
    kv_b_HXL = dense["kv_b_proj.weight"].view(4, 44 + 24, 64)
    assert torch.equal(layer.w_uk_HNL, kv_b_HXL[:, :44])
    assert torch.equal(layer.w_uv_HVL, kv_b_HXL[:, 44:])


def test_splitting_before_dequantising_would_be_seen():
    """Split codes and scales by heads first, and head 2 would take its scales from a grid of its own."""
    given, dense = checkpoint("fp8_block", WEIGHTS)
    codes, scales = given["kv_b_proj.weight"], given["kv_b_proj.weight_scale_inv"]
    wrong = codes[68:136].float() * scales[0]
    assert not torch.equal(wrong, dense["kv_b_proj.weight"][68:136])


# Tensor parallelism.


def rank_outputs(given: dict[str, Tensor], tp_rank: int, hidden_TD: Tensor) -> Tensor:
    layer = loaded(given, tp_size=2, tp_rank=tp_rank, reduce=lambda partial: partial)
    world = World(layer, [len(hidden_TD)])
    world.requests[0].hidden_SD = hidden_TD
    return torch.cat([world.outputs(step)[0] for step in ([(0, 9)], [(0, 1)])])


@EVERY_FORMAT
def test_the_ranks_of_a_layer_add_up_to_the_whole(kind):
    given, dense = checkpoint(kind, WEIGHTS)
    hidden_TD = World(loaded(dense), [10]).requests[0].hidden_SD
    whole = World(loaded(dense), [10])
    expected = torch.cat([whole.outputs(step)[0] for step in ([(0, 9)], [(0, 1)])])
    total = sum(rank_outputs(given, rank, hidden_TD) for rank in range(2))
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


def test_a_rank_holds_its_share_of_codes_and_the_scales_it_touches():
    given, _ = checkpoint("fp8_block", WEIGHTS)
    layer = loaded(given, tp_size=2, tp_rank=1, reduce=lambda partial: partial)
    stored = layer.projections.q_b_proj.stored
    # Rows 120 to 240: the second block begins inside.
    assert (stored.shape, stored.skip) == ((120, 96), (120, 0))
    assert stored.tensors["weight_scale_inv"].shape == (2, 1)


# Reloads.


def pointers(layer: MLA) -> dict[str, int]:
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@EVERY_FORMAT
def test_a_reload_takes_effect_in_place(kind):
    layer = loaded(checkpoint(kind, WEIGHTS)[0])
    before = pointers(layer)
    given, dense = checkpoint(kind, NEWER)
    layer.load_hf(given)
    assert pointers(layer) == before
    assert error(layer, dense) < TOLERANCE


@pytest.mark.parametrize("name", MATRICES)
def test_a_partial_reload_of_one_matrix_takes_effect_in_place(name):
    (given, dense), (newer, newer_dense) = checkpoint("fp8_block", WEIGHTS), checkpoint("fp8_block", NEWER)
    layer = loaded(given)
    before = pointers(layer)
    part = {full: value for full, value in newer.items() if full in (name, f"{name}_scale_inv")}
    layer.load_hf(part, partial=True)
    assert pointers(layer) == before
    assert error(layer, {**dense, name: newer_dense[name]}) < TOLERANCE
    assert error(layer, dense) > 10 * TOLERANCE


def test_a_partial_reload_of_codes_without_scales_is_refused():
    layer = loaded(checkpoint("fp8_block", WEIGHTS)[0])
    newer, _ = checkpoint("fp8_block", NEWER)
    with pytest.raises(CheckpointError, match="q_b_proj lacks weight_scale_inv"):
        layer.load_hf({"q_b_proj.weight": newer["q_b_proj.weight"]}, partial=True)


@pytest.mark.parametrize(("first", "second"), [("fp8_block", None), (None, "nvfp4"), ("nvfp4", "int4_group")])
def test_a_layer_may_be_reloaded_in_another_format(first, second):
    def stored(kind: str | None, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return (weights, weights) if kind is None else checkpoint(kind, weights)

    layer = loaded(stored(first, WEIGHTS)[0])
    given, dense = stored(second, NEWER)
    layer.load_hf(given)
    assert error(layer, dense) < TOLERANCE


@pytest.mark.parametrize("module", ["q_a_proj", "kv_a_proj_with_mqa"])
def test_one_half_of_the_fused_matrix_may_become_quantised_and_the_other_stays(module):
    layer = loaded(WEIGHTS)
    name = f"{module}.weight"
    stored = quantise("fp8_block", NEWER[name])
    layer.load_hf({f"{module}.{part}": tensor for part, tensor in stored.tensors.items()}, partial=True)
    assert error(layer, {**WEIGHTS, name: stored.values}) < TOLERANCE


def test_a_dense_kv_b_proj_may_follow_a_quantised_one():
    given, dense = checkpoint("fp8_block", WEIGHTS)
    layer = loaded(given)
    layer.load_hf({"kv_b_proj.weight": NEWER["kv_b_proj.weight"]}, partial=True)
    assert error(layer, {**dense, "kv_b_proj.weight": NEWER["kv_b_proj.weight"]}) < TOLERANCE


def test_preparing_again_changes_nothing():
    given, dense = checkpoint("fp8_block", WEIGHTS)
    layer = loaded(given)
    layer.prepare_weights()
    assert error(layer, dense) < TOLERANCE


def test_loading_does_not_keep_the_checkpoints_memory():
    given, dense = checkpoint("fp8_block", WEIGHTS)
    mine = {name: value.clone() for name, value in given.items()}
    layer = loaded(mine)
    for value in mine.values():
        value.copy_(torch.zeros_like(value))
    assert error(layer, dense) < TOLERANCE


def test_state_dicts_pass_between_layers_that_hold_the_same_format():
    layer, other = loaded(checkpoint("nvfp4", WEIGHTS)[0]), loaded(checkpoint("nvfp4", NEWER)[0])
    layer.load_state_dict(other.state_dict())
    assert error(layer, checkpoint("nvfp4", NEWER)[1]) < TOLERANCE


@pytest.mark.parametrize("through", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_work_on_their_own(through):
    (given, dense), (newer, newer_dense) = checkpoint("fp8_block", WEIGHTS), checkpoint("fp8_block", NEWER)
    layer = loaded(given)
    twin = through(layer)
    twin.load_hf(newer)
    assert error(layer, dense) < TOLERANCE
    assert error(twin, newer_dense) < TOLERANCE


def test_casting_a_model_leaves_codes_and_scales_as_they_are():
    given, dense = checkpoint("fp8_block", WEIGHTS)
    layer = loaded(given)
    nn.ModuleDict({"attention": layer}).float()
    assert layer.o_proj.weight.dtype == torch.float8_e4m3fn
    assert error(layer, dense) < TOLERANCE


def test_quantised_modules_are_listed_by_checkpoint_name():
    given, _ = checkpoint("fp8_block", WEIGHTS)
    # kv_b_proj is split, not kept.
    names = {name.removesuffix(".weight") for name in MATRICES} - {"kv_b_proj"}
    assert loaded(given).quantised_modules.keys() == names
    assert loaded(WEIGHTS).quantised_modules == {}


def test_a_kernel_may_replace_the_product():
    given, dense = checkpoint("fp8_block", WEIGHTS)
    layer = loaded(given)
    seen = []

    def kernel(x, weight, bias):
        seen.append(weight.format.id)
        return multiply(x, weight, bias)

    layer.quantised_modules["o_proj"].multiply = kernel
    assert error(layer, dense) < TOLERANCE
    assert seen == ["fp8"] * len(STEPS)


# What a load reports.


def test_the_report_names_every_tensor_that_was_taken():
    given, _ = checkpoint("nvfp4_packed", WEIGHTS)
    layer = MLA(CONFIG, backend="vanilla", dtype=torch.float32)
    report = layer.load_hf({**given, "k_scale": torch.ones(1), "rotary_emb.inv_freq": torch.ones(2)})
    assert set(report.loaded) == set(given)
    assert set(report.complete) == set(WEIGHTS)
    assert report.ignored == ("k_scale", "rotary_emb.inv_freq")


def test_weights_may_come_in_several_partial_loads():
    given, dense = checkpoint("int4_group", WEIGHTS)
    layer = MLA(CONFIG, backend="vanilla", dtype=torch.float32)
    for module in sorted({name.rpartition(".")[0] for name in given}):
        part = {name: value for name, value in given.items() if name.rpartition(".")[0] == module}
        layer.load_hf(part, partial=True)
    assert error(layer, dense) < TOLERANCE


def test_everything_that_does_not_fit_is_reported_at_once_scales_included():
    given, _ = checkpoint("fp8_block", WEIGHTS)
    del given["q_a_proj.weight_scale_inv"], given["o_proj.bias"], given["g_proj.weight_scale_inv"]
    del given["g_proj.weight"]
    given |= {"q_b_proj.weight_scale_inv": torch.ones(9, 1), "other.weight_scale": torch.ones(1)}
    given["kv_a_layernorm.weight"] = torch.ones(63)
    with pytest.raises(CheckpointError) as refused:
        MLA(CONFIG, backend="vanilla", dtype=torch.float32).load_hf(given)
    for words in (
        "q_a_proj lacks weight_scale_inv [1, 2], which the format fp8 needs",
        "missing o_proj.bias [160]",
        "missing g_proj.weight [96, 160]",
        "q_b_proj weight_scale_inv has shape [9, 1], expected [2, 1] for blocks of 128 x 128",
        "unexpected other.weight_scale [1]",
        "kv_a_layernorm.weight has shape [63], expected [64]",
    ):
        assert words in str(refused.value)


def test_a_refused_checkpoint_changes_no_weight():
    given, dense = checkpoint("fp8_block", WEIGHTS)
    layer = loaded(given)
    newer, _ = checkpoint("fp8_block", NEWER)
    with pytest.raises(CheckpointError):
        layer.load_hf({**newer, "extra": torch.zeros(1)})
    assert error(layer, dense) < TOLERANCE


def test_codes_without_any_scale_are_refused_not_read_as_values():
    given = {**WEIGHTS, "o_proj.weight": WEIGHTS["o_proj.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(CheckpointError, match="o_proj lacks weight_scale_inv"):
        loaded(given)
