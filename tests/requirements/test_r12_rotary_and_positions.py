"""R12: what rotates, how, and by which position, comes from the config and the request."""

from __future__ import annotations

import math

import pytest
import torch

from mla_core import Batch
from mla_core.config import Llama4Scaling, LongRope, RopeConfig, Yarn
from mla_core.errors import ConfigError
from mla_core.reference import attention_layer, cached_layer
from tests import faults
from tests.support import (
    SCENARIOS,
    TOLERANCE,
    World,
    build,
    random_hidden,
    random_weights,
    relative_error,
    tiny_config,
)

YARN = Yarn(factor=4, original_max_position=8, beta_fast=2.0, beta_slow=0.5, mscale=1.0, mscale_all_dim=0.7)
LONG = LongRope(short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=(2.0, 3.0, 4.0, 5.0), original_max_position=64)
ROPES = {
    "interleaved": RopeConfig(style="interleaved"),
    "half_split": RopeConfig(style="half_split"),
    "none": RopeConfig(style="none"),
    "theta": RopeConfig(theta=50.0),
    "yarn": RopeConfig(scaling=YARN),
    "yarn_half_split": RopeConfig(style="half_split", scaling=YARN),
    "yarn_without_mscale": RopeConfig(scaling=Yarn(factor=4, original_max_position=8)),
    "yarn_with_attention_factor": RopeConfig(
        scaling=Yarn(factor=4, original_max_position=8, attention_factor=1.7, truncate=False)
    ),
    "longrope_short": RopeConfig(scaling=LONG),
    "longrope_long": RopeConfig(scaling=LONG.model_copy(update={"original_max_position": 2})),
}
PATHS = ("chunked_prefill", "absorbed_context", "mixed")


def config_of(rope: str, **changes):
    return tiny_config(qk_rope_head_dim=8, rope=ROPES[rope], **changes)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("path", PATHS)
