"""What a Hugging Face config means, one row of data per model family.

Sources and confidence of every row: docs/models.md. No other module knows a family's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mla_core.config import GateConfig

RopeStyle = Literal["interleaved", "half_split", "none"]


@dataclass(frozen=True)
class IndexerRow:
    """How a family's sparse indexer rotates, and the config key that may say otherwise."""

    rope_style: Literal["interleaved", "half_split"]
    style_key: str | None = None


@dataclass(frozen=True)
class Family:
    """How to read one model_type; the defaults are DeepSeek-V3's."""

    rope_style: RopeStyle = "interleaved"
    # False: the reference ignores `rope_interleave`, so a config that contradicts rope_style is refused.
    style_from_config: bool = True
    # rope_theta when the config gives none.
    theta: float = 10000.0
    # Rope block when the config gives none at all.
    default_rope: Mapping[str, Any] | None = None
    layers_key: str = "num_hidden_layers"
    attentions_per_layer: int = 1
    # In a hybrid, the last layer of every group of this many is MLA and the others are not, where the config
    # gives neither layer_types nor layer_group_size; None: all layers are MLA.
    layer_group_size: int | None = None
    # An absent q_lora_rank means none, as in the family's config class; elsewhere it must be spelled out.
    query_lora_optional: bool = False
    # v_head_dim when absent: hidden_size // num_attention_heads.
    value_from_hidden: bool = False
    # Query times sqrt(D/Q) and latent times sqrt(D/L), switched off by these keys when they are false.
    lora_scale_keys: tuple[str, str] | None = None
    gate: GateConfig | None = None
    # Config key that switches the gate on; None: always on.
    gate_key: str | None = None
    indexer: IndexerRow | None = None


@dataclass(frozen=True)
class Refusal:
    """A config key whose other values ask for something that this library does not do."""

    key: str
    allowed: tuple[Any, ...]
    because: str


_DEEPSEEK_V3 = Family()

FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family(style_from_config=False),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": Family(
        style_from_config=False, indexer=IndexerRow("half_split", "indexer_rope_interleave")
    ),
    "kimi_k2": _DEEPSEEK_V3,
    "glm4_moe_lite": _DEEPSEEK_V3,
    "glm_moe_dsa": Family(
        style_from_config=False, indexer=IndexerRow("interleaved", "indexer_rope_interleave")
    ),
    "longcat_flash": Family(
        style_from_config=False,
        theta=1e7,
        layers_key="num_layers",
        attentions_per_layer=2,
        lora_scale_keys=("mla_scale_q_lora", "mla_scale_kv_lora"),
    ),
    "minicpm3": Family(rope_style="half_split", style_from_config=False, value_from_hidden=True),
    "mistral4": Family(
        default_rope={
            "rope_type": "yarn",
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    ),
    "youtu": _DEEPSEEK_V3,
    "kimi_linear": Family(
        rope_style="none",
        style_from_config=False,
        query_lora_optional=True,
        gate=GateConfig(kind="elementwise"),
        gate_key="mla_use_output_gate",
    ),
    "bailing_hybrid": Family(
        style_from_config=False,
        theta=6e6,
        layer_group_size=6,
        query_lora_optional=True,
        gate=GateConfig(kind="per_head"),
    ),
    "axk1": _DEEPSEEK_V3,
    "sarvam_mla": Family(query_lora_optional=True),
}

# Multimodal shells whose text_config may leave model_type out, and what it then is.
SHELLS: Mapping[str, str] = {"kimi_k25": "deepseek_v3", "kimi_k3": "kimi_linear"}

UNSUPPORTED: Mapping[str, str] = {
    "axk2": "its q_b_proj carries an output gate fused with the query",
    "deepseek_ocr2": "its attention is not MLA",
    "deepseek_v4": "its attention is not MLA: one shared key/value head with compressors, no kv_b_proj",
    "dots3_note": "it mixes in sliding-window layers of other dims and norms the rope key",
    "dots3_note_text": "it mixes in sliding-window layers of other dims and norms the rope key",
    "glm5_next": "its indexer pools keys (index_kpool)",
    "glm5_next_text": "its indexer pools keys (index_kpool)",
    "hy_v4": "it adds an attention sink to every head",
    "hy_v4_vl": "it adds an attention sink to every head",
    "hy_v4_vl_text": "it adds an attention sink to every head",
    "mistral_large4": "it learns its rope frequencies and a query scale per head (lerope, ssmax)",
    "mistral_large4_text": "it learns its rope frequencies and a query scale per head (lerope, ssmax)",
}

REFUSALS: tuple[Refusal, ...] = (
    Refusal("sliding_window", (None,), "sliding-window attention is not supported"),
    Refusal(
        "attention_method", (None, "MLA"), "other attention methods need an indexer that is not supported"
    ),
    Refusal("index_kpool", (None,), "an indexer over pooled keys is not supported"),
    Refusal("learnable_sink_init", (None,), "attention sinks are not supported"),
    Refusal("no_rope_layers", (None,), "layers that differ in their rope are not supported"),
    Refusal("kv_source_layers", (None,), "layers that share another layer's cache are not supported"),
    Refusal("use_mla", (None, True), "this checkpoint uses ordinary multi-head attention"),
    Refusal("use_bias", (None, False), "a bias on q_b_proj or kv_b_proj is not supported"),
    Refusal("use_qkv_bias", (None, False), "a bias on q_b_proj or kv_b_proj is not supported"),
)

# Entries of layer_types: layers that are MLA, and layers that are not ours to judge.
MLA_LAYER_TYPES = frozenset({"full_attention", "attention", "indexed_attention", "deepseek_sparse_attention"})
OTHER_LAYER_TYPES = frozenset({"linear_attention"})
