"""Presets are the public checkpoints' numbers."""

from __future__ import annotations

import pytest

from mla_core.config import GateConfig, Llama4Scaling, LongRope, MLAConfig, Yarn

# hidden, heads, query, latent, nope, rope, value, attention layers, longest position, softmax scale.
CHECKPOINTS = {
    "deepseek-v2-lite": (2048, 16, None, 512, 128, 64, 128, 27, 163840, 0.114721387),
    "deepseek-v2": (5120, 128, 1536, 512, 128, 64, 128, 60, 163840, 0.114721387),
    "deepseek-v2.5": (5120, 128, 1536, 512, 128, 64, 128, 60, 163840, 0.135233779),
    "deepseek-v3": (7168, 128, 1536, 512, 128, 64, 128, 61, 163840, 0.135233779),
    "deepseek-r1": (7168, 128, 1536, 512, 128, 64, 128, 61, 163840, 0.135233779),
    "deepseek-v3.1": (7168, 128, 1536, 512, 128, 64, 128, 61, 163840, 0.135233779),
    "deepseek-v3.2": (7168, 128, 1536, 512, 128, 64, 128, 61, 163840, 0.135233779),
    "kimi-k2": (7168, 64, 1536, 512, 128, 64, 128, 61, 131072, 0.130860800),
    "kimi-k2.5": (7168, 64, 1536, 512, 128, 64, 128, 61, 262144, 0.144679626),
    "moonlight": (2048, 16, None, 512, 128, 64, 128, 27, 8192, 0.072168784),
    "kimi-vl": (2048, 16, None, 512, 128, 64, 128, 27, 131072, 0.072168784),
    "kimi-linear": (2304, 32, None, 512, 128, 64, 128, 27, 1048576, 0.072168784),
    "kimi-k3": (7168, 96, 1536, 512, 128, 64, 128, 93, 1048576, 0.072168784),
    "glm-4.7-flash": (2048, 20, 768, 512, 192, 64, 256, 47, 202752, 0.0625),
    "glm-5": (6144, 64, 2048, 512, 192, 64, 256, 78, 202752, 0.0625),
    "glm-5.1": (6144, 64, 2048, 512, 192, 64, 256, 78, 202752, 0.0625),
    "glm-5.2": (6144, 64, 2048, 512, 192, 64, 256, 78, 1048576, 0.0625),
    "longcat-flash": (6144, 64, 1536, 512, 128, 64, 128, 56, 131072, 0.072168784),
    "minicpm3": (2560, 40, 768, 256, 64, 32, 64, 62, 32768, 0.102062073),
    "youtu": (2048, 16, 1536, 512, 128, 64, 128, 32, 131072, 0.072168784),
    "mistral-small-4": (4096, 32, 1024, 256, 64, 64, 128, 36, 1048576, 0.194969495),
    "mistral-large-3": (7168, 128, 1536, 512, 128, 64, 128, 61, 294912, 0.133160057),
    "ling-3.0-flash": (2560, 32, None, 512, 128, 64, 128, 42, 262144, 0.072168784),
}


@pytest.mark.parametrize(("name", "numbers"), CHECKPOINTS.items(), ids=CHECKPOINTS)
def test_a_preset_has_the_checkpoints_dims_and_softmax_scale(name, numbers):
    config = MLAConfig.preset(name)
    assert (
        config.hidden_size,
        config.num_heads,
        config.q_lora_rank,
        config.kv_lora_rank,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.v_head_dim,
        config.num_layers,
        config.max_position_embeddings,
    ) == numbers[:-1]
    assert config.softmax_scale == pytest.approx(numbers[-1], abs=1e-9)


def test_every_preset_is_checked():
    assert sorted(MLAConfig.presets()) == sorted(CHECKPOINTS)


