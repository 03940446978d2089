"""Mistral's params.json and the config of DeepSeek's inference code read like the configs they mirror."""

from __future__ import annotations

import json

import pytest

from mla_core.config import Llama4Scaling, MLAConfig, Yarn
from mla_core.errors import ConfigError

MISTRAL_LARGE_3 = {
    "dim": 7168,
    "n_layers": 61,
    "head_dim": 128,
    "hidden_dim": 16384,
    "n_heads": 128,
    "n_kv_heads": 128,
    "rope_theta": 10000.0,
    "norm_eps": 1e-6,
    "vocab_size": 131072,
    "max_position_embeddings": 294912,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "llama_4_scaling": {"original_max_position_embeddings": 8192, "beta": 0.1},
    "yarn": {
        "original_max_position_embeddings": 8192,
        "factor": 36,
        "apply_scale": False,
        "beta": 32,
        "alpha": 1,
    },
    "moe": {"num_experts": 128},
}
DEEPSEEK_V3 = {
    "vocab_size": 129280,
    "dim": 7168,
    "inter_dim": 18432,
    "n_layers": 61,
    "n_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "dtype": "fp8",
}


def refusal(raw: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        MLAConfig.from_hf(raw)
    return str(caught.value)


def test_params_json_reads_as_the_preset_but_for_the_scale_it_declines():
    preset = MLAConfig.preset("mistral-large-3")
    read = MLAConfig.from_hf(MISTRAL_LARGE_3)
    assert read.model_copy(update={"rope": preset.rope}) == preset
    assert read.rope.scaling == Yarn(factor=36, original_max_position=8192, attention_factor=1.0)


def test_apply_scale_false_leaves_the_softmax_alone():
    assert MLAConfig.from_hf(MISTRAL_LARGE_3).softmax_scale == pytest.approx(192**-0.5, abs=1e-9)


def test_apply_scale_true_scales_the_softmax():
    yarn = MISTRAL_LARGE_3["yarn"] | {"apply_scale": True}
    scale = MLAConfig.from_hf(MISTRAL_LARGE_3 | {"yarn": yarn}).softmax_scale
    assert scale == pytest.approx(0.133160057, abs=1e-9)


def test_mistral_scales_queries_by_position():
    assert MLAConfig.from_hf(MISTRAL_LARGE_3).query_scaling == Llama4Scaling(beta=0.1, floor_scale=8192)


def test_a_directory_with_params_json_alone_is_read(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(MISTRAL_LARGE_3))
    assert MLAConfig.from_hf(tmp_path) == MLAConfig.from_hf(MISTRAL_LARGE_3)


def test_config_json_comes_before_params_json(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(MISTRAL_LARGE_3))
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert MLAConfig.from_hf(tmp_path).model_type == "deepseek_v3"


def test_deepseeks_inference_config_reads_as_the_preset():
    assert MLAConfig.from_hf(DEEPSEEK_V3) == MLAConfig.preset("deepseek-v3")


def test_deepseeks_inference_config_with_an_indexer_is_v32():
    indexer = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
    assert MLAConfig.from_hf(DEEPSEEK_V3 | indexer) == MLAConfig.preset("deepseek-v3.2")


def test_a_query_rank_of_0_is_none():
    assert MLAConfig.from_hf(DEEPSEEK_V3 | {"q_lora_rank": 0}).q_lora_rank is None


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        ({"dim": 64, "n_heads": 4, "norm_eps": 1e-5}, "kv_lora_rank is missing from the config"),
        (MISTRAL_LARGE_3 | {"sliding_window": 4096}, "sliding_window=4096 is not supported"),
        (MISTRAL_LARGE_3 | {"lerope": {"alpha": 1}}, "lerope={'alpha': 1} is not supported"),
        (MISTRAL_LARGE_3 | {"yarn": {"gamma": 3}}, "yarn.gamma=3 is not supported"),
        (MISTRAL_LARGE_3 | {"n_kv_heads": 8}, "num_key_value_heads=8 is not supported"),
    ],
    ids=["not MLA", "window", "learned rope", "unknown yarn key", "groups"],
)
def test_what_is_not_understood_is_refused_by_name(raw, problem):
    assert problem in refusal(raw)
