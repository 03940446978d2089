"""Loads Hugging Face attention weights into a layer, and derives what the absorbed form needs.

Names and shapes are those of a layer's `self_attn` module. kv_b_proj rows are [nope | value] per head.
Legend: H heads of this rank, N nope, L latent, V value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from mla_core.errors import CheckpointError
from mla_core.projections import QuantisedLinear, SplitUp
from mla_core.quant.weight import QuantisedWeight
from mla_core.weight_places import Place, destination, holder, install, make_dense, places, unfuse
from mla_core.weights_quantised import collect

if TYPE_CHECKING:
    from mla_core.layer import MLA

__all__ = ["LoadReport", "expected_shapes", "is_ignored", "load_hf", "quantised_modules", "refresh_derived"]


@dataclass(frozen=True)
class LoadReport:
    """What a load took, and which tensors of a plugin's or of no use were left.

    `complete` are the layer's own tensors that now hold what was loaded; a quantised weight counts as one.
    """

    loaded: tuple[str, ...]
    ignored: tuple[str, ...]
    complete: tuple[str, ...]


def expected_shapes(layer: MLA) -> dict[str, tuple[int, ...]]:
    """Checkpoint names (without prefix) of every tensor the layer needs, with their full shapes.

    A quantised checkpoint has other tensors in place of some `.weight`.
    """
    return {name: place.shape for name, place in places(layer).items()}


def load_hf(layer: MLA, state_dict: Mapping[str, Tensor], prefix: str, *, partial: bool) -> LoadReport:
    """Copy tensors into the layer. All that is missing, left over or of the wrong shape is reported at
    once, before anything is changed.
    """
    given = {
        name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)
    }
    if not given:
        raise _refusal(
            layer, [f"no tensor name starts with {prefix!r}; the state dict has {sorted(state_dict)[:3]}"]
        )
    wanted = places(layer)
    taken = layer.program.load_weights(layer, given)
    found = collect(wanted, given, taken, layer.config.weight_block)
    dense = {name: given[name] for name in wanted if name in given and name not in found.names}
    surplus = given.keys() - wanted.keys() - taken - found.names
    ignored = {name for name in surplus if is_ignored(name)}
    problems = [f"unexpected {name} {list(given[name].shape)}" for name in sorted(surplus - ignored)]
    if not partial:
        absent = wanted.keys() - dense.keys() - found.weights.keys() - found.broken
        problems += [f"missing {name} {list(wanted[name].shape)}" for name in wanted if name in absent]
    problems += [*_misshapen(dense, wanted), *found.problems]
    if problems:
        raise _refusal(layer, problems)
    _put_quantised(layer, wanted, found.weights)
    _put_dense(layer, wanted, dense)
    loaded = tuple(name for name in given if name in dense or name in found.names)
    return LoadReport(loaded, tuple(sorted(ignored)), (*dense, *found.weights))


def quantised_modules(layer: MLA) -> dict[str, QuantisedLinear]:
    """Modules whose weight is kept quantised, by checkpoint name."""
    found = {name.rpartition(".")[0]: holder(layer, name) for name in places(layer)}
    return {name: module for name, module in found.items() if isinstance(module, QuantisedLinear)}


def refresh_derived(layer: MLA) -> None:
    """Split kv_b_proj into W_uk [H, L, N] and W_uv [H, V, L], in the buffers they already have."""
    module, config = layer.projections.kv_b_proj, layer.config
    # Already nothing but the two halves, in these buffers.
    if isinstance(module, SplitUp):
        return
    rows = config.qk_nope_head_dim + config.v_head_dim
    kv_b_HXL = module.weight.view(layer.num_heads, rows, config.kv_lora_rank)
    # Stored with the contracted dim last: the only order that CPU matmuls in bfloat16 handle well.
    layer.w_uk_HLN.copy_(kv_b_HXL[:, : config.qk_nope_head_dim].transpose(1, 2))
    layer.w_uv_HVL.copy_(kv_b_HXL[:, config.qk_nope_head_dim :])


# Not needed by dense attention: tables of old checkpoints, and a sparse hook's weights when none is chosen.
_IGNORED = ("rotary_emb.", "indexer.")
# Steps of a quantised cache: whoever makes the cache passes them to it.
_CACHE_SCALES = ("k_scale", "v_scale")


def _refusal(layer: MLA, problems: list[str]) -> CheckpointError:
    return CheckpointError(
        f"weights for a {layer.config.model_type} layer of {layer.config.num_heads} heads do not fit:\n  "
        + "\n  ".join(problems)
    )


def _misshapen(values: Mapping[str, Tensor], wanted: Mapping[str, Place]) -> list[str]:
    return [
        f"{name} has shape {list(value.shape)}, expected {list(wanted[name].shape)}"
        for name, value in values.items()
        if tuple(value.shape) != wanted[name].shape
    ]


def is_ignored(name: str) -> bool:
    """Is a tensor that the layer does not need no reason to refuse the rest?"""
    return name.startswith(_IGNORED) or name.rpartition(".")[2] in _CACHE_SCALES


def _put_quantised(layer: MLA, wanted: Mapping[str, Place], weights: Mapping[str, QuantisedWeight]) -> None:
    if layer.keep_quantised:
        unfuse(layer, weights.keys())
    for name, weight in weights.items():
        own = wanted[name].cut_quantised(layer, weight)
        if layer.keep_quantised:
            install(layer, name, own)
        else:
            make_dense(layer, name)
            own.dequantise_into(destination(layer, name))


def _put_dense(layer: MLA, wanted: Mapping[str, Place], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        make_dense(layer, name)
        destination(layer, name).copy_(wanted[name].cut(layer, value))
