"""Writes Hugging Face style checkpoints: config.json, and safetensors files in shards with an index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from mla_core.errors import CheckpointError

__all__ = ["INDEX", "Progress", "write_checkpoint"]

# Called with the bytes of each tensor or file once it has been read or written.
Progress = Callable[[int], None]

INDEX = "model.safetensors.index.json"

_SHARD_BYTES = 4 << 30


def write_checkpoint(
    directory: Path | str,
    hf_config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    max_shard_bytes: int = _SHARD_BYTES,
    progress: Progress | None = None,
) -> None:
    """Write into a new or empty directory. A tensor larger than `max_shard_bytes` gets a file of its own.

    Raises CheckpointError when the directory holds something already or cannot be written.
    """
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CheckpointError(f"{folder} is not empty; name a new directory to write a checkpoint to")
        _write(folder, hf_config, _shards(tensors, max_shard_bytes), progress)
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written to {folder}: {error}") from error


def _write(
    folder: Path, hf_config: Mapping[str, Any], shards: list[dict[str, Tensor]], progress: Progress | None
) -> None:
    (folder / "config.json").write_text(json.dumps(dict(hf_config), indent=2) + "\n", encoding="utf-8")
    files: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = f"model-{number:05}-of-{len(shards):05}.safetensors"
        file = several if len(shards) > 1 else "model.safetensors"
        dense = {name: value.contiguous() for name, value in shard.items()}
        save_file(dense, folder / file, {"format": "pt"})
        files |= dict.fromkeys(shard, file)
        if progress is not None:
            progress(_bytes(shard))
    # Last, so that a checkpoint that broke off is not taken for a whole one.
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(map(_bytes, shards))}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors in their order, cut where the next one would not fit."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, value in tensors.items():
        if shards[-1] and _bytes(shards[-1]) + value.nbytes > max_bytes:
            shards.append({})
        shards[-1][name] = value
    return shards


def _bytes(shard: Mapping[str, Tensor]) -> int:
    return sum(value.nbytes for value in shard.values())
