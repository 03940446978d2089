"""One MLA layer as DeepSeek-V2 (arXiv 2405.04434, section 2.1) writes it, expanded and absorbed.

Legend: S all tokens seen, T new tokens, H heads, D model, Q q-lora, L latent, N nope, R rope, V value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mla_core.reference.rope import mscale, rotate, rotation

__all__ = ["Form", "Output", "attention_layer", "cached_layer"]

Form = Literal["expanded", "absorbed"]
Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Output:
    """What the layer computes for its tokens, all float64."""

    hidden_SD: Tensor
    # Per head, before gate and o_proj.
    attention_SHV: Tensor
    # Natural log of the sum of exp(scale * score) over the keys a token sees.
    lse_SH: Tensor
    # Rows that these tokens add to the cache: normed, scaled latent; rotated key in its style's own order.
    latent_SL: Tensor
    k_rope_SR: Tensor


def attention_layer(
    config: Any,
    weights: Weights,
    hidden_SD: Tensor,
    *,
    positions: Tensor | None = None,
    form: Form = "expanded",
    angle_dtype: torch.dtype = torch.float64,
) -> Output:
    """The layer over one whole request; weights carry Hugging Face names without prefix.

    positions: one per token, 0, 1, ... by default. angle_dtype: see `rope.rotation`.
    """
    tokens = hidden_SD.shape[0]
    positions_S = torch.arange(tokens, device=hidden_SD.device) if positions is None else positions
    latent_0L = hidden_SD.new_zeros(0, config.kv_lora_rank)
    k_rope_0R = hidden_SD.new_zeros(0, config.qk_rope_head_dim)
    cached = (latent_0L, k_rope_0R)
    return _layer(config, weights, hidden_SD, cached, None, positions_S, form, angle_dtype)


def cached_layer(
    config: Any,
    weights: Weights,
    hidden_TD: Tensor,
    latent_SL: Tensor,
    k_rope_SR: Tensor,
    start: int,
    *,
    own_rows: tuple[Tensor, Tensor] | None = None,
    form: Form = "expanded",
    angle_dtype: torch.dtype = torch.float64,
) -> Output:
    """The layer over new tokens at positions start, start + 1, ... that see all given rows and themselves.

    The rows are as a cache holds them, already normed and rotated: give dequantised ones to judge a layer
    that reads a quantised cache. own_rows: what the new tokens see of themselves, for a layer that reads
    them back from such a cache; by default their exact rows.
    """
    positions_T = torch.arange(start, start + hidden_TD.shape[0], device=hidden_TD.device)
    cached = (latent_SL, k_rope_SR)
    return _layer(config, weights, hidden_TD, cached, own_rows, positions_T, form, angle_dtype)


def _layer(
    config: Any,
    weights: Weights,
    hidden_TD: Tensor,
    cached: tuple[Tensor, Tensor],
    own_rows: tuple[Tensor, Tensor] | None,
    positions_T: Tensor,
    form: Form,
    angle_dtype: torch.dtype,
) -> Output:
    if form not in _FORMS:
        raise ValueError(f"form {form!r} is unknown; known: {', '.join(_FORMS)}")
    weights = {name: weight.double() for name, weight in weights.items()}
    hidden_TD = hidden_TD.double()
    cos, sin = rotation(config, positions_T, angle_dtype)

    query_THN, query_THR = _queries(config, weights, hidden_TD, positions_T, cos, sin)
    latent_TL, k_rope_TR = _cache_rows(config, weights, hidden_TD, cos, sin)

    own_TL, own_TR = (latent_TL, k_rope_TR) if own_rows is None else own_rows
    latent_SL = torch.cat([cached[0].double(), own_TL.double()])
    k_rope_SR = torch.cat([cached[1].double(), own_TR.double()])
    out_THV, lse_TH = _FORMS[form](config, weights, query_THN, query_THR, latent_SL, k_rope_SR)

    gated_THV = out_THV * _gate(config, weights, hidden_TD)
    hidden_TD = _linear(weights, "o_proj", gated_THV.flatten(1), _has_output_bias(config))
    return Output(hidden_TD, out_THV, lse_TH, latent_TL, k_rope_TR)


def _queries(
    config: Any, weights: Weights, hidden_TD: Tensor, positions_T: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """q = W_uq norm(W_dq h), or W_q h; its rope part turned, all of it scaled."""
    if config.q_lora_rank is None:
        query = _linear(weights, "q_proj", hidden_TD)
    else:
        down_TQ = _linear(weights, "q_a_proj", hidden_TD, config.attention_bias)
        query = _linear(weights, "q_b_proj", _norm(config, weights, "q_a_layernorm", down_TQ))
    query_THE = query.unflatten(-1, (config.num_heads, -1))
    nope_THN, rope_THR = query_THE.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
    rope_THR = rotate(rope_THR, cos[:, None], sin[:, None], config.rope.style)
    factor_T11 = config.query_scale * _length_scale(config, positions_T)[:, None, None]
    return nope_THN * factor_T11, rope_THR * factor_T11


def _cache_rows(
    config: Any, weights: Weights, hidden_TD: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """c = norm(W_dkv h) and k_rope = rope(W_kr h): all that a token leaves behind."""
    both = _linear(weights, "kv_a_proj_with_mqa", hidden_TD, config.attention_bias)
    latent_TL, k_rope_TR = both.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
    latent_TL = _norm(config, weights, "kv_a_layernorm", latent_TL) * config.latent_scale
    return latent_TL, rotate(k_rope_TR, cos, sin, config.rope.style)


def _expanded(
    config: Any, weights: Weights, q_THN: Tensor, q_THR: Tensor, latent_SL: Tensor, k_rope_SR: Tensor
) -> tuple[Tensor, Tensor]:
    """Ordinary attention over k = [W_uk c | k_rope] and v = W_uv c."""
    up_key_HNL, up_value_HVL = _up_projections(config, weights)
    key_SHN = torch.einsum("hnl,sl->shn", up_key_HNL, latent_SL)
    value_SHV = torch.einsum("hvl,sl->shv", up_value_HVL, latent_SL)
    score_HTS = torch.einsum("thn,shn->hts", q_THN, key_SHN) + torch.einsum("thr,sr->hts", q_THR, k_rope_SR)
    share_HTS, lse_TH = _softmax(config, score_HTS)
    return torch.einsum("hts,shv->thv", share_HTS, value_SHV), lse_TH


def _absorbed(
    config: Any, weights: Weights, q_THN: Tensor, q_THR: Tensor, latent_SL: Tensor, k_rope_SR: Tensor
) -> tuple[Tensor, Tensor]:
    """The same numbers with one shared key [c | k_rope] and one shared value c: W_uk moves to the query."""
    up_key_HNL, up_value_HVL = _up_projections(config, weights)
    q_THL = torch.einsum("thn,hnl->thl", q_THN, up_key_HNL)
    score_HTS = torch.einsum("thl,sl->hts", q_THL, latent_SL) + torch.einsum("thr,sr->hts", q_THR, k_rope_SR)
    share_HTS, lse_TH = _softmax(config, score_HTS)
    mixed_THL = torch.einsum("hts,sl->thl", share_HTS, latent_SL)
    return torch.einsum("hvl,thl->thv", up_value_HVL, mixed_THL), lse_TH


_FORMS = {"expanded": _expanded, "absorbed": _absorbed}


def _up_projections(config: Any, weights: Weights) -> tuple[Tensor, Tensor]:
    """kv_b_proj holds, head by head, N rows of W_uk and then V rows of W_uv."""
    both = weights["kv_b_proj.weight"].unflatten(0, (config.num_heads, -1))
    up_key_HNL, up_value_HVL = both.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    return up_key_HNL, up_value_HVL


def _softmax(config: Any, score_HTS: Tensor) -> tuple[Tensor, Tensor]:
    """Causal softmax where the last T of the S keys are the queries' own; also its log-sum-exp, [T, H]."""
    _, new, seen = score_HTS.shape
    hidden_TS = torch.ones(new, seen, dtype=torch.bool, device=score_HTS.device).triu(diagonal=seen - new + 1)
    logit_HTS = (_softmax_scale(config) * score_HTS).masked_fill(hidden_TS, -math.inf)
    return logit_HTS.softmax(dim=-1), logit_HTS.logsumexp(dim=-1).T