def test_every_rotation_matches_the_oracle_in_every_path(path, rope):
    config = config_of(rope)
    assert SCENARIOS[path].error(config, weights=random_weights(config)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rope", [name for name in ROPES if name != "none"])
@pytest.mark.parametrize("fault", [faults.rope_twice, faults.positions_from_zero])
def test_rotating_twice_or_from_a_wrong_position_is_noticed(fault, rope):
    config = config_of(rope)
    world = SCENARIOS["mixed"].world(config, weights=random_weights(config))
    with fault(world):
        assert world.errors(SCENARIOS["mixed"].steps) > 1e-3


@pytest.mark.parametrize(
    ("rope", "other"),
    [
        ("interleaved", "half_split"),
        ("interleaved", "none"),
        ("interleaved", "theta"),
        ("yarn", "yarn_without_mscale"),
        ("yarn_without_mscale", "yarn_with_attention_factor"),
        ("longrope_short", "longrope_long"),
    ],
)
def test_taking_one_rotation_for_another_is_noticed(rope, other):
    weights = random_weights(config_of(rope))
    world = SCENARIOS["mixed"].world(config_of(rope), weights=weights)
    world.layer = build(config_of(other), weights, **SCENARIOS["mixed"].options)
    assert world.errors(SCENARIOS["mixed"].steps) > 1e-3


def test_dims_that_exist_but_never_rotate_do_not_depend_on_positions():
    config = config_of("none")
    world = SCENARIOS["mixed"].world(config, weights=random_weights(config))
    with faults.positions_from_zero(world):
        assert world.errors(SCENARIOS["mixed"].steps) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("style", ["interleaved", "half_split", "none"])
@pytest.mark.parametrize("path", PATHS)
def test_a_model_without_rope_dims_works_in_every_path(path, style):
    config = tiny_config(qk_rope_head_dim=0, rope=RopeConfig(style=style))
    assert SCENARIOS[path].error(config, weights=random_weights(config)) < TOLERANCE[torch.float32]


def test_an_odd_rope_width_is_refused_when_it_would_rotate():
    with pytest.raises(ConfigError, match=r"qk_rope_head_dim must be even.*got 5"):
        tiny_config(qk_rope_head_dim=5)


def test_an_odd_rope_width_that_does_not_rotate_works():
    config = tiny_config(qk_rope_head_dim=5, rope=RopeConfig(style="none"))
    assert SCENARIOS["mixed"].error(config, weights=random_weights(config)) < TOLERANCE[torch.float32]


def one_request(layer, cache, pages, hidden_TD, context: int, positions=None) -> torch.Tensor:
    """New tokens of one request behind `context` cached ones."""
    batch = Batch.build([len(hidden_TD)], [context], [pages], cache.page_size)
    if positions is not None:
        batch = Batch(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            slot_mapping=batch.slot_mapping,
            positions=positions,
        )
    return layer(hidden_TD, layer.prepare(batch, cache))


@pytest.mark.parametrize("query", [1, 3], ids=["decode", "chunk"])
@pytest.mark.parametrize("context", [20_000, 100_000])
def test_far_positions_match_the_oracle_with_float32_angles(query, context):
    """A context of random rows: written by hand, read by the layer and by the oracle."""
    config = config_of("yarn")
    weights = random_weights(config)
    layer = build(config, weights, workspace_tokens=30_000)
    cache = layer.new_cache(context // 1000 + 1, 1000)
    latent_SL = torch.randn(context, 16, generator=torch.Generator().manual_seed(5))
    k_rope_SR = torch.randn(context, 8, generator=torch.Generator().manual_seed(6))
    cache.write(torch.arange(context), latent_SL, k_rope_SR)
    hidden_TD = random_hidden(query, config, 7)
    out_TD = one_request(layer, cache, list(range(cache.num_pages)), hidden_TD, context)
    expected = cached_layer(
        config, weights, hidden_TD, latent_SL, k_rope_SR, context, angle_dtype=torch.float32
    )
    assert relative_error(out_TD, expected.hidden_SD) < 1e-4


def test_given_positions_are_obeyed():
    """Rotary attention depends on distances only, so a common shift of all positions changes nothing."""
    config = tiny_config()
    layer = build(config)
    hidden_TD = random_hidden(9, config, 3)
    outs = []
    for shift in (0, 37):
        cache = layer.new_cache(3, 4)
        first = one_request(layer, cache, [2, 0, 1], hidden_TD[:6], 0, torch.arange(6) + shift)
        last = one_request(layer, cache, [2, 0, 1], hidden_TD[6:], 6, torch.arange(6, 9) + shift)
        outs.append((torch.cat([first, last]), cache.data.clone()))
    torch.testing.assert_close(outs[0][0], outs[1][0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(outs[0][1], outs[1][1], atol=1e-2), "the cached keys must have turned"


@pytest.mark.parametrize("positions", [[0, 2, 4, 6, 8, 10], [7, 3, 5, 0, 0, 1]], ids=["gaps", "disorder"])
def test_any_given_positions_match_the_oracle(positions):
    config = tiny_config()
    layer, hidden_TD = build(config), random_hidden(6, config, 4)
    given_T = torch.tensor(positions)
    out_TD = one_request(layer, layer.new_cache(2, 4), [0, 1], hidden_TD, 0, given_T)
    expected = attention_layer(config, random_weights(config), hidden_TD, positions=given_T)
    assert relative_error(out_TD, expected.hidden_SD) < TOLERANCE[torch.float32]
    assert relative_error(one_request(layer, layer.new_cache(2, 4), [0, 1], hidden_TD, 0), out_TD) > 1e-2


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("path", PATHS)
def test_queries_are_scaled_by_position_across_the_floor(path, offset):
    config = tiny_config(query_scaling=Llama4Scaling(beta=0.5, floor_scale=4, offset=offset))
    assert SCENARIOS[path].error(config, weights=random_weights(config)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "wrong", [None, Llama4Scaling(beta=0.5, floor_scale=4, offset=1), Llama4Scaling(beta=0.4, floor_scale=4)]
)
def test_another_query_scaling_is_noticed(wrong):
    right = tiny_config(query_scaling=Llama4Scaling(beta=0.5, floor_scale=4))
    world = SCENARIOS["mixed"].world(right)
    world.layer = build(right.model_copy(update={"query_scaling": wrong}), **SCENARIOS["mixed"].options)
    assert world.errors(SCENARIOS["mixed"].steps) > 1e-3


@pytest.mark.parametrize(("lengths", "limit"), [((6, 12), 8), ((12, 6), 8)], ids=["short_long", "long_short"])
def test_longrope_picks_its_table_request_by_request(lengths, limit):
    rope = RopeConfig(scaling=LONG.model_copy(update={"original_max_position": limit}))
    config = tiny_config(qk_rope_head_dim=8, rope=rope)
    weights = random_weights(config)
    world = World(build(config, weights), lengths, weights=weights)
    assert world.error([(0, lengths[0]), (1, lengths[1])], max_tokens=20) < TOLERANCE[torch.float32]


def test_yarn_amplitude_is_the_ratio_of_its_two_temperatures():
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(4) + 1

    config = config_of("yarn")
    layer = build(config, random_weights(config))
    batch = Batch.build([1], [0], [[0]], 4)
    step = layer.prepare(batch, layer.new_cache(1, 4))
    assert step.rope.cos_TF[0, 0].item() == pytest.approx(mscale(1.0) / mscale(0.7))
