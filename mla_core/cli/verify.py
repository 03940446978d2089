"""Judges what the engine computed by the float64 oracle: each request once, over its whole sequence.

Legend: T tokens, D model, S cached tokens, L latent, R rope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_core import reference
from mla_core.cache import Layout, Scales
from mla_core.cli.scenario import Scenario, Work
from mla_core.config import MLAConfig
from mla_core.reference.layer import Form

__all__ = ["Judge", "is_quantised", "relative_error", "tolerance"]

Rows = tuple[Tensor, Tensor]
# Rows of a request's first tokens, as the cache holds them.
Reader = Callable[[str, int], Rows]

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
        filled: Mapping[str, Rows],
        reader: Reader | None,
        progress: Callable[[int], None],
    ) -> Judge:
        """Compute every request. hidden: inputs [T, D] of its new tokens; filled: rows it began with.

        reader: the oracle takes each step's cached rows from there and not from itself, because a quantised
        cache is right when it holds what its format can hold.
        """
        oracle = _Oracle(config, {name: weight.double() for name, weight in weights.items()}, progress)
        found: dict[str, _Sequence] = {}
        for request in scenario.requests:
            name, works = request.name, scenario.works_of(request.name)
            if request.parent is not None:
                parent, shared = found[request.parent], works[0].context
                rows = parent.latent_SL[:shared], parent.k_rope_SR[:shared]
            else:
                rows = filled.get(name) or oracle.no_rows(hidden[name])
            found[name] = oracle.sequence(works, hidden[name], rows, reader)
        return cls(found)

    def error(self, work: Work, output_TD: Tensor) -> float:
        """How far the layer's rows are from the oracle's: the worst token's relative error."""
        sequence = self.sequences[work.request]
        first = work.context - sequence.start
        return relative_error(output_TD, sequence.hidden_TD[first : first + work.tokens])


@dataclass(frozen=True)
class _Oracle:
    config: MLAConfig
    weights: Mapping[str, Tensor]
    progress: Callable[[int], None]

    def no_rows(self, like: Tensor) -> Rows:
        latent, rope = self.config.kv_lora_rank, self.config.qk_rope_head_dim
        return like.new_zeros(0, latent), like.new_zeros(0, rope)

    def sequence(
        self, works: tuple[Work, ...], hidden_TD: Tensor, rows: Rows, reader: Reader | None
    ) -> _Sequence:
        """One request through all its steps."""
        latent_SL, k_rope_SR = (part.double() for part in rows)
        start, outputs = latent_SL.shape[0], []
        for work, new_TD in zip(works, hidden_TD.split([work.tokens for work in works]), strict=True):
            if reader is not None and work.context:
                latent_SL, k_rope_SR = (part.double() for part in reader(work.request, work.context))
            for piece_TD in new_TD.split(self._piece(work)):
                exact = self._layer(piece_TD, latent_SL, k_rope_SR)
                latent_SL = torch.cat([latent_SL, exact.latent_SL])
                k_rope_SR = torch.cat([k_rope_SR, exact.k_rope_SR])
                outputs.append(exact.hidden_SD)
                self.progress(piece_TD.shape[0])
        return _Sequence(latent_SL, k_rope_SR, start, torch.cat(outputs))

    def _layer(self, hidden_TD: Tensor, latent_SL: Tensor, k_rope_SR: Tensor) -> reference.Output:
        form = self._cheaper_form(hidden_TD.shape[0])
        start = latent_SL.shape[0]
        return reference.cached_layer(
            self.config, self.weights, hidden_TD, latent_SL, k_rope_SR, start, form=form
        )

    def _piece(self, work: Work) -> int:
        """How many tokens at once keep the scores in memory."""
        return max(1, _MAX_SCORES // (self.config.num_heads * (work.context + work.tokens)))

    def _cheaper_form(self, tokens: int) -> Form:
        """Expanding costs per key, absorbing per key and query; both are the same in exact arithmetic."""
        config = self.config
        head = config.qk_nope_head_dim + config.v_head_dim
        expanded = head * config.kv_lora_rank + tokens * (head + config.qk_rope_head_dim)
        absorbed = tokens * (config.kv_lora_rank + config.latent_width)
        return "expanded" if expanded < absorbed else "absorbed"


def relative_error(actual_TD: Tensor, exact_TD: Tensor) -> float:
    """max over tokens of |actual - exact| / |exact| in the Euclidean norm; NaN counts as infinite."""
    distance_T = (actual_TD.double() - exact_TD).norm(dim=-1) / exact_TD.norm(dim=-1)
    return float(distance_T.nan_to_num(nan=torch.inf).max())


def is_quantised(layout: Layout) -> bool:
    """Does the layout hold less than the float type that the layer computes in?"""
    return layout.storage not in (torch.float32, torch.float16, torch.bfloat16)


def tolerance(dtype: torch.dtype, layout: Layout) -> float:
    """The relative error allowed to a layer that computes in `dtype` over a cache of this layout.

    Cached rows are known exactly; a quantised layout may round each token's own row once more.
    """
    if is_quantised(layout):
        return _HALF_PRECISION + 2 * _rounding(layout)
    return _FULL_PRECISION if dtype == layout.storage == torch.float32 else _HALF_PRECISION


def _rounding(layout: Layout) -> float:
    """Relative error that storing rows of normal values makes."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, layout.width, generator=generator)
    latent_TL, k_rope_TR = rows.split([layout.latent, layout.rope], dim=-1)
    stored = layout.unpack(layout.pack(latent_TL, k_rope_TR, Scales()), torch.float32, Scales())
    return float((stored - rows).norm() / rows.norm())
