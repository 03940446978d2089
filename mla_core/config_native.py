"""Native config files, told in Hugging Face's words: Mistral's params.json, and that of DeepSeek's inference
code.

Both are told by the width of the model being called "dim". A key that asks for something else is passed on,
so that it is refused by its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mla_core.config_values import missing, number, positive, unsupported, whole

_SAME = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PASSED_ON = ("sliding_window", "layer_types", "no_rope_layers", "kv_source_layers", "attention_bias")
_INDEXER = ("index_n_heads", "index_head_dim", "index_topk")
_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta": "beta_fast",
    "alpha": "beta_slow",
    "apply_scale": "apply_yarn_scaling",
}


def as_hf(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The same config under Hugging Face's keys; one that is under them already comes back as it is."""
    if "dim" not in raw or "hidden_size" in raw:
        return raw
    if raw.get("kv_lora_rank") is None:
        raise missing("kv_lora_rank", "without it a native config describes attention that is not MLA")
    return _mistral(raw) if "norm_eps" in raw else _deepseek(raw)


def _mistral(raw: Mapping[str, Any]) -> dict[str, Any]:
    """params.json. YaRN's apply_scale false means what it says: nothing but the frequencies changes."""
    found: dict[str, Any] = {
        "model_type": "mistral4",
        **_dims(raw),
        "num_key_value_heads": raw.get("n_kv_heads"),
        "rms_norm_eps": raw["norm_eps"],
        "max_position_embeddings": raw.get("max_position_embeddings") or raw.get("max_seq_len"),
        "rope_parameters": {"rope_type": "default", "rope_theta": number(raw, "rope_theta", 10000.0)},
        "llama_4_scaling": raw.get("llama_4_scaling"),
        "quantization_config": raw.get("quantization"),
    }
    for key in ("lerope", "ssmax_scaling", "indexer", "index_topk"):
        if raw.get(key):
            raise unsupported(key, raw[key], "absent: learned rope, query scales and indexers are not built")
    if raw.get("yarn") is not None:
        found["rope_parameters"] |= _renamed("yarn", raw["yarn"], _YARN) | {
            "rope_type": "yarn",
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        }
    return found


def _deepseek(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSeek's inference code reads, with that code's defaults for what is left out."""
    mscale = number(raw, "mscale", 1.0)
    sparse = {key: raw[key] for key in _INDEXER if key in raw}
    return {
        "model_type": "deepseek_v32" if sparse else "deepseek_v3",
        **_dims(raw),
        **sparse,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": int(
            whole(raw, "original_seq_len", 4096) * number(raw, "rope_factor", 40.0)
        ),
        "rope_theta": number(raw, "rope_theta", 10000.0),
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": number(raw, "rope_factor", 40.0),
            "original_max_position_embeddings": whole(raw, "original_seq_len", 4096),
            "beta_fast": number(raw, "beta_fast", 32.0),
            "beta_slow": number(raw, "beta_slow", 1.0),
            "mscale": mscale,
            "mscale_all_dim": mscale,
        },
    }


def _dims(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What both kinds call alike; a query rank of 0 is none."""
    return {
        "hidden_size": positive(raw, "dim"),
        "num_attention_heads": positive(raw, "n_heads"),
        "num_hidden_layers": positive(raw, "n_layers"),
        "q_lora_rank": whole(raw, "q_lora_rank", 0) or None,
        **{key: raw.get(key) for key in _SAME},
        **{key: raw[key] for key in _PASSED_ON if raw.get(key) is not None},
    }


def _renamed(name: str, block: Any, names: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(block, Mapping):
        raise unsupported(name, block, "an object of named values")
    for key in sorted(block.keys() - names.keys()):
        raise unsupported(f"{name}.{key}", block[key], ", ".join(names))
    return {names[key]: value for key, value in block.items()}
