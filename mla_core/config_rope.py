"""Read the rotary part of a Hugging Face config, in the old spelling and the new one.

Old: rope_theta beside rope_scaling{type, ...}. New: rope_parameters{rope_type, rope_theta, ...}.
Formulas: docs/models.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mla_core.config import Llama4Scaling, LongRope, RopeConfig, Yarn
from mla_core.config_families import Family, RopeStyle
from mla_core.config_values import missing, number, optional_number, positive, unsupported, whole

_COMMON = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        "llama_4_scaling_beta",
        "max_position_embeddings",
        "original_max_position_embeddings",
    }
)


@dataclass(frozen=True)
class _Dims:
    """What the rope block is read against."""

    rope: int
    nope: int
    max_position: int | None


def read_rope(raw: Mapping[str, Any], family: Family, nope: int, rope: int) -> RopeConfig:
    """How the rope dims rotate; raises ConfigError for a type, key or value that is not supported."""
    max_position = raw.get("max_position_embeddings")
    dims = _Dims(rope, nope, None if max_position is None else positive(raw, "max_position_embeddings"))
    style = _style(raw, family)
    found = [_read_block(raw, name, block, style, family, dims) for name, block in _blocks(raw, family)]
    if any(config != found[0] for config in found):
        raise unsupported(
            "rope_scaling",
            raw["rope_scaling"],
            f"the same meaning as rope_parameters={raw['rope_parameters']}",
        )
    return found[0]


def read_query_scaling(raw: Mapping[str, Any], family: Family) -> Llama4Scaling | None:
    """Llama-4's query scale by position, from the rope block or from a block of its own; None when off."""
    own = raw.get("llama_4_scaling")
    if own is not None:
        block = _mapping(own, "llama_4_scaling")
        return Llama4Scaling(
            beta=number(block, "beta", 0.1),
            floor_scale=positive(block, "original_max_position_embeddings", 8192),
        )
    name, block = _blocks(raw, family)[0]
    if block.get("llama_4_scaling_beta") is None:
        return None
    return Llama4Scaling(
        beta=number(block, "llama_4_scaling_beta", 0.1),
        floor_scale=_original_max_position(raw, name, block, positive(raw, "max_position_embeddings", 8192)),
    )


def _style(raw: Mapping[str, Any], family: Family) -> RopeStyle:
    nope = raw.get("mla_use_nope")
    if nope is not None and bool(nope) != (family.rope_style == "none"):
        raise unsupported("mla_use_nope", nope, str(family.rope_style == "none").lower())
    interleave = raw.get("rope_interleave")
    if interleave is None or family.rope_style == "none":
        return family.rope_style
    asked: RopeStyle = "interleaved" if interleave else "half_split"
    if asked != family.rope_style and not family.style_from_config:
        hint = "this family's reference ignores the key; build MLAConfig(rope=...) yourself if you mean it"
        raise unsupported("rope_interleave", interleave, str(not interleave).lower(), hint)
    return asked


def _blocks(raw: Mapping[str, Any], family: Family) -> list[tuple[str, Mapping[str, Any]]]:
    """The rope blocks given, the one that transformers prefers first; never empty."""
    given = [
        (name, _mapping(raw[name], name)) for name in ("rope_scaling", "rope_parameters") if raw.get(name)
    ]
    return given or [("rope_parameters", family.default_rope or {})]


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise unsupported(name, value, "an object of named values")
    return value


def _read_block(
    raw: Mapping[str, Any], name: str, block: Mapping[str, Any], style: RopeStyle, family: Family, dims: _Dims
) -> RopeConfig:
    theta = number({**raw, **_given(block)}, "rope_theta", family.theta)
    if style == "none":
        return RopeConfig(style="none", theta=theta)
    kind = block.get("rope_type") or block.get("type") or "default"
    if kind not in _KINDS:
        raise unsupported(f"{name}.rope_type", kind, ", ".join(_KINDS))
    _check_partial({**raw, **_given(block)}, name, dims)
    reader, keys = _KINDS[kind]
    for key in sorted(_given(block).keys() - keys - _COMMON):
        raise unsupported(f"{name}.{key}", block[key], f"for {kind}: {', '.join(sorted(keys | _COMMON))}")
    return RopeConfig(style=style, theta=theta, scaling=reader(raw, name, block, dims))