ROPES = {
    "deepseek-v3": ("interleaved", 1e4, (40.0, 4096, 32.0, 1.0, 1.0)),
    "kimi-k2": ("interleaved", 5e4, (32.0, 4096, 1.0, 1.0, 1.0)),
    "kimi-k2.5": ("interleaved", 5e4, (64.0, 4096, 32.0, 1.0, 1.0)),
    "mistral-small-4": ("interleaved", 1e4, (128.0, 8192, 32.0, 1.0, 1.0)),
    "mistral-large-3": ("interleaved", 1e4, (36.0, 8192, 32.0, 1.0, 1.0)),
    "deepseek-v2-lite": ("interleaved", 1e4, (40.0, 4096, 32.0, 0.707, 0.707)),
    "moonlight": ("interleaved", 5e4, None),
    "kimi-vl": ("interleaved", 8e5, None),
    "kimi-linear": ("none", 1e4, None),
    "glm-4.7-flash": ("interleaved", 1e6, None),
    "glm-5": ("interleaved", 1e6, None),
    "glm-5.2": ("interleaved", 8e6, None),
    "longcat-flash": ("interleaved", 1e7, None),
    "youtu": ("interleaved", 1.6e6, None),
    "ling-3.0-flash": ("interleaved", 6e6, None),
}


@pytest.mark.parametrize(("name", "expected"), ROPES.items(), ids=ROPES)
def test_a_preset_rotates_as_the_checkpoint_does(name, expected):
    rope = MLAConfig.preset(name).rope
    style, theta, yarn = expected
    assert (rope.style, rope.theta) == (style, theta)
    assert rope.scaling == (
        yarn
        and Yarn(
            factor=yarn[0],
            original_max_position=yarn[1],
            beta_fast=yarn[2],
            mscale=yarn[3],
            mscale_all_dim=yarn[4],
        )
    )


def test_minicpm3_stretches_with_one_table_and_no_amplitude():
    config = MLAConfig.preset("minicpm3")
    assert isinstance(config.rope.scaling, LongRope)
    assert config.rope.style == "half_split"
    assert config.rope.scaling.short_factor == config.rope.scaling.long_factor
    assert config.rope.scaling.original_max_position == config.max_position_embeddings


@pytest.mark.parametrize("name", ["mistral-small-4", "mistral-large-3"])
def test_mistral_scales_queries_by_position(name):
    assert MLAConfig.preset(name).query_scaling == Llama4Scaling(beta=0.1, floor_scale=8192)


def test_longcat_scales_by_the_square_roots_of_the_ranks():
    config = MLAConfig.preset("longcat-flash")
    assert (config.query_scale, config.latent_scale) == pytest.approx((2.0, 12**0.5))


@pytest.mark.parametrize(
    ("name", "gate"),
    [("kimi-k3", GateConfig(kind="elementwise")), ("ling-3.0-flash", GateConfig(kind="per_head"))],
)
def test_gated_checkpoints_have_their_gate(name, gate):
    assert MLAConfig.preset(name).gate == gate


@pytest.mark.parametrize(
    ("name", "heads", "style"),
    [("deepseek-v3.2", 64, "half_split"), ("glm-5", 32, "interleaved"), ("glm-5.2", 32, "interleaved")],
)
def test_sparse_checkpoints_have_their_indexer(name, heads, style):
    indexer = MLAConfig.preset(name).indexer
    assert (indexer.num_heads, indexer.head_dim, indexer.topk, indexer.rope_style) == (
        heads,
        128,
        2048,
        style,
    )


def test_glm_5_2_shares_the_selection_of_every_fourth_layer():
    assert MLAConfig.preset("glm-5.2").indexer.full_layers[:6] == (0, 1, 2, 6, 10, 14)


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("kimi-linear", (3, 7, 11, 15, 19, 23, 26)),
        ("kimi-k3", (*range(3, 92, 4), 92)),
        ("ling-3.0-flash", (5, 11, 17, 23, 29, 35, 41)),
        ("deepseek-v3", None),
    ],
)
def test_hybrids_say_which_layers_are_mla(name, layers):
    assert MLAConfig.preset(name).mla_layers == layers
