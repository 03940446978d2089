"""Read a Hugging Face config.json into an MLAConfig, and the configs of public checkpoints by name.

What it does not understand it refuses: a value ignored here would be a wrong number later.
Rules: docs/models.md.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from mla_core.config import GateConfig, IndexerConfig, MLAConfig
from mla_core.config_families import FAMILIES, REFUSALS, SHELLS, UNSUPPORTED, Family
from mla_core.config_layers import read_lengths
from mla_core.config_native import as_hf
from mla_core.config_presets import PRESETS
from mla_core.config_rope import read_query_scaling, read_rope
from mla_core.config_values import did_you_mean, missing, positive, unsupported, whole
from mla_core.errors import ConfigError

__all__ = ["from_hf", "preset", "preset_names"]


@runtime_checkable
class HasToDict(Protocol):
    """What a transformers config object offers."""

    def to_dict(self) -> dict[str, Any]: ...


def preset(name: str) -> MLAConfig:
    """The config of a public checkpoint, by name, in any case; raises ConfigError with a suggestion."""
    key = name.lower()
    if key not in PRESETS:
        raise ConfigError(
            f"unknown preset {name!r}{did_you_mean(key, PRESETS)}; presets: {', '.join(PRESETS)}"
        )
    return from_hf(PRESETS[key])


def preset_names() -> list[str]:
    """Names that `preset` accepts, in the order of docs/models.md."""
    return list(PRESETS)


def from_hf(source: Any) -> MLAConfig:
    """Read a directory, a config.json path, a mapping, or an object with to_dict(); raises ConfigError.

    Native files of Mistral (params.json) and DeepSeek's inference code are read too.
    """
    whole_config = as_hf(_load(source))
    raw = text_part(whole_config)
    family = _family(raw)
    _refuse(raw, family)
    nope, rope = whole(raw, "qk_nope_head_dim"), whole(raw, "qk_rope_head_dim")
    return MLAConfig(
        **_dims(raw, family),
        **_scales(raw, family),
        **read_lengths(raw, family),
        model_type=raw["model_type"],
        rope=read_rope(raw, family, nope, rope),
        attention_bias=bool(raw.get("attention_bias", False)),
        query_scaling=read_query_scaling(raw, family),
        gate=_gate(raw, family),
        indexer=_indexer(raw, family),
        **_weight_block(raw.get(_QUANTISATION) or whole_config.get(_QUANTISATION) or {}),
    )


def _load(source: Any) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, HasToDict):
        return source.to_dict()
    if isinstance(source, (str, os.PathLike)):
        return _load_file(Path(source))
    raise ConfigError(
        f"cannot read a config from {type(source).__name__}; give a directory, a config.json path, "
        "a mapping, or an object with to_dict()"
    )


def _load_file(path: Path) -> Mapping[str, Any]:
    file = config_file(path) if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        suggestion = did_you_mean(path.name.lower(), PRESETS)
        raise ConfigError(
            f"{file} does not exist; give a local directory or config.json, or use "
            f"MLAConfig.preset(name){suggestion}"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{file} holds {type(raw).__name__}, wanted a JSON object")
    return raw


def config_file(folder: Path) -> Path:
    """A directory's config.json, or Mistral's params.json where that is all there is."""
    native = folder / "params.json"
    return native if native.is_file() and not (folder / "config.json").is_file() else folder / "config.json"


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a multimodal config, or the config itself; raises ConfigError for a model
    that is refused by its type.
    """
    _refuse_type(raw)
    text = raw.get("text_config") or raw.get("language_config")
    if not isinstance(text, Mapping) or "kv_lora_rank" in raw:
        return raw
    inherited = SHELLS.get(str(raw.get("model_type")))
    return text_part({"model_type": inherited, **text} if inherited else text)


def _refuse_type(raw: Mapping[str, Any]) -> None:
    model_type = str(raw.get("model_type"))
    if model_type in UNSUPPORTED:
        raise unsupported("model_type", model_type, ", ".join(FAMILIES), UNSUPPORTED[model_type])


def _family(raw: Mapping[str, Any]) -> Family:
    model_type = raw.get("model_type")
    if model_type is None:
        raise missing("model_type", f"supported: {', '.join(FAMILIES)}")
    if model_type not in FAMILIES:
        close = did_you_mean(str(model_type), FAMILIES)
        hint = f"for another MLA model build MLAConfig(...) from its dims{close}"
        raise unsupported("model_type", model_type, ", ".join(FAMILIES), hint)
    return FAMILIES[model_type]