def _given(block: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in block.items() if value is not None}


def _check_partial(block: Mapping[str, Any], name: str, dims: _Dims) -> None:
    """The factor may count from the rope dims, from N + R or from head_dim, if it means all R dims."""
    factor = number(block, "partial_rotary_factor", 1.0)
    widths = (dims.rope, dims.nope + dims.rope, whole(block, "head_dim", dims.rope) or dims.rope)
    whole_rope = [dims.rope / width for width in dict.fromkeys(widths)]
    if not any(math.isclose(factor, share, rel_tol=1e-6) for share in whole_rope):
        shares = " or ".join(f"{share:.6g}" for share in whole_rope)
        raise unsupported(f"{name}.partial_rotary_factor", factor, f"{shares}: all rope dims rotate")


def _plain(raw: Mapping[str, Any], name: str, block: Mapping[str, Any], dims: _Dims) -> None:
    return None


def _yarn(raw: Mapping[str, Any], name: str, block: Mapping[str, Any], dims: _Dims) -> Yarn:
    original = _original_max_position(raw, name, block, dims.max_position)
    # Absent: the ratio of the lengths, as in transformers.
    factor = number(block, "factor", (dims.max_position or original) / original)
    # apply_yarn_scaling false: frequencies are stretched, neither cos/sin nor the softmax are scaled.
    scaled = block.get("apply_yarn_scaling", True)
    return Yarn(
        factor=factor,
        original_max_position=original,
        beta_fast=number(block, "beta_fast", 32.0) or 32.0,
        beta_slow=number(block, "beta_slow", 1.0) or 1.0,
        mscale=optional_number(block, "mscale") if scaled else None,
        mscale_all_dim=optional_number(block, "mscale_all_dim") if scaled else None,
        attention_factor=optional_number(block, "attention_factor") if scaled else 1.0,
        truncate=bool(block.get("truncate", True)),
    )


def _longrope(raw: Mapping[str, Any], name: str, block: Mapping[str, Any], dims: _Dims) -> LongRope:
    original = _original_max_position(raw, name, block, dims.max_position)
    attention_factor = optional_number(block, "attention_factor")
    factor = optional_number(block, "factor")
    if attention_factor is None and factor is not None:
        # An explicit factor replaces the ratio of lengths that the layer would use.
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRope(
        short_factor=_factors(block, name, "short_factor", dims.rope),
        long_factor=_factors(block, name, "long_factor", dims.rope),
        original_max_position=original,
        attention_factor=attention_factor,
    )


def _factors(block: Mapping[str, Any], name: str, key: str, rope: int) -> tuple[float, ...]:
    values = block.get(key)
    if not isinstance(values, (list, tuple)) or len(values) != rope // 2:
        raise unsupported(f"{name}.{key}", values, f"{rope // 2} numbers, one for each rotated pair")
    return tuple(float(value) for value in values)


def _original_max_position(
    raw: Mapping[str, Any], name: str, block: Mapping[str, Any], max_position: int | None
) -> int:
    """The length before extension; a value beside the rope block wins, as in transformers."""
    for holder in (raw, block):
        if holder.get("original_max_position_embeddings") is not None:
            return positive(holder, "original_max_position_embeddings")
    if max_position is None:
        raise missing(f"{name}.original_max_position_embeddings")
    return max_position


_Reader = Callable[[Mapping[str, Any], str, Mapping[str, Any], _Dims], "Yarn | LongRope | None"]
_YARN_KEYS = frozenset(
    {
        "factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
        "apply_yarn_scaling",
    }
)
_KINDS: Mapping[str, tuple[_Reader, frozenset[str]]] = {
    "default": (_plain, frozenset()),
    "yarn": (_yarn, _YARN_KEYS),
    "deepseek_yarn": (_yarn, _YARN_KEYS),
    "longrope": (_longrope, frozenset({"short_factor", "long_factor", "factor", "attention_factor"})),
}
