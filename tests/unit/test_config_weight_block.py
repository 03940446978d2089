"""The block size of quantised weights, from whichever tool stated it."""

from __future__ import annotations

import pytest

from mla_core.config import MLAConfig
from mla_core.errors import ConfigError

TINY = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}


def block(quantisation: dict | None) -> tuple[int, int]:
    return MLAConfig.from_hf(TINY | {"quantization_config": quantisation}).weight_block


def group(**weights) -> dict:
    return {"weights": weights, "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("quantisation", "expected"),
    [
        (None, (128, 128)),
        ({"quant_method": "fp8"}, (128, 128)),
        ({"quant_method": "fp8", "weight_block_size": [64, 32]}, (64, 32)),
        ({"config_groups": {"group_0": group(strategy="block", block_structure=[64, 32])}}, (64, 32)),
        ({"config_groups": {"group_0": group(strategy="block", block_structure="64x32")}}, (64, 32)),
        ({"config_groups": {"group_0": group(strategy="channel", block_structure=None)}}, (128, 128)),
        ({"config_groups": {"group_0": {"weights": None}}}, (128, 128)),
    ],
    ids=["none", "unsaid", "transformers", "compressed", "compressed-text", "channel", "no-weights"],
)
def test_the_block_size_is_the_one_stated_or_128(quantisation, expected):
    assert block(quantisation) == expected


def test_a_multimodal_config_may_state_it_outside_its_text_part():
    outer = {
        "model_type": "kimi_k25",
        "text_config": TINY,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 32]},
    }
    assert MLAConfig.from_hf(outer).weight_block == (64, 32)


def test_two_block_sizes_in_one_model_are_refused():
    groups = {
        "group_0": group(block_structure=[128, 128]),
        "group_1": group(block_structure=[64, 64]),
    }
    with pytest.raises(ConfigError, match=r"quantization_config.*one block size for all weights"):
        block({"config_groups": groups})
