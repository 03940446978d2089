"""What a layer of a model wants of its kernels, from plain values: no torch, no device, no weights."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from mla_core.config import MLAConfig
from mla_core.config_values import from_validation
from mla_core.errors import ConfigError
from mla_core.request import DeviceInfo, LayerRequest

__all__ = ["heads_per_rank", "layer_request", "layout_id"]

_OWN_LAYOUT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def layer_request(
    config: MLAConfig,
    *,
    device: DeviceInfo,
    dtype: str,
    layout: str,
    max_decode_query_len: int = 1,
    tp_size: int = 1,
    **asked: Any,
) -> LayerRequest:
    """The request that `MLA` makes for the same arguments; `asked` are further fields of LayerRequest.

    Raises ConfigError, naming every value that does not fit.
    """
    try:
        return LayerRequest(
            device=device,
            dtype=dtype,
            layout=layout,
            max_query_len=max_decode_query_len,
            heads=heads_per_rank(config, tp_size),
            latent=config.kv_lora_rank,
            nope=config.qk_nope_head_dim,
            rope=config.qk_rope_head_dim,
            value=config.v_head_dim,
            rope_style=config.rope.style,
            **asked,
        )
    except ValidationError as error:
        raise from_validation(error, LayerRequest.model_fields, "the layer's request") from error


def layout_id(cache: str, dtype: str) -> str:
    """The cache layout that a name means; "auto" stores the layer's own dtype."""
    return _OWN_LAYOUT.get(dtype, dtype) if cache == "auto" else cache


def heads_per_rank(config: MLAConfig, tp_size: int) -> int:
    """Heads of one tensor-parallel rank. Raises ConfigError when they cannot be split evenly."""
    if tp_size < 1 or config.num_heads % tp_size:
        raise ConfigError(
            f"{config.num_heads} heads cannot be split over tp_size={tp_size} ranks; "
            "tp_size must divide num_heads"
        )
    return config.num_heads // tp_size
