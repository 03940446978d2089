"""Reading a Hugging Face config: sources, dims, families, and refusals that say what works."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from mla_core.config import GateConfig, IndexerConfig, MLAConfig, Yarn
from mla_core.config_hf import from_hf, preset, preset_names
from mla_core.errors import ConfigError

ROOT = Path(__file__).parents[2]
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
    "num_hidden_layers": 5,
    "max_position_embeddings": 4096,
}
INDEXER = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 32}


def tiny(model_type: str = "deepseek_v3", **changes) -> dict:
    return TINY | {"model_type": model_type} | changes


def without(*keys: str) -> dict:
    return {key: value for key, value in TINY.items() if key not in keys}


def refusal(source) -> str:
    with pytest.raises(ConfigError) as caught:
        from_hf(source)
    return str(caught.value)


def test_every_dim_lands_in_its_field():
    assert from_hf(tiny()) == MLAConfig(
        model_type="deepseek_v3",
        hidden_size=64,
        num_heads=4,
        q_lora_rank=16,
        kv_lora_rank=32,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        num_layers=5,
        max_position_embeddings=4096,
    )


def test_a_directory_a_file_a_mapping_and_an_object_read_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    sources = [
        tmp_path,
        str(tmp_path),
        tmp_path / "config.json",
        TINY,
        SimpleNamespace(to_dict=lambda: TINY),
    ]
    assert {from_hf(source) for source in sources} == {from_hf(TINY)}


def test_the_trained_tiny_checkpoint_reads():
    config = from_hf(ROOT / "tests/data/tiny_mla_kjv")
    assert (config.hidden_size, config.num_heads, config.num_layers) == (192, 4, 3)
    assert config.rope.scaling == Yarn(factor=4.0, original_max_position=1024, mscale=1.0, mscale_all_dim=1.0)


def test_a_path_that_does_not_exist_suggests_a_preset():
    assert refusal("deepseek-ai/DeepSeek-V3") == (
        "deepseek-ai/DeepSeek-V3 does not exist; give a local directory or config.json, or use "
        "MLAConfig.preset(name); did you mean 'deepseek-v3'?"
    )


@pytest.mark.parametrize(
    ("text", "problem"), [("{", "cannot be read as JSON"), ("[]", "holds list, wanted a JSON object")]
)
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text, problem):
    (tmp_path / "config.json").write_text(text)
    assert f"{tmp_path / 'config.json'} {problem}" in refusal(tmp_path)


def test_a_source_of_another_kind_is_refused():
    assert refusal(3).startswith("cannot read a config from int; give a directory, a config.json path, ")


@pytest.mark.parametrize(
    ("shell", "text", "expected"),
    [
        ("kimi_k25", "kimi_k2", "kimi_k2"),
        ("kimi_k25", None, "deepseek_v3"),
        ("kimi_vl", "deepseek_v3", "deepseek_v3"),
        ("mistral3", "mistral4", "mistral4"),
    ],
    ids=str,
)
def test_a_multimodal_shell_is_read_through_its_text_config(shell, text, expected):
    inner = tiny() | {"model_type": text}
    if text is None:
        del inner["model_type"]
    assert from_hf({"model_type": shell, "text_config": inner}).model_type == expected


def test_a_language_config_is_read_like_a_text_config():
    shell = {"model_type": "deepseek_vl_v2", "language_config": tiny("deepseek_v2")}
    assert from_hf(shell) == from_hf(tiny("deepseek_v2"))


def test_kimi_k3_is_kimi_linear_with_an_elementwise_gate():
    inner = {**without("model_type"), "mla_use_nope": True, "mla_use_output_gate": True}
    config = from_hf({"model_type": "kimi_k3", "text_config": inner})
    assert (config.model_type, config.rope.style) == ("kimi_linear", "none")
    assert config.gate == GateConfig(kind="elementwise", weight_name="g_proj")


@pytest.mark.parametrize(
    ("model_type", "changes", "gate"),
    [
        ("kimi_linear", {}, None),
        ("kimi_linear", {"mla_use_output_gate": False}, None),
        ("bailing_hybrid", {}, GateConfig(kind="per_head")),
        ("deepseek_v3", {"mla_use_output_gate": False}, None),
    ],
    ids=str,
)
def test_the_gate_is_the_familys_and_obeys_its_switch(model_type, changes, gate):
    assert from_hf(tiny(model_type, **changes)).gate == gate


def test_longcat_scales_query_and_latent_and_has_two_attentions_a_layer():
    config = from_hf(tiny("longcat_flash", num_layers=3))
    assert (config.query_scale, config.latent_scale) == (2.0, math.sqrt(2))
    assert config.num_layers == 6


def test_longcat_scales_obey_their_switches():
    config = from_hf(tiny("longcat_flash", mla_scale_q_lora=False, mla_scale_kv_lora=True))
    assert (config.query_scale, config.latent_scale) == (1.0, math.sqrt(2))


def test_minicpm3_takes_the_value_width_from_the_hidden_size():
    assert from_hf(without("v_head_dim") | {"model_type": "minicpm3"}).v_head_dim == 16


@pytest.mark.parametrize("model_type", ["kimi_linear", "bailing_hybrid", "sarvam_mla"])
def test_an_absent_query_rank_means_none_where_the_config_class_says_so(model_type):
    assert from_hf(without("q_lora_rank") | {"model_type": model_type}).q_lora_rank is None


def test_a_null_query_rank_means_none_everywhere():
    assert from_hf(tiny(q_lora_rank=None)).q_lora_rank is None


def test_kv_heads_default_to_the_heads():
    assert from_hf(without("num_key_value_heads")) == from_hf(TINY)


def test_the_other_name_of_the_longest_position_is_read():
    raw = without("max_position_embeddings") | {"model_max_length": 777}
    assert from_hf(raw).max_position_embeddings == 777


def test_the_latent_norm_ignores_the_models_epsilon():
    assert from_hf(tiny(rms_norm_eps=1e-5)).latent_norm_eps == 1e-6


def test_misleading_head_dims_are_ignored():
    assert from_hf(tiny(head_dim=192, qk_head_dim=20)) == from_hf(TINY)


@pytest.mark.parametrize(
    ("model_type", "changes", "style"),
    [
        ("deepseek_v32", {}, "half_split"),
        ("glm_moe_dsa", {}, "interleaved"),
        ("glm_moe_dsa", {"indexer_rope_interleave": True}, "interleaved"),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "half_split"),
    ],
    ids=str,
)
def test_the_indexer_rotates_as_its_family_or_the_config_says(model_type, changes, style):
    config = from_hf(tiny(model_type, **INDEXER, **changes))
    assert config.indexer == IndexerConfig(num_heads=4, head_dim=16, topk=32, rope_style=style)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"indexer_types": ["full"] * 5}, None),
        ({"indexer_types": ["full", "shared", "full", "shared", "shared"]}, (0, 2)),
        ({"index_topk_pattern": "FSSFS"}, (0, 3)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0, 2, 4)),
        ({"index_topk_freq": 2}, (0, 1, 3)),
    ],
    ids=str,
)
def test_layers_with_their_own_indexer_are_read_from_each_spelling(changes, expected):
    assert from_hf(tiny("glm_moe_dsa", **INDEXER, **changes)).indexer.full_layers == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            tiny("deepseek_v4"),
            "model_type='deepseek_v4' is not supported; supported: deepseek_v2, deepseek_v3, ",
        ),
        (tiny("deepseek_v5"), "did you mean 'deepseek_v"),
        (without("model_type"), "model_type is missing from the config; supported: deepseek_v2, "),
        (without("kv_lora_rank"), "kv_lora_rank is missing from the config"),
        (
            without("q_lora_rank"),
            "q_lora_rank is missing from the config; write null for a model without a low-rank query",
        ),
        (
            tiny(num_key_value_heads=2),
            "num_key_value_heads=2 is not supported; supported: num_attention_heads, here 4: MLA has no",
        ),
        (
            tiny(sliding_window=512),
            "sliding_window=512 is not supported; supported: absent (sliding-window attention is not",
        ),
        (
            tiny(layer_types=["full_attention", "sliding_attention"]),
            "layer_types='sliding_attention' is not supp",
        ),
        (tiny(attention_method="LSA"), "attention_method='LSA' is not supported; supported: absent or 'MLA'"),
        (tiny(index_kpool=4), "index_kpool=4 is not supported"),
        (tiny(learnable_sink_init=0.0), "learnable_sink_init=0.0 is not supported"),
        (tiny(use_mla=False), "use_mla=False is not supported"),
        (tiny(use_qkv_bias=True), "use_qkv_bias=True is not supported"),
        (
            tiny(**INDEXER),
            "index_topk=32 is not supported; supported: absent: deepseek_v3 has no indexer here",
        ),
        (
            tiny(mla_use_output_gate=True),
            "mla_use_output_gate=True is not supported; supported: absent or false for deepseek_v3",
        ),
        (
            tiny(mla_scale_q_lora=True),
            "mla_scale_q_lora=True is not supported; supported: absent or false for deepseek_v3",
        ),
        (
            tiny("longcat_flash", q_lora_rank=None),
            "q_lora_rank=None is not supported; supported: a whole number: longcat_flash scales the query",
        ),
        (tiny(hidden_size="64"), "hidden_size='64' is not supported; supported: a whole number"),
        (tiny(qk_rope_head_dim=7), "qk_rope_head_dim must be even to rotate in pairs, got 7"),
        (tiny("glm_moe_dsa"), "index_n_heads is missing from the config"),
        (
            tiny("glm_moe_dsa", **INDEXER, indexer_types=["pooled"]),
            "indexer_types='pooled' is not supported; supported: full, shared",
        ),
        ({"model_type": "hy_v4_vl", "text_config": TINY}, "it adds an attention sink to every head"),
        ({"model_type": "x", "text_config": tiny("axk2")}, "its q_b_proj carries an output gate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_refused_by_field_and_value(source, message):
    assert message in refusal(source)


def test_presets_are_found_in_any_case():
    assert preset("DeepSeek-V3") == preset("deepseek-v3")


def test_an_unknown_preset_suggests_and_lists_names():
    with pytest.raises(ConfigError) as caught:
        preset("deepsek-v3")
    expected = (
        f"unknown preset 'deepsek-v3'; did you mean 'deepseek-v3'?; presets: {', '.join(preset_names())}"
    )
    assert str(caught.value) == expected
