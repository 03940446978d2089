"""The attention part of public checkpoints' config.json files, by name; sources: docs/models.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HEADS_128_64_128 = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512}
_HEADS_192_64_256 = {"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "kv_lora_rank": 512}


def _yarn(
    factor: float, original: int, mscale: float = 1.0, beta_fast: float = 32.0, **more: Any
) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        **more,
    }


def _model(
    model_type: str, hidden: int, heads: int, query: int | None, layers: int, longest: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "q_lora_rank": query,
        "num_hidden_layers": layers,
        "max_position_embeddings": longest,
        **_HEADS_128_64_128,
        **more,
    }


_DEEPSEEK_V3 = _model(
    "deepseek_v3", 7168, 128, 1536, 61, 163840, rope_theta=10000.0, rope_scaling=_yarn(40, 4096)
)
_GLM_5 = _model(
    "glm_moe_dsa",
    6144,
    64,
    2048,
    78,
    202752,
    **_HEADS_192_64_256,
    rope_theta=1e6,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=2048,
    indexer_rope_interleave=True,
)

# MiniCPM3's stretch per rotated pair; its short and its long table are the same.
_MINICPM3_FACTORS = (
    1.0591234137867171,
    1.1241891283591912,
    1.2596935748670968,
    1.5380380402321725,
    2.093982484148734,
    3.1446935121267696,
    4.937952647693647,
    7.524541999994549,
    10.475458000005451,
    13.062047352306353,
    14.85530648787323,
    15.906017515851266,
    16.461961959767827,
    16.740306425132907,
    16.87581087164081,
    16.940876586213285,
)

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "deepseek-v2-lite": _model(
        "deepseek_v2", 2048, 16, None, 27, 163840, rope_theta=10000.0, rope_scaling=_yarn(40, 4096, 0.707)
    ),
    "deepseek-v2": _model(
        "deepseek_v2", 5120, 128, 1536, 60, 163840, rope_theta=10000.0, rope_scaling=_yarn(40, 4096, 0.707)
    ),
    "deepseek-v2.5": _model(
        "deepseek_v2", 5120, 128, 1536, 60, 163840, rope_theta=10000.0, rope_scaling=_yarn(40, 4096)
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": _DEEPSEEK_V3,
    "deepseek-v3.1": _DEEPSEEK_V3,
    "deepseek-v3.2": {
        **_DEEPSEEK_V3,
        "model_type": "deepseek_v32",
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    },
    "kimi-k2": _model(
        "kimi_k2", 7168, 64, 1536, 61, 131072, rope_theta=50000.0, rope_scaling=_yarn(32, 4096, beta_fast=1.0)
    ),
    "kimi-k2.5": _model(
        "kimi_k2", 7168, 64, 1536, 61, 262144, rope_theta=50000.0, rope_scaling=_yarn(64, 4096)
    ),
    "moonlight": _model("deepseek_v3", 2048, 16, None, 27, 8192, rope_theta=50000.0),
    "kimi-vl": _model("deepseek_v3", 2048, 16, None, 27, 131072, rope_theta=800000.0),
    "kimi-linear": _model(
        "kimi_linear",
        2304,
        32,
        None,
        27,
        1048576,
        mla_use_nope=True,
        linear_attn_config={"full_attn_layers": (*range(4, 27, 4), 27)},
    ),
    "kimi-k3": _model(
        "kimi_linear",
        7168,
        96,
        1536,
        93,
        1048576,
        mla_use_nope=True,
        mla_use_output_gate=True,
        linear_attn_config={"full_attn_layers": (*range(4, 93, 4), 93)},
    ),
    "glm-4.7-flash": _model("glm4_moe_lite", 2048, 20, 768, 47, 202752, **_HEADS_192_64_256, rope_theta=1e6),
    "glm-5": _GLM_5,
    "glm-5.1": _GLM_5,
    "glm-5.2": {
        **_GLM_5,
        "max_position_embeddings": 1048576,
        "rope_theta": 8e6,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
    },
    "longcat-flash": _model("longcat_flash", 6144, 64, 1536, 56, 131072, num_layers=28, rope_theta=1e7),
    "youtu": _model("youtu", 2048, 16, 1536, 32, 131072, rope_theta=1.6e6),
    "minicpm3": _model(
        "minicpm3",
        2560,
        40,
        768,
        62,
        32768,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        rope_theta=10000.0,
        rope_scaling={
            "rope_type": "longrope",
            "short_factor": _MINICPM3_FACTORS,
            "long_factor": _MINICPM3_FACTORS,
            "original_max_position_embeddings": 32768,
        },
    ),
    "mistral-small-4": _model(
        "mistral4",
        4096,
        32,
        1024,
        36,
        1048576,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        rope_theta=10000.0,
        rope_scaling=_yarn(128, 8192, llama_4_scaling_beta=0.1),
    ),
    "mistral-large-3": _model(
        "mistral4",
        7168,
        128,
        1536,
        61,
        294912,
        rope_theta=10000.0,
        rope_scaling=_yarn(36, 8192, llama_4_scaling_beta=0.1),
    ),
    "ling-3.0-flash": _model("bailing_hybrid", 2560, 32, None, 42, 262144, rope_theta=6e6),
}
