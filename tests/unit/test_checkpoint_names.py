"""Every kind of checkpoint's names become Hugging Face names, and attentions are found wherever they lie."""

from __future__ import annotations

import pytest

from mla_core.checkpoint_names import find_place

DEEPSEEK = {
    "wq.weight": "q_proj.weight",
    "wq_a.weight": "q_a_proj.weight",
    "wq_a.scale": "q_a_proj.weight_scale_inv",
    "q_norm.weight": "q_a_layernorm.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv_a.weight": "kv_a_proj_with_mqa.weight",
    "kv_norm.weight": "kv_a_layernorm.weight",
    "wkv_b.scale": "kv_b_proj.weight_scale_inv",
    "wo.weight": "o_proj.weight",
    "indexer.wq_b.weight": "indexer.wq_b.weight",
    "indexer.wk.scale": "indexer.wk.weight_scale_inv",
}
MISTRAL = {
    "wq_a.weight": "q_a_proj.weight",
    "q_a_norm.weight": "q_a_layernorm.weight",
    "wq_b.weight_scale": "q_b_proj.weight_scale",
    "wkv_a_with_mqa.weight": "kv_a_proj_with_mqa.weight",
    "kv_a_norm.weight": "kv_a_layernorm.weight",
    "wkv_b.qscale_weight": "kv_b_proj.weight_scale",
    "wkv_b.qscale_act": "kv_b_proj.input_scale",
    "wo.weight_packed": "o_proj.weight_packed",
    "wo.weight_global_scale": "o_proj.weight_global_scale",
}
LING = {
    "dense.weight": "o_proj.weight",
    "dense.weight_scale_inv": "o_proj.weight_scale_inv",
    "g_proj.weight": "g_proj.weight",
    "q_proj.weight": "q_proj.weight",
}
HUGGING_FACE = {
    "o_proj.weight_scale_inv": "o_proj.weight_scale_inv",
    "o_proj.activation_scale": "o_proj.input_scale",
    "indexer.weights_proj.weight": "indexer.weights_proj.weight",
    "q_a_proj.bias": "q_a_proj.bias",
}
MARKS = {
    "layers.3.attn.wkv_a.weight": DEEPSEEK,
    "layers.3.attention.wkv_a_with_mqa.weight": MISTRAL,
    "model.layers.3.attention.kv_a_proj_with_mqa.weight": LING,
    "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": HUGGING_FACE,
}
NAMES = [(mark, own, wanted) for mark, names in MARKS.items() for own, wanted in names.items()]
PLACES = {
    "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": ("model.layers.3.self_attn.", 3),
    "language_model.model.layers.3.self_attn.kv_a_proj_with_mqa.weight": (
        "language_model.model.layers.3.self_attn.",
        3,
    ),
    "language_model.model.blocks.3.self_attn.kv_a_proj_with_mqa.weight": (
        "language_model.model.blocks.3.self_attn.",
        3,
    ),
    "model.layers.3.self_attn.1.kv_a_proj_with_mqa.weight": ("model.layers.3.self_attn.1.", 3),
    "model.layers.12.self_attn.kv_a_proj_with_mqa.weight_packed": ("model.layers.12.self_attn.", 12),
    "layers.0.attn.wkv_a.weight": ("layers.0.attn.", 0),
    "layers.0.attention.wkv_a_with_mqa.weight": ("layers.0.attention.", 0),
}


@pytest.mark.parametrize(("mark", "own", "wanted"), NAMES)
def test_a_tensor_gets_its_hugging_face_name(mark, own, wanted):
    assert find_place(mark).naming.to_hf(own) == wanted


@pytest.mark.parametrize(("mark", "own", "wanted"), NAMES)
def test_a_hugging_face_name_gets_the_checkpoints_back(mark, own, wanted):
    naming = find_place(mark).naming
    assert naming.to_hf(naming.from_hf(wanted)) == wanted


@pytest.mark.parametrize(("name", "expected"), PLACES.items(), ids=PLACES)
def test_an_attention_is_found_by_its_compressed_key_projection(name, expected):
    place = find_place(name)
    assert (place.prefix, place.layer) == expected


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv",
        "model.layers.3.self_attn.kv_a_layernorm.weight",
        "layers.3.attention.wkv_a.weight",
        "layers.3.attn.wkv_a_with_mqa.weight",
        "model.norm.weight",
    ],
)
def test_no_other_tensor_gives_an_attention_away(name):
    assert find_place(name) is None


@pytest.mark.parametrize(
    ("mark", "norm", "embedding"),
    [
        (
            "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
            "model.layers.3.input_layernorm.weight",
            "model.embed_tokens.weight",
        ),
        (
            "model.layers.3.attention.kv_a_proj_with_mqa.weight",
            "model.layers.3.input_layernorm.weight",
            "model.word_embeddings.weight",
        ),
        ("layers.3.attn.wkv_a.weight", "layers.3.attn_norm.weight", "embed.weight"),
        (
            "layers.3.attention.wkv_a_with_mqa.weight",
            "layers.3.attention_norm.weight",
            "tok_embeddings.weight",
        ),
    ],
)
def test_the_norm_and_the_embedding_have_the_checkpoints_names(mark, norm, embedding):
    place = find_place(mark)
    assert (place.input_norm, place.embedding) == (norm, embedding)
