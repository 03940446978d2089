"""Judges what the engine computed by the float64 oracle: each request once, over its whole sequence.

Legend: T tokens, D model, S cached tokens, L latent, R rope, H heads, N nope, V value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_core import reference
from mla_core.cli.scenario import Request, Scenario
from mla_core.config import MLAConfig
from mla_core.reference.layer import Form

__all__ = ["Judge", "relative_error", "tolerance"]

# Elements of one score matrix of the oracle: 256 MB of float64.
_MAX_SCORES = 1 << 25
_FULL_PRECISION, _HALF_PRECISION = 1e-4, 1e-2


@dataclass(frozen=True)
class _Sequence:
    """One request as the oracle computed it: its cache rows, and outputs from position `start` on."""

    latent_SL: Tensor
    k_rope_SR: Tensor
    start: int
    hidden_TD: Tensor


@dataclass(frozen=True)
class Judge:
    """The oracle of one layer, for all requests of a scenario."""

    sequences: Mapping[str, _Sequence]

    @classmethod
    @torch.inference_mode()
    def of(
        cls,
        config: MLAConfig,
        weights: Mapping[str, Tensor],
        scenario: Scenario,
        hidden: Mapping[str, Tensor],
        filled: Mapping[str, tuple[Tensor, Tensor]],
        progress: Callable[[int], None],
    ) -> Judge:
        """Compute every request. hidden: the inputs [T, D] of its new tokens; filled: rows it began with."""
        exact = {name: weight.double() for name, weight in weights.items()}
        found: dict[str, _Sequence] = {}
        for request in scenario.requests:
            rows = _first_rows(config, request, scenario, found, filled, hidden[request.name])
            found[request.name] = _sequence(config, exact, hidden[request.name], rows, progress)
        return cls(found)

    def error(self, request: str, context: int, output_TD: Tensor) -> float:
        """How far the layer's rows are from the oracle's: the worst token's relative error."""
        sequence = self.sequences[request]
        first = context - sequence.start
        return relative_error(output_TD, sequence.hidden_TD[first : first + output_TD.shape[0]])


def relative_error(actual_TD: Tensor, exact_TD: Tensor) -> float:
    """max over tokens of |actual - exact| / |exact| in the Euclidean norm; NaN counts as infinite."""
    distance_T = (actual_TD.double() - exact_TD).norm(dim=-1) / exact_TD.norm(dim=-1)
    return float(distance_T.nan_to_num(nan=torch.inf).max())


def tolerance(dtype: torch.dtype, cached: torch.dtype) -> float:
    """The relative error allowed to a layer that computes in `dtype` over a cache of `cached` elements."""
    return _FULL_PRECISION if dtype == cached == torch.float32 else _HALF_PRECISION


def _first_rows(
    config: MLAConfig,
    request: Request,
    scenario: Scenario,
    done: Mapping[str, _Sequence],
    filled: Mapping[str, tuple[Tensor, Tensor]],
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """The cache rows that a request starts with."""
    if request.parent is not None:
        parent = done[request.parent]
        shared = scenario.first_context(request.name)
        return parent.latent_SL[:shared], parent.k_rope_SR[:shared]
    if request.cached:
        latent_SL, k_rope_SR = filled[request.name]
        return latent_SL.double(), k_rope_SR.double()
    empty = like.new_zeros(0, dtype=torch.float64)
    return empty.new_zeros(0, config.kv_lora_rank), empty.new_zeros(0, config.qk_rope_head_dim)


def _sequence(
    config: MLAConfig,
    weights: Mapping[str, Tensor],
    hidden_TD: Tensor,
    rows: tuple[Tensor, Tensor],
    progress: Callable[[int], None],
) -> _Sequence:
    """The oracle over one request, in pieces whose scores fit in memory."""
    latent_SL, k_rope_SR = rows
    start, outputs = latent_SL.shape[0], []
    total = start + hidden_TD.shape[0]
    for piece_TD in hidden_TD.split(max(1, _MAX_SCORES // (config.num_heads * total))):
        at = latent_SL.shape[0]
        form = _cheaper_form(config, piece_TD.shape[0])
        exact = reference.cached_layer(config, weights, piece_TD, latent_SL, k_rope_SR, at, form=form)
        latent_SL = torch.cat([latent_SL, exact.latent_SL])
        k_rope_SR = torch.cat([k_rope_SR, exact.k_rope_SR])
        outputs.append(exact.hidden_SD)
        progress(piece_TD.shape[0])
    return _Sequence(latent_SL, k_rope_SR, start, torch.cat(outputs))


def _cheaper_form(config: MLAConfig, tokens: int) -> Form:
    """Expanding costs per key, absorbing per key and query; both are the same in exact arithmetic."""
    head = config.qk_nope_head_dim + config.v_head_dim
    expanded = head * config.kv_lora_rank + tokens * (head + config.qk_rope_head_dim)
    absorbed = tokens * (config.kv_lora_rank + config.latent_width)
    return "expanded" if expanded < absorbed else "absorbed"
