"""Finds the quantised weights among a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from mla_core.quant import weight_formats
from mla_core.quant.weight import QuantisedWeight
from mla_core.weight_places import Place

__all__ = ["Found", "collect"]


@dataclass(frozen=True)
class Found:
    """Quantised weights by the name of the dense tensor they stand for.

    names: every tensor that belongs to one, or to one that does not fit. broken: weights that do not fit;
    problems: why.
    """

    weights: Mapping[str, QuantisedWeight]
    names: frozenset[str]
    broken: frozenset[str]
    problems: tuple[str, ...]


def collect(
    wanted: Mapping[str, Place],
    given: Mapping[str, Tensor],
    taken: Collection[str],
    block: tuple[int, int],
) -> Found:
    """Group the tensors of each quantised weight and read its format. `taken`: tensors of a plugin."""
    weights: dict[str, QuantisedWeight] = {}
    names: set[str] = set()
    broken: dict[str, list[str]] = {}
    for target, place in wanted.items():
        module, _, tensor = target.rpartition(".")
        if tensor != "weight" or len(place.shape) != 2:
            continue
        own = {part: given[f"{module}.{part}"] for part in _PARTS if f"{module}.{part}" in given}
        own = {part: value for part, value in own.items() if f"{module}.{part}" not in taken}
        if not weight_formats.is_quantised(own):
            # A static input scale beside a dense weight says nothing about the weight.
            names |= {f"{module}.{part}" for part in own if part in weight_formats.INPUT_NAMES}
            continue
        names |= {f"{module}.{part}" for part in own}
        weight, problems = weight_formats.read(own, (place.shape[0], place.shape[1]), block)
        if weight is None:
            broken[target] = [f"{module} {problem}" for problem in problems]
        else:
            weights[target] = weight
    problems = tuple(problem for own in broken.values() for problem in own)
    return Found(weights, frozenset(names), frozenset(broken), problems)


_PARTS = sorted({"weight"} | weight_formats.WEIGHT_NAMES | weight_formats.INPUT_NAMES)
