"""Loads Hugging Face attention weights into a layer, and derives what the absorbed form needs.

Names and shapes are those of a layer's `self_attn` module. kv_b_proj rows are [nope | value] per head.
Legend: H heads of this rank, N nope, L latent, V value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_core.errors import CheckpointError
from mla_core.projections import Linear

if TYPE_CHECKING:
    from mla_core.layer import MLA

__all__ = ["LoadReport", "expected_shapes", "load_hf", "refresh_derived"]


@dataclass(frozen=True)
class LoadReport:
    """What a load took, and which tensors of a plugin's or of no use were left."""

    loaded: tuple[str, ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True)
class _Target:
    """Where a checkpoint tensor goes: its full shape, the destination, and how this rank cuts it."""

    shape: tuple[int, ...]
    destination: Tensor
    cut: Callable[[Tensor], Tensor]


def expected_shapes(layer: MLA) -> dict[str, tuple[int, ...]]:
    """Checkpoint names (without prefix) of every tensor the layer needs, with their full shapes."""
    return {name: target.shape for name, target in _targets(layer).items()}


def load_hf(layer: MLA, state_dict: Mapping[str, Tensor], prefix: str, *, partial: bool) -> LoadReport:
    """Copy tensors into the layer. All that is missing, left over or of the wrong shape is reported at
    once.
    """
    given = {
        name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)
    }
    targets = _targets(layer)
    taken = layer.program.load_weights(layer, given)
    surplus = given.keys() - targets.keys() - taken
    ignored = {name for name in surplus if name.startswith(_IGNORED)}
    problems = [f"unexpected {name} {list(given[name].shape)}" for name in sorted(surplus - ignored)]
    if not partial:
        problems += [f"missing {name} {list(targets[name].shape)}" for name in targets if name not in given]
    problems += [
        f"{name} has shape {list(given[name].shape)}, expected {list(target.shape)}"
        for name, target in targets.items()
        if name in given and tuple(given[name].shape) != target.shape
    ]
    if not given:
        problems = [f"no tensor name starts with {prefix!r}; the state dict has {sorted(state_dict)[:3]}"]
    if problems:
        raise CheckpointError(
            f"weights for a {layer.config.model_type} layer of {layer.config.num_heads} heads do not fit:\n  "
            + "\n  ".join(problems)
        )
    loaded = [name for name in targets if name in given]
    for name in loaded:
        targets[name].destination.copy_(targets[name].cut(given[name]))
    return LoadReport(tuple(loaded), tuple(sorted(ignored)))


def refresh_derived(layer: MLA) -> None:
    """Split kv_b_proj into W_uk [H, L, N] and W_uv [H, V, L], in the buffers they already have."""
    config = layer.config
    rows = config.qk_nope_head_dim + config.v_head_dim
    kv_b_HXL = layer.projections.kv_b_proj.weight.view(layer.num_heads, rows, config.kv_lora_rank)
    # Stored with the contracted dim last: the only order that CPU matmuls in bfloat16 handle well.
    layer.w_uk_HLN.copy_(kv_b_HXL[:, : config.qk_nope_head_dim].transpose(1, 2))
    layer.w_uv_HVL.copy_(kv_b_HXL[:, config.qk_nope_head_dim :])


# Not needed by dense attention: tables of old checkpoints, and a sparse hook's weights when none is chosen.
_IGNORED = ("rotary_emb.", "indexer.")


def _targets(layer: MLA) -> dict[str, _Target]:
    """Every tensor the layer needs, by checkpoint name."""
    config, modules = layer.config, layer.projections
    width, heads, lora = config.hidden_size, config.num_heads, config.q_lora_rank
    found: dict[str, _Target] = {}

    def add(
        name: str, tensors: tuple[Tensor, Tensor | None], shape: tuple[int, ...], dim: int | None = None
    ) -> None:
        weight, bias = tensors
        found[f"{name}.weight"] = _Target(shape, weight, _shard(layer, dim))
        if bias is not None:
            found[f"{name}.bias"] = _Target(
                shape[:1], bias, _whole if layer.tp_rank == 0 or dim is None else torch.zeros_like
            )

    if lora is None:
        add("q_proj", _of(modules.q_proj), (heads * config.qk_head_dim, width), 0)
    else:
        q_a = _of(modules.qkv_a_proj, stop=lora) if modules.fused else _of(modules.q_a_proj)
        add("q_a_proj", q_a, (lora, width))
        add("q_a_layernorm", (modules.q_a_layernorm.weight, None), (lora,))
        add("q_b_proj", _of(modules.q_b_proj), (heads * config.qk_head_dim, lora), 0)
    kv_a = _of(modules.qkv_a_proj, start=lora) if modules.fused else _of(modules.kv_a_proj_with_mqa)
    add("kv_a_proj_with_mqa", kv_a, (config.latent_width, width))
    add("kv_a_layernorm", (modules.kv_a_layernorm.weight, None), (config.kv_lora_rank,))
    expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
    add("kv_b_proj", _of(modules.kv_b_proj), (expanded, config.kv_lora_rank), 0)
    add("o_proj", _of(layer.o_proj), (width, heads * config.v_head_dim), 1)
    if config.gate is not None:
        gates = heads if config.gate.kind == "per_head" else heads * config.v_head_dim
        add(config.gate.weight_name, _of(layer.gate_proj), (gates, width), 0)
    return found


def _of(module: Linear, start: int | None = None, stop: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a module, or of some of its rows."""
    return module.weight[start:stop], None if module.bias is None else module.bias[start:stop]


def _shard(layer: MLA, dim: int | None) -> Callable[[Tensor], Tensor]:
    """How this rank cuts a weight whose heads lie along `dim`."""
    if dim is None or layer.tp_size == 1:
        return _whole
    return lambda value: value.chunk(layer.tp_size, dim)[layer.tp_rank]


def _whole(value: Tensor) -> Tensor:
    return value
