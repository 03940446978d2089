"""R11: dims come from the config, and one softmax scale serves every path."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from mla_core import MLAConfig
from mla_core.config import GateConfig, RopeConfig, Yarn
from tests import faults
from tests.support import SCENARIOS, TOLERANCE, build, random_weights, tiny_config

PATHS = ("chunked_prefill", "absorbed_context", "mixed")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dims(heads: int, latent: int, nope: int, rope: int, value: int, **changes: Any) -> MLAConfig:
    return tiny_config(
        num_heads=heads,
        kv_lora_rank=latent,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        **changes,
    )


CONFIGS = {
    "deepseek": dims(2, 512, 128, 64, 128, q_lora_rank=96),
    "glm": dims(2, 512, 192, 64, 256, q_lora_rank=96),
    "no_query_lora": tiny_config(q_lora_rank=None),
    "value_wider_than_latent": dims(3, 8, 6, 4, 20),
    "value_wider_than_query": dims(3, 16, 2, 2, 9),
    "odd": dims(3, 7, 3, 2, 5, hidden_size=37, q_lora_rank=11),
    "narrowest": dims(1, 3, 1, 2, 2, hidden_size=5, q_lora_rank=2),
    "no_rope_dims": dims(3, 16, 10, 0, 6),
    "biases": tiny_config(attention_bias=True),
    "biases_but_not_of_the_output": tiny_config(attention_bias=True, output_bias=False),
    "output_bias_alone": tiny_config(output_bias=True),
    "biases_without_query_lora": tiny_config(attention_bias=True, q_lora_rank=None),
    "longcat_scales": tiny_config(query_scale=1.29, latent_scale=1.58),
    "gate_per_head": tiny_config(gate=GateConfig(kind="per_head")),
    "gate_elementwise": tiny_config(gate=GateConfig(kind="elementwise", weight_name="gate")),
    "yarn": tiny_config(
        rope=RopeConfig(scaling=Yarn(factor=40, original_max_position=8, mscale_all_dim=1.0))
    ),
    "scale_override": tiny_config(softmax_scale_override=0.31),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("path", PATHS)
def test_the_layer_matches_the_oracle_for_every_shape_of_model(path, name):
    config = CONFIGS[name]
    error = SCENARIOS[path].error(config, weights=random_weights(config))
    assert error < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["no_query_lora", "value_wider_than_latent", "odd", "no_rope_dims", "yarn"])
def test_a_scale_that_is_one_percent_off_is_noticed(name):
    world = SCENARIOS["mixed"].world(CONFIGS[name], weights=random_weights(CONFIGS[name]))
    with faults.scale_one_percent_off(world):
        assert world.errors(SCENARIOS["mixed"].steps) > 3e-4


@pytest.mark.parametrize("name", ["glm", "value_wider_than_query", "odd", "longcat_scales"])
def test_a_swap_of_key_and_value_rows_is_noticed(name):
    world = SCENARIOS["mixed"].world(CONFIGS[name], weights=random_weights(CONFIGS[name]))
    with faults.key_and_value_rows_swapped(world):
        assert world.errors(SCENARIOS["mixed"].steps) > 1e-2


@pytest.mark.parametrize("name", ["longcat_scales", "gate_per_head", "gate_elementwise", "output_bias_alone"])
def test_leaving_out_what_the_config_adds_is_noticed(name):
    config, weights = CONFIGS[name], random_weights(CONFIGS[name])
    world = SCENARIOS["mixed"].world(config, weights=weights)
    without = config.model_copy(
        update={"query_scale": 1.0, "latent_scale": 1.0, "gate": None, "output_bias": False}
    )
    known = {key: value for key, value in weights.items() if key in random_weights(without)}
    world.layer = build(without, known, **SCENARIOS["mixed"].options)
    assert world.errors(SCENARIOS["mixed"].steps) > 1e-2


@pytest.mark.parametrize("name", ["deepseek", "no_query_lora", "odd", "gate_elementwise", "longcat_scales"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bit_layers_match_the_oracle_on_their_own_weights(dtype, name):
    config = CONFIGS[name]
    weights = random_weights(config, dtype=DTYPES[dtype])
    error = SCENARIOS["mixed"].error(config, weights=weights, dtype=DTYPES[dtype])
    assert error < TOLERANCE[DTYPES[dtype]]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "fault", [faults.mask_one_too_wide, faults.rope_twice, faults.key_and_value_rows_swapped]
)
def test_faults_are_noticed_in_16_bits_too(fault, dtype):
    world = SCENARIOS["mixed"].world(tiny_config(), dtype=DTYPES[dtype])
    with fault(world):
        assert world.errors(SCENARIOS["mixed"].steps) > 3 * TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", ["deepseek", "biases"])
def test_one_fused_down_projection_equals_two(name):
    config, weights = CONFIGS[name], random_weights(CONFIGS[name])
    for fused in (True, False):
        error = SCENARIOS["mixed"].error(config, weights=weights, fuse_qkv_a=fused)
        assert error < TOLERANCE[torch.float32], f"fuse_qkv_a={fused}"


def test_yarn_multiplies_the_scale_by_the_square_of_its_temperature():
    config = dims(1, 512, 128, 64, 128)
    scaled = config.model_copy(
        update={"rope": RopeConfig(scaling=Yarn(factor=40, original_max_position=4096, mscale_all_dim=1.0))}
    )
    assert config.softmax_scale == pytest.approx(192**-0.5)
    # 0.1 ln(40) + 1 = 1.36889, squared, over sqrt(192).
    assert scaled.softmax_scale == pytest.approx(0.135234, rel=1e-5)


@pytest.mark.parametrize("name", ["deepseek", "yarn", "scale_override", "value_wider_than_latent"])
@pytest.mark.parametrize("path", SCENARIOS)
def test_every_kernel_call_of_every_path_gets_the_one_scale(path, name):
    config, scales = CONFIGS[name], []
    world = SCENARIOS[path].world(config, weights=random_weights(config))
    backend = world.layer.kernels.mqa

    def recording(kernel):
        def call(*arguments):
            scales.append(arguments[4])
            kernel(*arguments)

        return call

    with (
        patch.object(backend, "mha", recording(backend.mha)),
        patch.object(
            backend,
            "mqa",
            lambda q, cache, segments, scale, out, lse, honest=backend.mqa: (
                scales.append(scale),
                honest(q, cache, segments, scale, out, lse),
            ),
        ),
    ):
        world.errors(SCENARIOS[path].steps)
    assert set(scales) == {config.softmax_scale}
