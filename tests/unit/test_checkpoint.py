"""Checkpoints are read lazily, whatever their prefix, and what is wrong with one is said with its path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mla_core.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from mla_core.checkpoint_writer import INDEX
from mla_core.errors import CheckpointError

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests/data/tiny_mla_kjv"
PREFIXES = {
    "plain": "model.layers.{}.self_attn.",
    "multimodal": "language_model.model.layers.{}.self_attn.",
    "nested": "model.language_model.layers.{}.self_attn.",
    "bare": "layers.{}.attention.",
}


def tensors(prefix: str, layers: tuple[int, ...] = (0, 1)) -> dict[str, torch.Tensor]:
    """Two small tensors a layer; their values tell the layers apart."""
    names = ("kv_a_proj_with_mqa.weight", "o_proj.weight")
    return {prefix.format(i) + name: torch.full((2, 3), float(i)) for i in layers for name in names}


def written(folder: Path, values: dict[str, torch.Tensor], **options: int) -> Checkpoint:
    write_checkpoint(folder / "checkpoint", {"model_type": "deepseek_v3"}, values, **options)
    return open_checkpoint(folder / "checkpoint")


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


@pytest.fixture
def sharded(tmp_path: Path) -> Checkpoint:
    """Four tensors in two files."""
    return written(tmp_path, tensors(PREFIXES["plain"]), max_shard_bytes=48)


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_an_attention_is_found_under_any_prefix(tmp_path, prefix):
    found = written(tmp_path, tensors(prefix)).attention(1)
    assert sorted(found) == ["kv_a_proj_with_mqa.weight", "o_proj.weight"]
    assert float(found["o_proj.weight"][0, 0]) == 1.0


def test_two_attentions_of_one_decoder_layer_count_as_two_layers(tmp_path):
    values = {**tensors("model.layers.{}.self_attn.0."), **tensors("model.layers.{}.self_attn.1.")}
    checkpoint = written(tmp_path, values)
    assert [place.prefix for place in checkpoint.layers.values()] == [
        "model.layers.0.self_attn.0.",
        "model.layers.0.self_attn.1.",
        "model.layers.1.self_attn.0.",
        "model.layers.1.self_attn.1.",
    ]


def test_the_norm_in_front_of_a_second_attention_has_its_number(tmp_path):
    checkpoint = written(
        tmp_path, tensors("model.layers.{}.self_attn.1.") | tensors("model.layers.{}.self_attn.0.")
    )
    assert checkpoint.place(3).input_norm == "model.layers.1.input_layernorm.1.weight"


def test_a_second_stack_of_fewer_layers_is_passed_over(tmp_path):
    checkpoint = written(
        tmp_path, tensors("model.layers.{}.self_attn.") | tensors("draft.layers.{}.self_attn.", (0,))
    )
    assert checkpoint.place(0).stem == "model."


def test_layers_without_mla_are_left_out(tmp_path):
    values = tensors(PREFIXES["plain"], (3,)) | {"model.layers.0.self_attn.q_proj.weight": torch.zeros(1)}
    assert list(written(tmp_path, values).layers) == [3]


def test_a_layer_that_is_not_there_is_refused_with_the_ones_that_are(sharded):
    with pytest.raises(CheckpointError, match="no MLA attention of layer 5; it has layers: 0, 1"):
        sharded.attention(5)


def test_only_the_shards_of_the_asked_layer_are_opened(sharded):
    (sharded.directory / "model-00002-of-00002.safetensors").write_bytes(b"not safetensors")
    assert float(sharded.attention(0)["o_proj.weight"].sum()) == 0.0


def test_a_shard_that_cannot_be_read_is_named(sharded):
    (sharded.directory / "model-00002-of-00002.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002.safetensors cannot be read as safetensors"
    ):
        sharded.attention(1)


def test_a_shard_that_is_missing_is_named_with_what_it_should_hold(sharded):
    (sharded.directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        sharded.attention(1)
    assert "model-00002-of-00002.safetensors is missing" in str(caught.value)
    assert f"{INDEX} says that it holds model.layers.1.self_attn.kv_a_proj_with_mqa.weight" in str(
        caught.value
    )


def test_a_tensor_that_its_shard_lacks_is_named(sharded):
    save_file({"other": torch.zeros(1)}, sharded.directory / "model-00002-of-00002.safetensors")
    with pytest.raises(
        CheckpointError, match=r"does not hold model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
    ):
        sharded.attention(1)


def test_shapes_come_from_headers_of_all_shards(sharded):
    assert sharded.shapes() == dict.fromkeys(sharded.names(), (2, 3))
    assert len(sharded.names()) == 4


def test_rows_of_a_matrix_come_in_the_asked_order(tmp_path):
    matrix = torch.arange(12.0).reshape(4, 3)
    checkpoint = written(tmp_path, {"model.embed_tokens.weight": matrix})
    assert torch.equal(checkpoint.rows("model.embed_tokens.weight", [2, 0, 2]), matrix[[2, 0, 2]])


def test_an_unknown_tensor_is_refused(sharded):
    with pytest.raises(CheckpointError, match="has no tensor nothing; it has 4 others"):
        sharded.read(["nothing"])


def test_progress_counts_the_bytes_read(sharded):
    seen: list[int] = []
    sharded.attention(0, seen.append)
    assert seen == [24, 24]


def test_what_was_read_does_not_depend_on_the_file_any_more(sharded):
    found = sharded.attention(1)
    for path in sharded.directory.glob("*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    assert float(found["o_proj.weight"][0, 0]) == 1.0


def test_the_trained_checkpoint_opens_with_its_config():
    checkpoint = open_checkpoint(TINY)
    assert (list(checkpoint.layers), checkpoint.config.num_heads) == ([0, 1, 2], 4)


def test_a_checkpoint_without_index_is_read_from_all_its_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "two.safetensors")
    assert open_checkpoint(tmp_path).files == {"a": "one.safetensors", "b": "two.safetensors"}


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    assert refusal(tmp_path / "nowhere") == (
        f"{tmp_path / 'nowhere'} is not a directory; give one that holds config.json and *.safetensors files"
    )


def test_a_directory_without_config_is_refused_with_its_contents(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    assert refusal(tmp_path) == f"{tmp_path} has no config.json; it has weights.bin"


def test_a_directory_without_safetensors_is_refused_with_its_contents(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path) == (
        f"{tmp_path} has no tensors in *.safetensors, the only format read; it has config.json"
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "cannot be read as JSON"), ("[]", "holds list, wanted a JSON object")],
    ids=["broken", "list"],
)
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text, problem):
    (tmp_path / "config.json").write_text(text)
    assert problem in refusal(tmp_path)


@pytest.mark.parametrize(
    ("index", "problem"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {"a": "../elsewhere.safetensors"}}, "puts a in '../elsewhere.safetensors'"),
        ({"weight_map": {"a": 3}}, "puts a in 3"),
    ],
    ids=["empty", "outside", "number"],
)
def test_an_index_that_makes_no_sense_is_refused(tmp_path, index, problem):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert problem in refusal(tmp_path)
