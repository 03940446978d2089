"""R16: derived weights follow every load in place, and stale state is an error or a warning."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from unittest.mock import patch

import pytest
import torch
from torch import nn

from mla_core import MLA, weights
from mla_core.config import GateConfig
from mla_core.errors import CheckpointError, ContractError, StaleCacheWarning, WeightsNotReady
from tests import faults
from tests.support import SCENARIOS, TOLERANCE, World, build, random_weights, relative_error, tiny_config

CONFIG = tiny_config(attention_bias=True, gate=GateConfig(kind="per_head"))
OLD, NEW = random_weights(CONFIG, seed=0), random_weights(CONFIG, seed=1)
BOTH_FORMS = {"expand": {}, "absorb": {"prefill_form": "absorb"}}


def empty_layer(**options: object) -> MLA:
    return MLA(CONFIG, backend="vanilla", dtype=torch.float32, **options)


def error_against(layer: MLA, known: dict[str, torch.Tensor]) -> float:
    """Prefill, chunk and decode of one request on a fresh cache."""
    return World(layer, [12], weights=known).errors([[(0, 6)], [(0, 4)], [(0, 1)], [(0, 1)]])


def pointers(layer: MLA) -> dict[str, int]:
    tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {name: tensor.data_ptr() for name, tensor in tensors.items()}


@pytest.mark.parametrize("form", BOTH_FORMS)
def test_a_reload_takes_effect_in_every_form(form):
    layer = build(CONFIG, OLD, **BOTH_FORMS[form])
    layer.load_hf(NEW)
    assert error_against(layer, NEW) < TOLERANCE[torch.float32]
    assert error_against(layer, OLD) > 0.1


@pytest.mark.parametrize("form", BOTH_FORMS)
@pytest.mark.parametrize("name", sorted(OLD))
def test_a_partial_reload_of_any_tensor_takes_effect_in_every_form(form, name):
    layer = build(CONFIG, OLD, **BOTH_FORMS[form])
    layer.load_hf({name: NEW[name]}, partial=True)
    assert error_against(layer, {**OLD, name: NEW[name]}) < TOLERANCE[torch.float32]
    assert error_against(layer, OLD) > 1e-3


def test_derived_weights_that_are_not_refreshed_are_noticed():
    layer = build(CONFIG, OLD)
    with patch.object(weights, "refresh_derived", lambda layer: None):
        layer.load_hf(NEW)
    assert error_against(layer, NEW) > 0.1


@pytest.mark.parametrize("partial", [False, True], ids=["whole", "kv_b_only"])
def test_a_reload_changes_values_in_place(partial):
    layer = build(CONFIG, OLD)
    before = pointers(layer)
    old = layer.w_uk_HNL.clone(), layer.w_uv_HLV.clone()
    layer.load_hf({"kv_b_proj.weight": NEW["kv_b_proj.weight"]} if partial else NEW, partial=partial)
    assert pointers(layer) == before
    assert not torch.equal(layer.w_uk_HNL, old[0])
    assert not torch.equal(layer.w_uv_HLV, old[1])


def test_load_state_dict_refreshes_derived_weights_in_place():
    layer, other = build(CONFIG, OLD), build(CONFIG, NEW)
    before = pointers(layer)
    layer.load_state_dict(other.state_dict())
    assert pointers(layer) == before
    assert error_against(layer, NEW) < TOLERANCE[torch.float32]


def test_load_state_dict_makes_a_fresh_layer_ready():
    layer = empty_layer()
    layer.load_state_dict(build(CONFIG, NEW).state_dict())
    assert error_against(layer, NEW) < TOLERANCE[torch.float32]


def test_a_partial_load_state_dict_does_not_make_a_fresh_layer_ready():
    layer = empty_layer()
    some = {name: value for name, value in build(CONFIG, NEW).state_dict().items() if "kv_b" not in name}
    layer.load_state_dict(some, strict=False)
    with pytest.raises(WeightsNotReady):
        error_against(layer, NEW)


def test_a_partial_load_state_dict_refreshes_a_loaded_layer():
    layer = build(CONFIG, OLD)
    part = {"projections.kv_b_proj.weight": NEW["kv_b_proj.weight"]}
    layer.load_state_dict(part, strict=False)
    assert error_against(layer, {**OLD, "kv_b_proj.weight": NEW["kv_b_proj.weight"]}) < 1e-5


def test_what_another_module_of_the_model_misses_does_not_concern_the_layer():
    model = nn.ModuleDict({"embed": nn.Linear(2, 2), "attention": empty_layer(), "head": nn.Linear(2, 2)})
    full = nn.ModuleDict({"attention": build(CONFIG, NEW)}).state_dict()
    model.load_state_dict(full, strict=False)
    assert error_against(model["attention"], NEW) < TOLERANCE[torch.float32]


def test_weights_may_come_in_several_partial_loads():
    layer, names = empty_layer(), sorted(NEW)
    for part in (names[:3], names[3:7], names[7:]):
        layer.load_hf({name: NEW[name] for name in part}, partial=True)
    assert error_against(layer, NEW) < TOLERANCE[torch.float32]


def test_a_layer_without_weights_refuses_to_run_and_says_what_to_load():
    with pytest.raises(WeightsNotReady, match=r"layer 7 .*load_hf.*kv_b_proj\.weight"):
        error_against(empty_layer(layer_idx=7), NEW)


def test_a_layer_that_lacks_one_tensor_names_it():
    layer = empty_layer()
    layer.load_hf({name: value for name, value in NEW.items() if name != "o_proj.bias"}, partial=True)
    with pytest.raises(WeightsNotReady, match=r"\['o_proj\.bias'\]"):
        error_against(layer, NEW)


def test_prepare_weights_takes_up_parameters_that_were_changed_by_hand():
    layer = build(CONFIG, OLD)
    layer.projections.kv_b_proj.weight.copy_(NEW["kv_b_proj.weight"])
    layer.prepare_weights()
    assert error_against(layer, {**OLD, "kv_b_proj.weight": NEW["kv_b_proj.weight"]}) < 1e-5


def test_prepare_weights_may_run_any_number_of_times():
    layer = build(CONFIG, OLD)
    before = layer.w_uk_HNL.clone(), pointers(layer)
    layer.prepare_weights()
    layer.prepare_weights()
    assert torch.equal(before[0], layer.w_uk_HNL)
    assert before[1] == pointers(layer)


def test_loading_does_not_keep_the_checkpoints_memory():
    given = {name: value.clone() for name, value in NEW.items()}
    layer = build(CONFIG, given)
    for value in given.values():
        value.fill_(torch.nan)
    assert error_against(layer, NEW) < TOLERANCE[torch.float32]


def test_a_checkpoint_of_another_dtype_is_converted():
    in_bf16 = {name: value.bfloat16() for name, value in NEW.items()}
    rounded = {name: value.float() for name, value in in_bf16.items()}
    assert error_against(build(CONFIG, in_bf16), rounded) < TOLERANCE[torch.float32]


def test_a_swap_of_key_and_value_rows_is_noticed():
    world = SCENARIOS["mixed"].world(CONFIG, weights=random_weights(CONFIG))
    with faults.key_and_value_rows_swapped(world):
        assert world.errors(SCENARIOS["mixed"].steps) > 1e-2


# What the owner of cached tokens hears.


def reload_between_steps(layer: MLA, cache, count: int = 3) -> None:
    """Six tokens, new weights, then `count` more tokens of the same request."""
    world = World(layer, [12], weights=OLD, make_cache=lambda *_: cache)
    world.outputs([(0, 6)])
    layer.load_hf(NEW)
    world.outputs([(0, count)])


def test_using_tokens_from_before_a_reload_warns():
    layer = build(CONFIG, OLD, layer_idx=3)
    with pytest.warns(StaleCacheWarning, match="layer 3 .*prefill them again"):
        reload_between_steps(layer, layer.new_cache(8, 4))


@pytest.mark.parametrize("preparer", [0, 1])
def test_every_layer_that_shares_a_pool_warns_about_its_own_tokens(preparer):
    layers = [build(CONFIG, OLD, layer_idx=index) for index in range(2)]
    pool = layers[0].new_pool(2, 8, 4)
    hidden_TD = torch.randn(6, 40)
    world = World(layers[0], [12])

    def run(done: int, count: int) -> None:
        world.requests[0].done = done
        step = layers[preparer].prepare(world.batch([(0, count)]), pool)
        for layer in layers:
            layer(hidden_TD[:count], step)

    run(0, 6)
    layers[1].load_hf(NEW)
    with pytest.warns(StaleCacheWarning, match="layer 1 "):
        run(6, 2)


def test_new_requests_after_a_reload_do_not_warn():
    layer = build(CONFIG, OLD)
    cache = layer.new_cache(8, 4)
    World(layer, [6], weights=OLD, make_cache=lambda *_: cache).outputs([(0, 6)])
    layer.load_hf(NEW)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        World(layer, [6], weights=NEW, make_cache=lambda *_: cache).outputs([(0, 6)])


def test_steps_without_a_reload_do_not_warn():
    layer = build(CONFIG, OLD)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        World(layer, [6]).errors([[(0, 4)], [(0, 1)], [(0, 1)]])


# Copies.


def test_a_deep_copy_works_on_its_own_weights():
    layer = build(CONFIG, OLD)
    twin = copy.deepcopy(layer)
    layer.load_hf(NEW)
    assert error_against(twin, OLD) < TOLERANCE[torch.float32]
    assert error_against(layer, NEW) < TOLERANCE[torch.float32]


def test_a_deep_copy_shares_steps_with_its_original():
    layer = build(CONFIG, OLD)
    world = World(layer, [5], weights=OLD)
    step = layer.prepare(world.batch([(0, 5)]), world.cache)
    out_TD = copy.deepcopy(layer)(world.hidden([(0, 5)]), step)
    assert relative_error(out_TD, world.expected(0).hidden_SD) < TOLERANCE[torch.float32]


def test_a_pickled_layer_works_after_its_way_through_bytes():
    layer = pickle.loads(pickle.dumps(build(CONFIG, OLD)))
    assert error_against(layer, OLD) < TOLERANCE[torch.float32]
    layer.load_hf(NEW)
    assert error_against(layer, NEW) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("move", [lambda layer: layer.half(), lambda layer: layer.to(torch.float64)])
def test_a_layer_refuses_to_change_its_dtype(move):
    with pytest.raises(ContractError, match=re.escape("planned for torch.float32 on cpu")):
        move(build(CONFIG, OLD))


def test_moving_a_layer_to_where_it_is_changes_nothing():
    layer = build(CONFIG, OLD)
    assert layer.to("cpu").to(torch.float32) is layer
    assert error_against(layer, OLD) < TOLERANCE[torch.float32]


# What does not fit.


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_b_proj.weight": None}, r"missing kv_b_proj\.weight \[48, 16\]"),
        ({"extra.weight": torch.zeros(2, 3)}, r"unexpected extra\.weight \[2, 3\]"),
        ({"o_proj.weight": torch.zeros(40, 17)}, r"o_proj\.weight has shape \[40, 17\], expected \[40, 18\]"),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_names_and_shapes(change, message):
    given = {name: value for name, value in {**NEW, **change}.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        empty_layer().load_hf(given)


def test_everything_that_does_not_fit_is_reported_at_once():
    given = {**NEW, "one": torch.zeros(1), "two": torch.zeros(2), "o_proj.bias": torch.zeros(3)}
    del given["q_a_proj.weight"]
    with pytest.raises(CheckpointError) as error:
        empty_layer().load_hf(given)
    assert all(word in str(error.value) for word in ("one [1]", "two [2]", "o_proj.bias", "q_a_proj.weight"))


def test_a_refused_checkpoint_changes_no_weight():
    layer = build(CONFIG, OLD)
    with pytest.raises(CheckpointError):
        layer.load_hf({**NEW, "extra": torch.zeros(1)})
    assert error_against(layer, OLD) < TOLERANCE[torch.float32]


def test_a_prefix_that_matches_nothing_is_refused_with_what_there_is():
    with pytest.raises(CheckpointError, match=r"starts with 'model\.layers\.9\.'.*g_proj"):
        empty_layer().load_hf(NEW, "model.layers.9.")


def test_a_prefix_is_cut_off_and_other_layers_are_left_alone():
    model = {f"layers.0.{name}": value for name, value in OLD.items()}
    model |= {f"layers.1.{name}": value for name, value in NEW.items()}
    layer = empty_layer()
    layer.load_hf(model, "layers.1.")
    assert error_against(layer, NEW) < TOLERANCE[torch.float32]
