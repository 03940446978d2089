"""Hugging Face style checkpoints: config.json beside *.safetensors files, one or sharded by an index.

Only what is asked for is read. Names of tensors are the checkpoint's own; `attention` drops their prefix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mla_core.checkpoint_writer import INDEX, Progress, write_checkpoint
from mla_core.config import MLAConfig
from mla_core.errors import CheckpointError

__all__ = ["AttentionPlace", "Checkpoint", "Progress", "open_checkpoint", "write_checkpoint"]

# Every MLA attention has this weight, whatever its prefix: model., language_model.model., ...
_MARK = re.compile(
    r"(?P<stem>(?:.*\.)?)layers\.(?P<layer>\d+)\.(?P<module>\w+)\.(?:(?P<part>\d+)\.)?kv_a_proj_with_mqa\.weight"
)


def _ignore(_: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class AttentionPlace:
    """Where one attention lies in a checkpoint; `part` tells the attentions of one decoder layer apart."""

    stem: str
    layer: int
    module: str
    part: int | None = None

    @classmethod
    def of(cls, mark: re.Match[str]) -> AttentionPlace:
        """The place that a matched tensor name gives away."""
        part = None if mark["part"] is None else int(mark["part"])
        return cls(mark["stem"], int(mark["layer"]), mark["module"], part)

    @property
    def prefix(self) -> str:
        """What its tensors' names start with, "model.layers.0.self_attn." for example."""
        return f"{self.stem}layers.{self.layer}.{self.module}.{self._part}"

    @property
    def input_norm(self) -> str:
        """Name of the norm in front of it."""
        return f"{self.stem}layers.{self.layer}.input_layernorm.{self._part}weight"

    @property
    def embedding(self) -> str:
        """Name of the model's token embedding."""
        return f"{self.stem}embed_tokens.weight"

    @property
    def _part(self) -> str:
        return "" if self.part is None else f"{self.part}."


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its config and which file holds which tensor; tensors are read when asked for."""

    directory: Path
    hf_config: Mapping[str, Any]
    files: Mapping[str, str]

    @cached_property
    def config(self) -> MLAConfig:
        """The attention's config. Raises ConfigError when the model is not MLA."""
        return MLAConfig.from_hf(self.hf_config)

    @cached_property
    def layers(self) -> Mapping[int, AttentionPlace]:
        """Layer index to attention, in order; a decoder layer with two attentions counts twice."""
        marks = [mark for name in self.files if (mark := _MARK.fullmatch(name)) is not None]
        found = [AttentionPlace.of(mark) for mark in marks]
        # A multimodal model may hold more than one stack of layers; ours is the tall one.
        stems = [place.stem for place in found]
        tallest = max(stems, key=stems.count, default="")
        places = [place for place in found if place.stem == tallest]
        parts = 1 + max((place.part or 0 for place in places), default=0)
        indexed = {place.layer * parts + (place.part or 0): place for place in places}
        return dict(sorted(indexed.items()))

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self.files)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, from the files' headers."""
        found: dict[str, tuple[int, ...]] = {}
        for file, names in self._by_file(self.files).items():
            with self._open(file) as shard:
                found |= {name: tuple(self._slice(shard, file, name).get_shape()) for name in names}
        return found

    def place(self, layer: int) -> AttentionPlace:
        """Where the attention of one layer lies. Raises CheckpointError when it has none."""
        if layer not in self.layers:
            has = ", ".join(map(str, self.layers)) or "none"
            raise CheckpointError(
                f"{self.directory} has no MLA attention of layer {layer}; it has layers: {has}"
            )
        return self.layers[layer]

    def attention(self, layer: int, progress: Progress = _ignore) -> dict[str, Tensor]:
        """All tensors of one layer's attention, by name without prefix, in memory and as stored."""
        prefix = self.place(layer).prefix
        wanted = [name for name in self.files if name.startswith(prefix)]
        return {name.removeprefix(prefix): value for name, value in self.read(wanted, progress).items()}

    def read(self, names: Iterable[str], progress: Progress = _ignore) -> dict[str, Tensor]:
        """These tensors, in memory. Raises CheckpointError for one that is not there or cannot be read."""
        found: dict[str, Tensor] = {}
        for file, inside in self._by_file(names).items():
            with self._open(file) as shard:
                for name in inside:
                    # A copy: reading happens here, with its progress, and not at a page fault later.
                    found[name] = self._tensor(shard, file, name).clone()
                    progress(found[name].nbytes)
        return found

    def rows(self, name: str, indices: Sequence[int]) -> Tensor:
        """Some rows of a large matrix, such as the embeddings of a few tokens."""
        (file,) = self._by_file([name])
        with self._open(file) as shard:
            matrix = self._slice(shard, file, name)
            unique = {index: matrix[index : index + 1].clone() for index in sorted(set(indices))}
        return torch.cat([unique[index] for index in indices])

    def _by_file(self, names: Iterable[str]) -> dict[str, list[str]]:
        grouped: dict[str, list[str]] = {}
        for name in names:
            if name not in self.files:
                raise CheckpointError(
                    f"{self.directory} has no tensor {name}; it has {len(self.files)} others"
                )
            grouped.setdefault(self.files[name], []).append(name)
        return grouped

    def _open(self, file: str) -> Any:
        path = self.directory / file
        if not path.is_file():
            names = [name for name, where in self.files.items() if where == file]
            raise CheckpointError(
                f"{path} is missing; {INDEX} says that it holds {names[0]} and {len(names) - 1} more"
            )
        return _safe_open(path)

    def _tensor(self, shard: Any, file: str, name: str) -> Tensor:
        try:
            return shard.get_tensor(name)
        except SafetensorError as error:
            raise self._absent(file, name) from error

    def _slice(self, shard: Any, file: str, name: str) -> Any:
        try:
            return shard.get_slice(name)
        except SafetensorError as error:
            raise self._absent(file, name) from error

    def _absent(self, file: str, name: str) -> CheckpointError:
        return CheckpointError(f"{self.directory / file} does not hold {name}, which {INDEX} says it does")


def open_checkpoint(directory: Path | str) -> Checkpoint:
    """Look at a checkpoint without reading a tensor. Raises CheckpointError when it is not one."""
    folder = Path(directory)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a directory; give one that holds config.json and *.safetensors files"
        )
    config = folder / "config.json"
    if not config.is_file():
        raise CheckpointError(f"{folder} has no config.json; it has {_contents(folder)}")
    return Checkpoint(folder, _json_object(config), _files(folder))


def _files(folder: Path) -> dict[str, str]:
    """Tensor name to file name."""
    index = folder / INDEX
    if not index.is_file():
        return _files_without_index(folder)
    files = _json_object(index).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index} has no weight_map, the object from tensor names to file names")
    for name, file in files.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index} puts {name} in {file!r}, which is not the name of a file beside it"
            )
    return files


def _files_without_index(folder: Path) -> dict[str, str]:
    files: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with _safe_open(path) as shard:
            files |= dict.fromkeys(shard.keys(), path.name)
    if not files:
        raise CheckpointError(
            f"{folder} has no tensors in *.safetensors, the only format read; it has {_contents(folder)}"
        )
    return files


def _safe_open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds {type(value).__name__}, wanted a JSON object")
    return value


def _contents(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (", ".join(names[:5]) or "nothing") + more
