"""Which layers of a hybrid are MLA, however its config says so."""

from __future__ import annotations

import pytest

from mla_core.config import MLAConfig
from mla_core.config_layers import decoder_layers
from mla_core.errors import ConfigError

TINY = {
    "model_type": "kimi_linear",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_hidden_layers": 8,
}
LINEAR, FULL = "linear_attention", "full_attention"


def mla_layers(**changes) -> tuple[int, ...] | None:
    return MLAConfig.from_hf(TINY | changes).mla_layers


def test_layer_types_name_them():
    assert mla_layers(layer_types=[LINEAR, LINEAR, FULL, LINEAR] * 2) == (2, 6)


def test_kimis_own_list_counts_from_one():
    assert mla_layers(linear_attn_config={"full_attn_layers": [4, 8]}) == (3, 7)


def test_layer_types_come_before_kimis_own_list():
    kinds = [FULL, *[LINEAR] * 7]
    assert mla_layers(layer_types=kinds, linear_attn_config={"full_attn_layers": [4]}) == (0,)


@pytest.mark.parametrize(("changes", "expected"), [({}, (5,)), ({"layer_group_size": 4}, (3, 7))], ids=str)
def test_the_last_layer_of_every_group_of_ling_is_mla(changes, expected):
    assert mla_layers(model_type="bailing_hybrid", **changes) == expected


def test_a_model_whose_layers_are_all_mla_has_no_list():
    assert mla_layers(layer_types=[FULL] * 8) is None


def test_layer_types_of_layers_beyond_the_models_own_are_left_out():
    assert mla_layers(layer_types=[*[LINEAR] * 7, FULL, FULL]) == (7,)


def test_attention_layers_are_all_of_them_without_a_list():
    assert MLAConfig.from_hf(TINY).attention_layers == tuple(range(8))


def test_attention_layers_are_the_listed_ones():
    config = MLAConfig.from_hf(TINY | {"linear_attn_config": {"full_attn_layers": [2, 4]}})
    assert config.attention_layers == (1, 3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"layer_types": [FULL, "sliding_attention"]}, "layer_types='sliding_attention' is not supported"),
        ({"layer_types": [FULL] * 3}, "layer_types='3 entries' is not supported"),
        ({"linear_attn_config": {"full_attn_layers": [9]}}, "full_attn_layers=9 is not supported"),
        ({"linear_attn_config": {"full_attn_layers": [0]}}, "full_attn_layers=0 is not supported"),
        ({"linear_attn_config": {"full_attn_layers": 4}}, "full_attn_layers=4 is not supported"),
    ],
    ids=["kind", "too few", "beyond", "from zero", "no list"],
)
def test_a_list_that_makes_no_sense_is_refused(changes, problem):
    with pytest.raises(ConfigError, match=problem):
        mla_layers(**changes)


def test_a_listed_layer_beyond_the_last_is_refused_by_the_record():
    with pytest.raises(ConfigError, match="mla_layers names layer 8, but num_layers is 8"):
        MLAConfig(**(MLAConfig.from_hf(TINY).model_dump() | {"mla_layers": (1, 8)}))


@pytest.mark.parametrize(
    ("raw", "count"),
    [
        ({"model_type": "deepseek_v3", "num_hidden_layers": 61}, 61),
        ({"model_type": "longcat_flash", "num_layers": 28, "num_hidden_layers": 56}, 28),
        ({"model_type": "deepseek_v3"}, None),
        ({}, None),
    ],
    ids=str,
)
def test_decoder_layers_are_the_models_own(raw, count):
    assert decoder_layers(raw) == count
