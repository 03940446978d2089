"""Checkpoints are read lazily, whatever their prefix, and what is wrong with one is said with its path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mla_core.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from mla_core.checkpoint_writer import INDEX
from mla_core.errors import CheckpointError, ConfigError

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


NATIVE = {
    "deepseek": ("layers.{}.attn.", "wkv_a", "wo.scale", "o_proj.weight_scale_inv"),
    "mistral": ("layers.{}.attention.", "wkv_a_with_mqa", "wo.qscale_weight", "o_proj.weight_scale"),
    "ling": ("model.layers.{}.attention.", "kv_a_proj_with_mqa", "dense.weight", "o_proj.weight"),
}


@pytest.mark.parametrize(("prefix", "mark", "own", "wanted"), NATIVE.values(), ids=NATIVE)
def test_native_names_come_out_as_hugging_face_names(tmp_path, prefix, mark, own, wanted):
    values = {prefix.format(1) + f"{mark}.weight": torch.zeros(1), prefix.format(1) + own: torch.ones(2)}
    found = written(tmp_path, values).attention(1)
    assert found.keys() == {"kv_a_proj_with_mqa.weight", wanted}
    assert torch.equal(found[wanted], torch.ones(2))


def test_two_tensors_of_one_name_are_refused(tmp_path):
    prefix = "model.layers.0.attention."
    names = ("kv_a_proj_with_mqa.weight", "dense.weight", "o_proj.weight")
    checkpoint = written(tmp_path, {prefix + name: torch.zeros(1) for name in names})
    with pytest.raises(
        CheckpointError, match=r"has both \S+dense.weight and \S+o_proj.weight, which are o_proj"
    ):
        checkpoint.attention(0)


@pytest.fixture
def with_extra_layer(tmp_path: Path) -> Checkpoint:
    """A model of two layers, and a third one that predicts a second token."""
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2}
    write_checkpoint(tmp_path / "checkpoint", config, tensors(PREFIXES["plain"], (0, 1, 2)))
    return open_checkpoint(tmp_path / "checkpoint")


def test_layers_beyond_the_models_own_are_set_apart(with_extra_layer):
    assert (list(with_extra_layer.layers), list(with_extra_layer.extra_layers)) == ([0, 1], [2])


def test_a_layer_beyond_the_models_own_is_read_when_asked_for(with_extra_layer):
    assert float(with_extra_layer.attention(2)["o_proj.weight"][0, 0]) == 2.0


def test_layers_of_two_attentions_are_the_models_own_by_decoder_layer(tmp_path):
    values = {**tensors("model.layers.{}.self_attn.0."), **tensors("model.layers.{}.self_attn.1.")}
    write_checkpoint(tmp_path / "checkpoint", {"model_type": "longcat_flash", "num_layers": 1}, values)
    checkpoint = open_checkpoint(tmp_path / "checkpoint")
    assert (list(checkpoint.layers), list(checkpoint.extra_layers)) == ([0, 1], [2, 3])


def test_headers_tell_shape_and_type_without_values(tmp_path):
    stored = torch.zeros(2, 3, dtype=torch.float8_e4m3fn)
    header = written(tmp_path, {"a": stored}).headers(["a"])["a"]
    assert (header.device.type, tuple(header.shape), header.dtype) == ("meta", (2, 3), torch.float8_e4m3fn)


def test_a_directory_with_mistrals_own_files_is_read(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps({"dim": 8, "norm_eps": 1e-6, "kv_lora_rank": None}))
    with pytest.raises(ConfigError, match="kv_lora_rank is missing"):
        open_checkpoint(tmp_path)


def test_mistrals_own_index_is_read_where_there_is_no_other(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "consolidated-00001-of-00001.safetensors"}}
    (tmp_path / "consolidated.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).files == index["weight_map"]


def test_mistrals_own_file_beside_the_usual_ones_is_passed_over(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    save_file({"b": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert open_checkpoint(tmp_path).files == {"a": "model.safetensors"}


def test_a_tensor_in_two_files_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("model0-mp2.safetensors", "model1-mp2.safetensors"):
        save_file({"a": torch.zeros(1)}, tmp_path / name)
    assert "a is in both model0-mp2.safetensors and model1-mp2.safetensors" in refusal(tmp_path)


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
