"""What a checkpoint's attention weights are, and what is wrong with them, from the files' headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mla_core.checkpoint import Checkpoint
from mla_core.checkpoint_names import AttentionPlace
from mla_core.errors import CheckpointError
from mla_core.quant.weight import QuantisedWeight
from mla_core.weight_places import Place, places_of
from mla_core.weights import is_ignored
from mla_core.weights_quantised import collect

__all__ = ["LayerWeights", "check", "survey"]


@dataclass(frozen=True)
class LayerWeights:
    """One attention's tensors. formats: how each of its matrices is stored, by Hugging Face module name."""

    layer: int
    prefix: str
    formats: Mapping[str, str]
    nbytes: int
    # Tensors that a layer leaves alone, such as a sparse indexer's.
    ignored: tuple[str, ...]
    problems: tuple[str, ...]


def check(checkpoint: Checkpoint, layers: Iterable[int]) -> None:
    """Raises CheckpointError with every missing, unexpected and misshapen tensor of these layers."""
    problems = [problem for weights in survey(checkpoint, layers) for problem in weights.problems]
    if problems:
        raise CheckpointError(
            f"the attention weights of {checkpoint.directory} do not fit its config:\n  "
            + "\n  ".join(problems)
        )


def survey(checkpoint: Checkpoint, layers: Iterable[int]) -> list[LayerWeights]:
    """The weights of these layers; reads no tensor. Raises CheckpointError for a file that cannot be read."""
    names = {layer: checkpoint.tensor_names(layer) for layer in layers}
    headers = checkpoint.headers(name for own in names.values() for name in own.values())
    wanted = places_of(checkpoint.config)
    found = []
    for layer, own in names.items():
        given = {translated: headers[name] for translated, name in own.items()}
        attention = _Attention(checkpoint.place(layer), own, given, wanted, checkpoint.config.weight_block)
        found.append(attention.judge(layer))
    return found


@dataclass(frozen=True)
class _Attention:
    """One attention's tensors by Hugging Face name: what the checkpoint calls them, what they are, and what
    a layer wants.
    """

    place: AttentionPlace
    names: Mapping[str, str]
    given: Mapping[str, Tensor]
    wanted: Mapping[str, Place]
    block: tuple[int, int]

    def judge(self, layer: int) -> LayerWeights:
        # The stated shape of a packed weight is a value, and headers have none.
        shown = {name: value for name, value in self.given.items() if not name.endswith(".weight_shape")}
        quantised = collect(self.wanted, shown, (), self.block)
        dense = {name for name in self.wanted if name in shown and name not in quantised.names}
        surplus = shown.keys() - self.wanted.keys() - quantised.names
        ignored = {name for name in surplus if is_ignored(name)}
        absent = self.wanted.keys() - dense - quantised.weights.keys() - quantised.broken
        problems = [self._missing(name) for name in self.wanted if name in absent]
        problems += [self._unexpected(name) for name in sorted(surplus - ignored)]
        problems += [self._misshapen(name) for name in self.wanted if name in dense and not self._fits(name)]
        problems += [f"{self.place.prefix[:-1]}: {problem}" for problem in quantised.problems]
        return LayerWeights(
            layer=layer,
            prefix=self.place.prefix,
            formats=self._formats(dense, quantised.weights),
            nbytes=sum(value.nbytes for value in self.given.values()),
            ignored=tuple(sorted(self.names[name] for name in ignored)),
            problems=tuple(problems),
        )

    def _formats(self, dense: set[str], quantised: Mapping[str, QuantisedWeight]) -> dict[str, str]:
        """In the order in which a layer uses its matrices."""
        found = {}
        for name, place in self.wanted.items():
            if len(place.shape) == 2 and name in dense:
                found[name.removesuffix(".weight")] = str(self.given[name].dtype).removeprefix("torch.")
            elif name in quantised:
                found[name.removesuffix(".weight")] = _format(quantised[name])
        return found

    def _fits(self, name: str) -> bool:
        return tuple(self.given[name].shape) == self.wanted[name].shape

    def _missing(self, name: str) -> str:
        own = self.place.prefix + self.place.naming.from_hf(name)
        return f"{own} is missing, expected {list(self.wanted[name].shape)}"

    def _unexpected(self, name: str) -> str:
        return f"{self.names[name]} {list(self.given[name].shape)} is unexpected"

    def _misshapen(self, name: str) -> str:
        shape, wanted = list(self.given[name].shape), list(self.wanted[name].shape)
        return f"{self.names[name]} has shape {shape}, expected {wanted}"


def _format(weight: QuantisedWeight) -> str:
    """A format's name, and what one of its scales covers where models differ in it."""
    scales = [part for name, part in weight.format.parts.items() if "scale" in name]
    coarsest = scales[0].steps
    if weight.format.id == "fp8":
        covered = {(0, 0): "one scale", (1, 0): "a scale per row"}
        return f"fp8, {covered.get(coarsest, f'blocks of {coarsest[0]} x {coarsest[1]}')}"
    if weight.format.id == "int4_packed":
        return f"int4_packed, groups of {coarsest[1]}" if coarsest[1] else "int4_packed, a scale per row"
    return weight.format.id
