"""transformers' own config classes read as the presets say, or are refused."""

from __future__ import annotations

import pytest
from transformers import AutoConfig

from mla_core.config import MLAConfig
from mla_core.errors import ConfigError

# Classes whose defaults are the released checkpoint, and classes that leave out its rope block only.
SAME = {
    "longcat_flash": "longcat-flash",
    "mistral4": "mistral-small-4",
    "bailing_hybrid": "ling-3.0-flash",
}
SAME_BUT_ROPE = {
    "deepseek_v32": "deepseek-v3.2",
    "glm4_moe_lite": "glm-4.7-flash",
    "glm_moe_dsa": "glm-5",
    "minicpm3": "minicpm3",
    "youtu": "youtu",
}
REFUSED = [
    "axk2",
    "deepseek_ocr2",
    "deepseek_v4",
    "dots3_note",
    "glm5_next",
    "hy_v4",
    "hy_v4_vl",
    "llama",
    "mistral_large4",
]


@pytest.mark.parametrize(("model_type", "name"), SAME.items(), ids=SAME)
def test_a_config_class_with_the_checkpoints_defaults_reads_as_the_preset(model_type, name):
    assert MLAConfig.from_hf(AutoConfig.for_model(model_type)) == MLAConfig.preset(name)


@pytest.mark.parametrize(("model_type", "name"), SAME_BUT_ROPE.items(), ids=SAME_BUT_ROPE)
def test_a_config_class_without_a_rope_block_differs_from_the_preset_in_rope_only(model_type, name):
    read, expected = MLAConfig.from_hf(AutoConfig.for_model(model_type)), MLAConfig.preset(name)
    assert read.rope.scaling is None
    assert read.rope.style == expected.rope.style
    assert read.model_copy(update={"rope": expected.rope}) == expected


def test_kimi_linears_config_class_differs_from_the_checkpoint_in_which_layers_are_mla():
    """The class's default is every fourth layer; the checkpoint has its own list, with the last layer too."""
    read, expected = MLAConfig.from_hf(AutoConfig.for_model("kimi_linear")), MLAConfig.preset("kimi-linear")
    assert read.mla_layers == (4, 8, 12, 16, 20, 24)
    assert expected.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert read.model_copy(update={"mla_layers": expected.mla_layers}) == expected


def test_a_multimodal_config_object_reads_through_its_text_config():
    config = MLAConfig.from_hf(AutoConfig.for_model("kimi_k25"))
    assert (config.model_type, config.hidden_size) == ("deepseek_v3", 7168)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_config_class_of_another_attention_is_refused(model_type):
    with pytest.raises(ConfigError, match=f"model_type='{model_type}(_text)?' is not supported; supported: "):
        MLAConfig.from_hf(AutoConfig.for_model(model_type))