def _softmax_scale(config: Any) -> float:
    """1/sqrt(N + R), times m^2 where YaRN is on and weighs all dims."""
    if config.softmax_scale_override is not None:
        return config.softmax_scale_override
    scale = 1.0 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    scaling = config.rope.scaling
    if config.rope.style == "none" or scaling is None or scaling.kind != "yarn" or not scaling.mscale_all_dim:
        return scale
    return scale * mscale(scaling.factor, scaling.mscale_all_dim) ** 2


def _length_scale(config: Any, positions_T: Tensor) -> Tensor:
    """Llama 4's query scale, 1 + beta ln(1 + floor(position / floor_scale)); ones without it."""
    scaling = config.query_scaling
    if scaling is None:
        return torch.ones_like(positions_T, dtype=torch.float64)
    steps = torch.floor((positions_T + scaling.offset).double() / scaling.floor_scale)
    return 1.0 + scaling.beta * torch.log(1.0 + steps)


def _gate(config: Any, weights: Weights, hidden_TD: Tensor) -> Tensor:
    """sigmoid(W_g h) for a whole head, [T, H, 1], or for each value, [T, H, V]; 1 without a gate."""
    if config.gate is None:
        return hidden_TD.new_ones(1)
    gate = torch.sigmoid(_linear(weights, config.gate.weight_name, hidden_TD))
    return gate[..., None] if config.gate.kind == "per_head" else gate.unflatten(-1, (config.num_heads, -1))


def _norm(config: Any, weights: Weights, name: str, x: Tensor) -> Tensor:
    """RMS norm: x / sqrt(mean(x^2) + eps), times the weight."""
    return (
        x
        / torch.sqrt(x.square().mean(dim=-1, keepdim=True) + config.latent_norm_eps)
        * weights[f"{name}.weight"]
    )


def _linear(weights: Weights, name: str, x: Tensor, bias: bool = False) -> Tensor:
    product = x @ weights[f"{name}.weight"].T
    return product + weights[f"{name}.bias"] if bias else product


def _has_output_bias(config: Any) -> bool:
    return config.attention_bias if config.output_bias is None else config.output_bias
