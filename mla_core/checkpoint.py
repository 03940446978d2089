"""Checkpoints in safetensors, one file or sharded by an index, beside config.json or Mistral's params.json.

Only what is asked for is read. `attention` gives tensors their Hugging Face names, whatever the checkpoint
calls them; everywhere else names are the checkpoint's own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mla_core.checkpoint_names import AttentionPlace, find_place
from mla_core.checkpoint_writer import INDEX, Progress, write_checkpoint
from mla_core.config import MLAConfig
from mla_core.config_hf import config_file, text_part
from mla_core.config_layers import decoder_layers
from mla_core.config_native import as_hf
from mla_core.errors import CheckpointError

__all__ = ["AttentionPlace", "Checkpoint", "Progress", "open_checkpoint", "write_checkpoint"]

# Mistral's native files, which may lie beside the same weights under Hugging Face's names.
_NATIVE_INDEX, _NATIVE_FILES = "consolidated.safetensors.index.json", "consolidated"


def _ignore(_: int) -> None:
    """Progress that nobody watches."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its config and which file holds which tensor; tensors are read when asked for."""

    directory: Path
    # Under Hugging Face's keys.
    hf_config: Mapping[str, Any]
    files: Mapping[str, str]
    index: str = INDEX

    @cached_property
    def config(self) -> MLAConfig:
        """The attention's config. Raises ConfigError when the model is not MLA."""
        return MLAConfig.from_hf(self.hf_config)

    @cached_property
    def layers(self) -> Mapping[int, AttentionPlace]:
        """Layer index to attention, in order; a decoder layer with two attentions counts twice.

        Layers beyond the model's own, which predict further tokens, are `extra_layers`.
        """
        last = self._decoder_layers
        return {i: place for i, place in self._places.items() if last is None or place.layer < last}

    @cached_property
    def extra_layers(self) -> Mapping[int, AttentionPlace]:
        """Attentions of layers beyond the model's own, by the same count as `layers`."""
        return {index: place for index, place in self._places.items() if index not in self.layers}

    @cached_property
    def _decoder_layers(self) -> int | None:
        return decoder_layers(text_part(self.hf_config))

    @cached_property
    def _places(self) -> Mapping[int, AttentionPlace]:
        found = [place for name in self.files if (place := find_place(name)) is not None]
        # A model may hold more than one stack of layers, a draft's or a vision tower's; ours is the tall one.
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
        if layer not in self._places:
            has = ", ".join(map(str, self._places)) or "none"
            raise CheckpointError(
                f"{self.directory} has no MLA attention of layer {layer}; it has layers: {has}"
            )
        return self._places[layer]

    def tensor_names(self, layer: int) -> dict[str, str]:
        """Hugging Face name, without prefix, to the checkpoint's own name of every tensor of one attention.

        Raises CheckpointError when two tensors would have the same name.
        """
        place = self.place(layer)
        found: dict[str, str] = {}
        for name in self._names_by_prefix[place.prefix]:
            translated = place.naming.to_hf(name.removeprefix(place.prefix))
            if translated in found:
                raise CheckpointError(
                    f"{self.directory} has both {found[translated]} and {name}, which are {translated}"
                )
            found[translated] = name
        return found

    @cached_property
    def _names_by_prefix(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {place.prefix: [] for place in self._places.values()}
        for name in self.files:
            for prefix in _prefixes(name):
                if prefix in found:
                    found[prefix].append(name)
        return found

    def attention(self, layer: int, progress: Progress = _ignore) -> dict[str, Tensor]:
        """All tensors of one layer's attention, by Hugging Face name without prefix, as stored."""
        names = self.tensor_names(layer)
        values = self.read(names.values(), progress)
        return {translated: values[name] for translated, name in names.items()}

    def headers(self, names: Iterable[str]) -> dict[str, Tensor]:
        """These tensors as their files' headers describe them: on the device "meta", without values."""
        found: dict[str, Tensor] = {}
        for file, inside in self._by_file(names).items():
            with self._open(file) as shard:
                for name in inside:
                    header = self._slice(shard, file, name)
                    dtype = _dtype(self.directory / file, name, header.get_dtype())
                    found[name] = torch.empty(header.get_shape(), dtype=dtype, device="meta")
        return found

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
                f"{path} is missing; {self.index} says that it holds {names[0]} and {len(names) - 1} more"
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
        return CheckpointError(
            f"{self.directory / file} does not hold {name}, which {self.index} says it does"
        )


def open_checkpoint(directory: Path | str) -> Checkpoint:
    """Look at a checkpoint without reading a tensor. Raises CheckpointError when it is not one."""
    folder = Path(directory)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a directory; give one that holds config.json and *.safetensors files"
        )
    config = config_file(folder)
    if not config.is_file():
        raise CheckpointError(f"{folder} has no config.json; it has {_contents(folder)}")
    hf_config = as_hf(_json_object(config))
    return Checkpoint(folder, hf_config, *_files(folder))


def _prefixes(name: str) -> list[str]:
    """Everything that a tensor's name starts with, up to each of its dots."""
    parts = name.split(".")
    return [".".join(parts[:count]) + "." for count in range(1, len(parts))]


def _files(folder: Path) -> tuple[dict[str, str], str]:
    """Tensor name to file name, and the name of the index that says so."""
    for name in (INDEX, _NATIVE_INDEX):
        if (folder / name).is_file():
            return _indexed(folder / name), name
    return _files_without_index(folder), INDEX


def _indexed(index: Path) -> dict[str, str]:
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
    paths = sorted(folder.glob("*.safetensors"))
    # Both kinds hold the whole model.
    paths = [path for path in paths if not path.name.startswith(_NATIVE_FILES)] or paths
    files: dict[str, str] = {}
    for path in paths:
        with _safe_open(path) as shard:
            for name in shard.keys():  # noqa: SIM118 (not a mapping)
                if name in files:
                    raise CheckpointError(
                        f"{name} is in both {files[name]} and {path.name} of {folder}; parts that were split "
                        "for tensor parallelism cannot be put together, give the whole model"
                    )
                files[name] = path.name
    if not files:
        raise CheckpointError(
            f"{folder} has no tensors in *.safetensors, the only format read; it has {_contents(folder)}"
        )
    return files


# As the safetensors format spells them.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _dtype(file: Path, name: str, spelled: str) -> torch.dtype:
    if spelled not in _DTYPES:
        raise CheckpointError(f"{name} in {file} is {spelled}; known types: {', '.join(_DTYPES)}")
    return _DTYPES[spelled]


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
