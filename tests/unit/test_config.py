"""The config record: derived numbers, and errors that name the fields."""

from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from mla_core.config import LongRope, MLAConfig, RopeConfig, Yarn, yarn_mscale
from mla_core.errors import ConfigError

DIMS = {
    "hidden_size": 16,
    "num_heads": 2,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}


def test_derived_widths_follow_the_dims():
    config = MLAConfig(**DIMS)
    assert (config.qk_head_dim, config.latent_width) == (16, 12)


@pytest.mark.parametrize(
    ("attention", "output", "expected"), [(True, None, True), (False, None, False), (True, False, False)]
)
def test_the_output_bias_follows_the_attention_bias_unless_given(attention, output, expected):
    assert MLAConfig(**DIMS, attention_bias=attention, output_bias=output).has_output_bias is expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (RopeConfig(), 0.25),
        (RopeConfig(scaling=Yarn(factor=40, original_max_position=4096)), 0.25),
        (RopeConfig(scaling=Yarn(factor=40, original_max_position=4096, mscale_all_dim=1.0)), 0.4684636),
        (RopeConfig(style="none", scaling=Yarn(factor=40, original_max_position=9, mscale_all_dim=1)), 0.25),
    ],
    ids=["plain", "yarn-without-all-dim", "yarn", "not-rotated"],
)
def test_the_softmax_scale_is_squared_mscale_over_the_root_of_the_head_dim(rope, expected):
    assert MLAConfig(**DIMS, rope=rope).softmax_scale == pytest.approx(expected, abs=1e-7)


def test_an_override_replaces_the_softmax_scale():
    assert MLAConfig(**DIMS, softmax_scale_override=0.5).softmax_scale == 0.5


@pytest.mark.parametrize(
    ("factor", "mscale", "expected"), [(40, 1.0, 1.368888), (40, 0.5, 1.184444), (1, 1.0, 1.0)]
)
def test_mscale_grows_with_the_logarithm_of_the_factor(factor, mscale, expected):
    assert yarn_mscale(factor, mscale) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", MLAConfig.presets())
def test_a_config_survives_json_and_pickle(name):
    config = MLAConfig.preset(name)
    assert MLAConfig.model_validate_json(config.model_dump_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_a_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        MLAConfig(**DIMS).num_heads = 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            DIMS | {"num_heads": -1, "kv_lora_rank": "wide"},
            "MLAConfig is not valid: num_heads=-1: Input should be greater than 0; "
            "kv_lora_rank='wide': Input should be a valid integer, unable to parse string as an integer",
        ),
        (
            {name: value for name, value in DIMS.items() if name != "v_head_dim"},
            "MLAConfig is not valid: v_head_dim: missing",
        ),
        (
            DIMS | {"q_lora_rnk": 8},
            "MLAConfig is not valid: q_lora_rnk: no such field; did you mean 'q_lora_rank'?",
        ),
        (
            DIMS | {"qk_rope_head_dim": 3},
            "MLAConfig is not valid: qk_rope_head_dim must be even to rotate in pairs, got 3",
        ),
        (
            DIMS | {"rope": {"style": "neox"}},
            "MLAConfig is not valid: rope: RopeConfig is not valid: "
            "style='neox': Input should be 'interleaved', 'half_split' or 'none'",
        ),
        (
            DIMS
            | {
                "rope": RopeConfig(
                    scaling=LongRope(short_factor=(1,), long_factor=(1, 2), original_max_position=9)
                )
            },
            "MLAConfig is not valid: "
            "rope.scaling.short_factor must hold 2 numbers, one for each rotated pair",
        ),
    ],
    ids=["values", "missing", "unknown", "odd-rope", "nested", "longrope-table"],
)
def test_fields_that_do_not_fit_are_all_named(fields, message):
    with pytest.raises(ConfigError) as caught:
        MLAConfig(**fields)
    assert str(caught.value) == message


def test_an_odd_rope_width_is_legal_when_nothing_rotates():
    assert MLAConfig(**DIMS | {"qk_rope_head_dim": 3, "rope": {"style": "none"}}).latent_width == 11
