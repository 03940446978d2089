"""R10: any number of heads from 1 to 128, and a split over ranks that is exact or refused."""

from __future__ import annotations

import pytest
import torch

from mla_core import MLA
from mla_core.errors import ConfigError
from tests import faults
from tests.support import SCENARIOS, TOLERANCE, build, random_weights, relative_error, tiny_config

NARROW = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "kv_lora_rank": 8}


@pytest.mark.parametrize("heads", [1, 2, 3, 12, 20, 40, 96, 127, 128])
@pytest.mark.parametrize("scenario", ["absorbed_context", "mixed"])
def test_any_number_of_heads_matches_the_oracle(scenario, heads):
    assert SCENARIOS[scenario].error(tiny_config(num_heads=heads, **NARROW)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("heads", [1, 20, 128])
def test_a_wrong_scale_is_noticed_with_any_number_of_heads(heads):
    world = SCENARIOS["mixed"].world(tiny_config(num_heads=heads, **NARROW))
    with faults.scale_one_percent_off(world):
        assert world.errors(SCENARIOS["mixed"].steps) > 5e-4


@pytest.mark.parametrize("heads", [1, 12, 128])
def test_the_output_has_exactly_the_heads_of_the_config(heads):
    world = SCENARIOS["decode"].world(tiny_config(num_heads=heads, **NARROW))
    assert [values.shape[1] for values, _ in world.attention(SCENARIOS["decode"].steps[0])] == [heads, heads]


def rank_outputs(scenario: str, tp: int, config, weights) -> list[torch.Tensor]:
    """The last step's partial hidden states of every rank."""
    found = []
    for rank in range(tp):
        options = {"tp_size": tp, "tp_rank": rank, "reduce": lambda partial: partial}
        world = SCENARIOS[scenario].world(config, weights=weights, **options)
        rows = [torch.cat(world.outputs(counts)) for counts in SCENARIOS[scenario].steps]
        found.append(torch.cat(rows))
    return found


@pytest.mark.parametrize("tp", [1, 2, 3, 6])
@pytest.mark.parametrize("scenario", ["chunked_prefill", "mixed"])
def test_the_sum_over_tensor_parallel_ranks_is_the_whole_layer(scenario, tp):
    config = tiny_config(num_heads=6, attention_bias=True)
    weights = random_weights(config)
    world = SCENARIOS[scenario].world(config, weights=weights)
    whole = torch.cat([torch.cat(world.outputs(counts)) for counts in SCENARIOS[scenario].steps])
    assert relative_error(sum(rank_outputs(scenario, tp, config, weights)), whole) < 1e-5


@pytest.mark.parametrize("kind", ["per_head", "elementwise"])
def test_gates_are_split_with_their_heads(kind):
    config = tiny_config(num_heads=6, gate={"kind": kind})
    weights = random_weights(config)
    world = SCENARIOS["context"].world(config, weights=weights)
    whole = world.outputs([(0, 13)])[0]
    assert relative_error(sum(rank_outputs("context", 3, config, weights)), whole) < 1e-5


def test_a_missing_rank_is_noticed():
    config = tiny_config(num_heads=6)
    weights = random_weights(config)
    whole = SCENARIOS["context"].world(config, weights=weights).outputs([(0, 13)])[0]
    assert relative_error(sum(rank_outputs("context", 3, config, weights)[:2]), whole) > 0.1


def test_reduce_sums_the_partial_outputs_inside_the_layer():
    config = tiny_config(num_heads=6)
    weights = random_weights(config)
    partial = rank_outputs("context", 2, config, weights)
    layer = build(config, weights, tp_size=2, tp_rank=0, reduce=lambda mine: mine + partial[1])
    world = SCENARIOS["context"].world(config, weights=weights)
    world.layer = layer
    assert world.error([(0, 13)]) < TOLERANCE[torch.float32]


def test_a_cached_row_is_the_same_on_every_rank():
    config = tiny_config(num_heads=6)
    weights = random_weights(config)
    caches = []
    for rank in range(2):
        options = {"tp_size": 2, "tp_rank": rank, "reduce": lambda partial: partial}
        world = SCENARIOS["context"].world(config, weights=weights, **options)
        world.outputs([(0, 13)])
        caches.append(world.cache.data.nan_to_num(nan=-1.0))
    assert torch.equal(*caches)


@pytest.mark.parametrize(("heads", "tp"), [(3, 2), (20, 8), (96, 5), (4, 8)])
def test_heads_that_the_ranks_cannot_share_are_refused_with_both_numbers(heads, tp):
    with pytest.raises(ConfigError, match=f"{heads} heads .*tp_size={tp}"):
        MLA(tiny_config(num_heads=heads), backend="vanilla", tp_size=tp, reduce=lambda partial: partial)


@pytest.mark.parametrize("rank", [-1, 2, 7])
def test_a_rank_outside_its_group_is_refused(rank):
    with pytest.raises(ConfigError, match=f"tp_rank must be 0 to 1 for tp_size=2, got {rank}"):
        MLA(tiny_config(num_heads=4), tp_size=2, tp_rank=rank, reduce=lambda partial: partial)


@pytest.mark.parametrize("tp", [0, -2])
def test_a_group_of_no_ranks_is_refused(tp):
    with pytest.raises(ConfigError, match=f"tp_size={tp}"):
        MLA(tiny_config(num_heads=4), tp_size=tp)


def test_several_ranks_without_reduce_are_refused():
    with pytest.raises(ConfigError, match="tp_size > 1 needs reduce"):
        MLA(tiny_config(num_heads=4), tp_size=2)
