"""How many layers a Hugging Face config has, how long they reach, and which of them are MLA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mla_core.config_families import FAMILIES, MLA_LAYER_TYPES, OTHER_LAYER_TYPES, Family
from mla_core.config_values import positive, unsupported


def read_lengths(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Fields that do not change the mathematics keep MLAConfig's default when the config leaves them out."""
    lengths: dict[str, Any] = {}
    mla_layers = _mla_layers(raw, family)
    if raw.get(family.layers_key) is not None:
        lengths["num_layers"] = positive(raw, family.layers_key) * family.attentions_per_layer
        lengths["mla_layers"] = mla_layers
    for key in ("max_position_embeddings", "model_max_length"):
        if raw.get(key) is not None:
            lengths.setdefault("max_position_embeddings", positive(raw, key))
    return lengths


def decoder_layers(raw: Mapping[str, Any]) -> int | None:
    """How many decoder layers the model itself has, or None where its config does not say; what a checkpoint
    stores beyond them predicts further tokens.
    """
    family = FAMILIES.get(str(raw.get("model_type")), Family())
    count = raw.get(family.layers_key)
    return count if isinstance(count, int) and count > 0 else None


def _mla_layers(raw: Mapping[str, Any], family: Family) -> tuple[int, ...] | None:
    """Indices of the MLA layers; None when all are, or when nothing says which."""
    kinds = _layer_kinds(raw)
    count = decoder_layers(raw)
    if count is None or family.attentions_per_layer > 1:
        return None
    if kinds:
        found = _by_kind(kinds, count)
    elif _listed(raw) is not None:
        found = _from_one(_listed(raw), count)
    elif family.layer_group_size is not None:
        group = positive(raw, "layer_group_size", family.layer_group_size)
        found = tuple(range(group - 1, count, group))
    else:
        return None
    return None if len(found) == count else found


def _layer_kinds(raw: Mapping[str, Any]) -> list[str]:
    """`layer_types`; raises ConfigError for a kind that this library does not do."""
    kinds = list(raw.get("layer_types") or ())
    known = MLA_LAYER_TYPES | OTHER_LAYER_TYPES
    for kind in sorted(set(kinds) - known):
        raise unsupported("layer_types", kind, ", ".join(sorted(known)))
    return kinds


def _by_kind(kinds: list[str], count: int) -> tuple[int, ...]:
    if len(kinds) < count:
        raise unsupported("layer_types", f"{len(kinds)} entries", f"one for each of {count} layers")
    return tuple(index for index, kind in enumerate(kinds[:count]) if kind in MLA_LAYER_TYPES)


def _listed(raw: Mapping[str, Any]) -> Any:
    """Kimi-Linear's own list of its MLA layers, which counts from 1."""
    return (raw.get("linear_attn_config") or {}).get("full_attn_layers")


def _from_one(listed: Any, count: int) -> tuple[int, ...]:
    wanted = f"whole numbers from 1 to {count}"
    if not isinstance(listed, (list, tuple)):
        raise unsupported("linear_attn_config.full_attn_layers", listed, wanted)
    for layer in listed:
        if not isinstance(layer, int) or not 1 <= layer <= count:
            raise unsupported("linear_attn_config.full_attn_layers", layer, wanted)
    return tuple(sorted(layer - 1 for layer in listed))
