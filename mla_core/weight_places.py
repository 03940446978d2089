"""Where each checkpoint tensor lives in a layer, and how one tensor-parallel rank cuts it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mla_core.config import MLAConfig
from mla_core.projections import Linear, QuantisedLinear, SplitUp
from mla_core.quant.weight import QuantisedWeight

if TYPE_CHECKING:
    from mla_core.layer import MLA

__all__ = ["Place", "destination", "holder", "install", "make_dense", "places", "places_of", "unfuse"]

_FUSED = ("q_a_proj", "kv_a_proj_with_mqa")


@dataclass(frozen=True)
class Place:
    """A tensor's full shape, and the dim along which its heads lie; None: every rank has all of it.

    summed: a bias that is added once, not by every rank.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    summed: bool = False

    def cut(self, layer: MLA, value: Tensor) -> Tensor:
        """This rank's part."""
        if self.summed:
            return value if layer.tp_rank == 0 else torch.zeros_like(value)
        if self.dim is None or layer.tp_size == 1:
            return value
        return value.chunk(layer.tp_size, self.dim)[layer.tp_rank]

    def cut_quantised(self, layer: MLA, weight: QuantisedWeight) -> QuantisedWeight:
        """This rank's part; blocks stay where the whole matrix has them."""
        if self.dim is None or layer.tp_size == 1:
            return weight
        size = weight.shape[self.dim] // layer.tp_size
        return weight.cut(self.dim, layer.tp_rank * size, (layer.tp_rank + 1) * size)


def places(layer: MLA) -> dict[str, Place]:
    """Every tensor the layer needs, by checkpoint name."""
    return places_of(layer.config)


def places_of(config: MLAConfig) -> dict[str, Place]:
    """Every tensor that a layer of this config needs, by checkpoint name."""
    width, heads, lora = config.hidden_size, config.num_heads, config.q_lora_rank
    found: dict[str, Place] = {}

    def matrix(name: str, rows: int, columns: int, dim: int | None = None, bias: bool = False) -> None:
        found[f"{name}.weight"] = Place((rows, columns), dim)
        if bias:
            found[f"{name}.bias"] = Place((rows,), summed=dim == 1)

    if lora is None:
        matrix("q_proj", heads * config.qk_head_dim, width, 0)
    else:
        matrix("q_a_proj", lora, width, bias=config.attention_bias)
        found["q_a_layernorm.weight"] = Place((lora,))
        matrix("q_b_proj", heads * config.qk_head_dim, lora, 0)
    matrix("kv_a_proj_with_mqa", config.latent_width, width, bias=config.attention_bias)
    found["kv_a_layernorm.weight"] = Place((config.kv_lora_rank,))
    matrix("kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank, 0)
    matrix("o_proj", width, heads * config.v_head_dim, 1, bias=config.has_output_bias)
    if config.gate is not None:
        gates = heads if config.gate.kind == "per_head" else heads * config.v_head_dim
        matrix(config.gate.weight_name, gates, width, 0)
    return found


def destination(layer: MLA, name: str) -> Tensor:
    """The memory of one dense tensor, some rows of the fused matrix included."""
    module, _, tensor = name.rpartition(".")
    rows, lora = slice(None), layer.projections.q_lora_rank
    if layer.projections.fused and module in _FUSED:
        rows = slice(lora) if module == _FUSED[0] else slice(lora, None)
    return getattr(holder(layer, name), tensor)[rows]


def holder(layer: MLA, name: str) -> nn.Module:
    """The module that holds a tensor."""
    module = name.rpartition(".")[0]
    if layer.projections.fused and module in _FUSED:
        return layer.projections.qkv_a_proj
    parent, attribute = _where(layer, module)
    return getattr(parent, attribute)


def unfuse(layer: MLA, names: Collection[str]) -> None:
    """Take the fused matrix apart when one of its parts is among these tensors, about to be replaced."""
    parts = {name.rpartition(".")[0] for name in names}.intersection(_FUSED)
    if parts:
        layer.projections.unfuse(parts)


def install(layer: MLA, name: str, weight: QuantisedWeight) -> None:
    """Put this rank's part of a quantised weight in its place: in place when the same kind is there."""
    module = name.rpartition(".")[0]
    parent, attribute = _where(layer, module)
    if module == "kv_b_proj":
        if not isinstance(parent.kv_b_proj, SplitUp):
            parent.kv_b_proj = SplitUp(layer.w_uk_HLN, layer.w_uv_HVL)
        parent.kv_b_proj.split(weight)
        return
    present = getattr(parent, attribute)
    if isinstance(present, QuantisedLinear) and present.fits(weight):
        present.copy_(weight)
    else:
        setattr(parent, attribute, QuantisedLinear(weight, present.bias, layer.device, layer.fp4_inputs))


def make_dense(layer: MLA, name: str) -> None:
    """Make room for a dense tensor where a quantised weight is held."""
    module, _, tensor = name.rpartition(".")
    if tensor != "weight" or (layer.projections.fused and module in _FUSED):
        return
    parent, attribute = _where(layer, module)
    present = getattr(parent, attribute)
    if isinstance(present, QuantisedLinear):
        rows, columns = present.stored.shape
    elif isinstance(present, SplitUp):
        rows, columns = present.shape
    else:
        return
    dense = Linear(columns, rows, False, layer.dtype, layer.device)
    dense.bias = present.bias
    setattr(parent, attribute, dense)


def _where(layer: MLA, module: str) -> tuple[nn.Module, str]:
    """The module that holds a checkpoint's module, and its name there."""
    if module == "o_proj":
        return layer, "o_proj"
    if layer.config.gate is not None and module == layer.config.gate.weight_name:
        return layer, "gate_proj"
    return layer.projections, module
