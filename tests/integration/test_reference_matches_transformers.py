"""The oracle equals transformers' attention modules in float32, and stops doing so when either is changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_core import reference
from mla_core.config import MLAConfig, RopeConfig
from tests.integration.hf import FAMILIES, Family, hidden_states, state_dict

TOLERANCE = 1e-4
PREFILL, TOKENS = 11, 14
# From the start, and where YaRN's stretch and the float32 rounding of angles are both visible.
STARTS = [0, 20_500]
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
EVERY_START = pytest.mark.parametrize("start", STARTS)

Weights = dict[str, Tensor]


def positions(start: int) -> Tensor:
    return torch.arange(start, start + TOKENS)


def transformers_run(family: Family, start: int):
    """Prefill, then one token at a time: the outputs of all tokens, the cache, the weights, the config."""
    module, hf_config = family.module(seed=1)
    hidden, where = hidden_states(TOKENS, seed=2), positions(start)
    output, cache = family.run(module, hidden[:PREFILL], None, where[:PREFILL])
    outputs = [output]
    for token in range(PREFILL, TOKENS):
        output, cache = family.run(module, hidden[token : token + 1], cache, where[token : token + 1])
        outputs.append(output)
    return torch.cat(outputs), cache, state_dict(module), hf_config


def oracle(config: MLAConfig, weights: Weights, start: int, **options) -> reference.Output:
    hidden = hidden_states(TOKENS, seed=2)
    options = {"angle_dtype": torch.float32} | options
    return reference.attention_layer(config, weights, hidden, positions=positions(start), **options)


def distance(left: Tensor, right: Tensor) -> float:
    return (left.double() - right.double()).abs().max().item()


@EVERY_START
@EVERY_FAMILY
def test_prefill_and_decode_equal_transformers(family, start):
    outputs, _, weights, hf_config = transformers_run(family, start)
    assert distance(oracle(MLAConfig.from_hf(hf_config), weights, start).hidden_SD, outputs) <= TOLERANCE


@EVERY_START
@EVERY_FAMILY
def test_the_absorbed_form_equals_transformers(family, start):
    outputs, _, weights, hf_config = transformers_run(family, start)
    absorbed = oracle(MLAConfig.from_hf(hf_config), weights, start, form="absorbed")
    assert distance(absorbed.hidden_SD, outputs) <= TOLERANCE


@EVERY_START
@EVERY_FAMILY
def test_cached_rows_equal_those_of_transformers(family, start):
    _, cache, weights, hf_config = transformers_run(family, start)
    mine = oracle(MLAConfig.from_hf(hf_config), weights, start)
    latent, k_rope = family.cached_rows(cache, hf_config)
    assert distance(mine.latent_SL, latent) <= TOLERANCE
    assert distance(mine.k_rope_SR, k_rope) <= TOLERANCE


@EVERY_START
@EVERY_FAMILY
def test_the_oracle_continues_from_the_cache_of_transformers(family, start):
    outputs, cache, weights, hf_config = transformers_run(family, start)
    latent, k_rope = (rows[:PREFILL] for rows in family.cached_rows(cache, hf_config))
    continued = reference.cached_layer(
        MLAConfig.from_hf(hf_config),
        weights,
        hidden_states(TOKENS, seed=2)[PREFILL:],
        latent,
        k_rope,
        start + PREFILL,
        angle_dtype=torch.float32,
    )
    assert distance(continued.hidden_SD, outputs[PREFILL:]) <= TOLERANCE


def test_exact_angles_differ_from_those_of_transformers_at_long_positions():
    outputs, _, weights, hf_config = transformers_run(FAMILIES["deepseek_v3"], 100_000)
    exact = oracle(MLAConfig.from_hf(hf_config), weights, 100_000, angle_dtype=torch.float64)
    assert 2 * TOLERANCE < distance(exact.hidden_SD, outputs) < 1e-2


@EVERY_FAMILY
def test_a_config_saved_by_transformers_reads_as_the_object_does(family, tmp_path):
    hf_config = family.config()
    hf_config.save_pretrained(tmp_path)
    assert MLAConfig.from_hf(tmp_path) == MLAConfig.from_hf(hf_config)


# Negative controls: each mistake, made in the oracle's config or weights, must be seen.


def with_scaling(**changes) -> Callable[[MLAConfig], MLAConfig]:
    def change(config: MLAConfig) -> MLAConfig:
        scaling = config.rope.scaling.model_copy(update=changes)
        return config.model_copy(update={"rope": config.rope.model_copy(update={"scaling": scaling})})

    return change


def with_rope(**changes) -> Callable[[MLAConfig], MLAConfig]:
    return lambda config: config.model_copy(update={"rope": config.rope.model_copy(update=changes)})


def with_fields(**changes) -> Callable[[MLAConfig], MLAConfig]:
    return lambda config: config.model_copy(update=changes)


def softmax_scale_times(factor: float) -> Callable[[MLAConfig], MLAConfig]:
    return lambda config: config.model_copy(update={"softmax_scale_override": config.softmax_scale * factor})


ROTATES = RopeConfig(style="interleaved")
CONFIG_MISTAKES = {
    "mscale-dropped": ("deepseek_v3", 0, softmax_scale_times(1 / 1.3688879**2)),
    "mscale-not-squared": ("deepseek_v3", 0, softmax_scale_times(1 / 1.3688879)),
    "lite-mscale-dropped": ("deepseek_v2_lite", 0, with_scaling(mscale_all_dim=None, attention_factor=1.0)),
    "mixed-mscale-amplitude-dropped": ("deepseek_v3_mixed_mscale", 0, with_scaling(attention_factor=1.0)),
    "lone-mscale-amplitude-dropped": (
        "deepseek_v3_mscale_all_dim_only",
        0,
        with_scaling(attention_factor=1.0),
    ),
    "attention-factor-dropped": ("deepseek_v3_attention_factor", 0, with_scaling(attention_factor=1.0)),
    "rope-style-flipped": ("deepseek_v3", 0, with_rope(style="half_split")),
    "v2-rope-style-flipped": ("deepseek_v2", 0, with_rope(style="half_split")),
    "half-split-read-as-interleaved": ("deepseek_v3_half_split", 0, with_rope(style="interleaved")),
    "minicpm3-read-as-interleaved": ("minicpm3", 0, with_rope(style="interleaved")),
    "rope-left-out": ("youtu", 0, with_rope(style="none")),
    "nope-rotated": ("kimi_linear", 0, with_fields(rope=ROTATES)),
    "yarn-not-interpolated": ("deepseek_v3", 20_500, with_scaling(factor=1.0, attention_factor=1.0)),
    "k2-yarn-not-interpolated": ("kimi_k2", 20_500, with_scaling(factor=1.0, attention_factor=1.0)),
    "yarn-ramp-not-truncated": ("deepseek_v3", 20_500, with_scaling(truncate=False)),
    "yarn-ramp-truncated": ("deepseek_v3_attention_factor", 20_500, with_scaling(truncate=True)),
    "k2-beta-fast-32": ("kimi_k2", 20_500, with_scaling(beta_fast=32.0)),
    "theta-10000": ("glm4_moe_lite", 0, with_rope(theta=10000.0)),
    "longrope-short-table": ("minicpm3", 20_500, with_scaling(original_max_position=32768)),
    "longrope-amplitude-dropped": ("minicpm3", 0, with_scaling(attention_factor=1.0)),
    "llama-4-scale-dropped": ("mistral4", 20_500, with_fields(query_scaling=None)),
    "query-scale-dropped": ("longcat_flash", 0, with_fields(query_scale=1.0)),
    "latent-scale-dropped": ("longcat_flash", 0, with_fields(latent_scale=1.0)),
    "gate-dropped": ("bailing_hybrid", 0, with_fields(gate=None)),
    "norm-epsilon-of-the-model": ("deepseek_v3", 0, with_fields(latent_norm_eps=1e-5)),
}


@pytest.mark.parametrize(("name", "start", "change"), CONFIG_MISTAKES.values(), ids=CONFIG_MISTAKES)
def test_a_mistake_in_the_config_is_seen(name, start, change):
    outputs, _, weights, hf_config = transformers_run(FAMILIES[name], start)
    wrong = change(MLAConfig.from_hf(hf_config))
    assert distance(oracle(wrong, weights, start).hidden_SD, outputs) > 2 * TOLERANCE


def keys_before_values(weights: Weights, config: MLAConfig) -> Weights:
    """kv_b_proj with all heads' keys before all heads' values."""
    heads = weights["kv_b_proj.weight"].unflatten(0, (config.num_heads, -1))
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return weights | {"kv_b_proj.weight": torch.cat([keys.flatten(0, 1), values.flatten(0, 1)])}


def without_latent_norm(weights: Weights, config: MLAConfig) -> Weights:
    return weights | {"kv_a_layernorm.weight": torch.ones(config.kv_lora_rank)}


def without_bias(weights: Weights, config: MLAConfig) -> Weights:
    return {name: torch.zeros_like(w) if name.endswith(".bias") else w for name, w in weights.items()}


WEIGHT_MISTAKES = {
    "kv-b-order-swapped": ("deepseek_v3", keys_before_values),
    "latent-norm-weight-ignored": ("deepseek_v3", without_latent_norm),
    "biases-ignored": ("deepseek_v3_bias", without_bias),
}


@pytest.mark.parametrize(("name", "change"), WEIGHT_MISTAKES.values(), ids=WEIGHT_MISTAKES)
def test_a_mistake_in_the_weights_is_seen(name, change):
    outputs, _, weights, hf_config = transformers_run(FAMILIES[name], 0)
    config = MLAConfig.from_hf(hf_config)
    assert distance(oracle(config, change(weights, config), 0).hidden_SD, outputs) > 2 * TOLERANCE


def test_positions_off_by_one_are_seen_in_the_cached_keys():
    family = FAMILIES["deepseek_v3"]
    _, cache, weights, hf_config = transformers_run(family, 0)
    late = oracle(MLAConfig.from_hf(hf_config), weights, 1)
    assert distance(late.k_rope_SR, family.cached_rows(cache, hf_config)[1]) > 2 * TOLERANCE


def test_decode_one_position_late_is_seen():
    family = FAMILIES["deepseek_v3"]
    outputs, cache, weights, hf_config = transformers_run(family, 0)
    latent, k_rope = (rows[:PREFILL] for rows in family.cached_rows(cache, hf_config))
    new = hidden_states(TOKENS, seed=2)[PREFILL:]
    late = reference.cached_layer(MLAConfig.from_hf(hf_config), weights, new, latent, k_rope, PREFILL + 1)
    assert distance(late.hidden_SD, outputs[PREFILL:]) > 2 * TOLERANCE
