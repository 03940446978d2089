"""What is written is a checkpoint in shards that others can read."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from mla_core.checkpoint import open_checkpoint
from mla_core.checkpoint_writer import INDEX, write_checkpoint
from mla_core.errors import CheckpointError

TENSORS = {name: torch.full((4,), float(value)) for value, name in enumerate("abc")}


def test_small_checkpoints_are_one_file_without_index(tmp_path):
    write_checkpoint(tmp_path, {"model_type": "x"}, TENSORS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_large_checkpoints_are_shards_with_an_index(tmp_path):
    write_checkpoint(tmp_path, {}, TENSORS, max_shard_bytes=32)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index == {
        "metadata": {"total_size": 48},
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00001-of-00002.safetensors",
            "c": "model-00002-of-00002.safetensors",
        },
    }


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path):
    write_checkpoint(tmp_path, {}, TENSORS, max_shard_bytes=1)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_what_is_written_is_read_back_unchanged(tmp_path):
    write_checkpoint(tmp_path, {}, TENSORS, max_shard_bytes=32)
    found = open_checkpoint(tmp_path).read("abc")
    assert {name: value.tolist() for name, value in found.items()} == {
        name: value.tolist() for name, value in TENSORS.items()
    }


def test_views_are_written_as_their_values(tmp_path):
    write_checkpoint(tmp_path, {}, {"view": torch.arange(6.0).reshape(2, 3).T})
    assert load_file(tmp_path / "model.safetensors")["view"].tolist() == [[0, 3], [1, 4], [2, 5]]


def test_the_config_is_written_as_given(tmp_path):
    write_checkpoint(tmp_path, {"model_type": "deepseek_v3", "rope_scaling": None}, TENSORS)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "model_type": "deepseek_v3",
        "rope_scaling": None,
    }


def test_progress_counts_the_bytes_written(tmp_path):
    seen: list[int] = []
    write_checkpoint(tmp_path, {}, TENSORS, max_shard_bytes=32, progress=seen.append)
    assert seen == [32, 16]


def test_a_directory_that_holds_something_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty; name a new directory"):
        write_checkpoint(tmp_path, {}, TENSORS)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_path_that_cannot_be_a_directory_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="the checkpoint cannot be written to"):
        write_checkpoint(tmp_path / "file", {}, TENSORS)