def _refuse(raw: Mapping[str, Any], family: Family) -> None:
    """Raise for the first key that asks for something this library, or this family's row, does not do."""
    for rule in REFUSALS:
        if raw.get(rule.key) not in rule.allowed:
            wanted = " or ".join("absent" if value is None else repr(value) for value in rule.allowed)
            raise unsupported(rule.key, raw[rule.key], wanted, rule.because)
    if family.gate is None and raw.get("mla_use_output_gate"):
        raise unsupported("mla_use_output_gate", True, f"absent or false for {raw['model_type']}")
    for key in () if family.lora_scale_keys else ("mla_scale_q_lora", "mla_scale_kv_lora"):
        if raw.get(key):
            raise unsupported(key, raw[key], f"absent or false for {raw['model_type']}")
    if family.indexer is None and raw.get("index_topk") is not None:
        raise unsupported("index_topk", raw["index_topk"], f"absent: {raw['model_type']} has no indexer here")


def _dims(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    heads = positive(raw, "num_attention_heads")
    if positive(raw, "num_key_value_heads", heads) != heads:
        raise unsupported(
            "num_key_value_heads",
            raw["num_key_value_heads"],
            f"num_attention_heads, here {heads}: MLA has no groups",
        )
    hidden = positive(raw, "hidden_size")
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "q_lora_rank": _query_lora(raw, family),
        "kv_lora_rank": positive(raw, "kv_lora_rank"),
        "qk_nope_head_dim": positive(raw, "qk_nope_head_dim"),
        "qk_rope_head_dim": whole(raw, "qk_rope_head_dim"),
        "v_head_dim": positive(raw, "v_head_dim", hidden // heads if family.value_from_hidden else None),
    }


def _query_lora(raw: Mapping[str, Any], family: Family) -> int | None:
    if raw.get("q_lora_rank") is not None:
        return positive(raw, "q_lora_rank")
    if family.lora_scale_keys is not None:
        raise unsupported("q_lora_rank", None, f"a whole number: {raw['model_type']} scales the query by it")
    if "q_lora_rank" not in raw and not family.query_lora_optional:
        raise missing("q_lora_rank", "write null for a model without a low-rank query")
    return None


def _scales(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    if family.lora_scale_keys is None:
        return {}
    query_key, latent_key = family.lora_scale_keys
    hidden = positive(raw, "hidden_size")
    query = math.sqrt(hidden / positive(raw, "q_lora_rank")) if raw.get(query_key, True) else 1.0
    latent = math.sqrt(hidden / positive(raw, "kv_lora_rank")) if raw.get(latent_key, True) else 1.0
    return {"query_scale": query, "latent_scale": latent}


_QUANTISATION = "quantization_config"


def _weight_block(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Block size of quantised weights, as transformers or compressed-tensors state it; absent when neither
    does.
    """
    groups = (stated.get("config_groups") or {}).values()
    sizes = [(group.get("weights") or {}).get("block_structure") for group in groups]
    found = {_pair(size) for size in (stated.get("weight_block_size"), *sizes) if size is not None}
    if len(found) > 1:
        raise unsupported(_QUANTISATION, sorted(found), "one block size for all weights")
    return {"weight_block": found.pop()} if found else {}


def _pair(size: Any) -> tuple[int, ...]:
    """Written as [128, 128] or, by older tools, as "128x128"."""
    return tuple(int(side) for side in (size.split("x") if isinstance(size, str) else size))


def _gate(raw: Mapping[str, Any], family: Family) -> GateConfig | None:
    return family.gate if family.gate_key is None or raw.get(family.gate_key) else None


def _indexer(raw: Mapping[str, Any], family: Family) -> IndexerConfig | None:
    if family.indexer is None:
        return None
    style = family.indexer.rope_style
    key = family.indexer.style_key
    if key is not None and raw.get(key) is not None:
        style = "interleaved" if raw[key] else "half_split"
    return IndexerConfig(
        num_heads=positive(raw, "index_n_heads"),
        head_dim=positive(raw, "index_head_dim"),
        topk=positive(raw, "index_topk"),
        rope_style=style,
        full_layers=_full_layers(raw, positive(raw, "num_hidden_layers", 1)),
    )


def _full_layers(raw: Mapping[str, Any], layers: int) -> tuple[int, ...] | None:
    """Layers that run their own indexer: a list, a pattern, or a period and an offset; None when all do."""
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if kinds is not None:
        unknown = sorted(set(kinds) - {"full", "shared", "F", "S"})
        if unknown:
            raise unsupported("indexer_types", unknown[0], "full, shared")
        full = tuple(index for index, kind in enumerate(kinds) if kind in ("full", "F"))
        return None if len(full) == len(kinds) else full
    period = max(whole(raw, "index_topk_freq", 1), 1)
    offset = whole(raw, "index_skip_topk_offset", 2)
    full = tuple(index for index in range(layers) if max(index - offset + 1, 0) % period == 0)
    return None if len(full) == layers else full
