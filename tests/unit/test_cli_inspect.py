"""mla inspect tells what a checkpoint's attention is, who could serve it, and what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from mla_core import registry
from mla_core.checkpoint import write_checkpoint
from mla_core.cli.app import app
from mla_core.cli.inspect_report import ranges
from tests.unit import fakes
from tests.unit.test_checkpoint_weights import CONFIG, PREFIX, broken, dense

TINY = Path(__file__).resolve().parents[2] / "tests/data/tiny_mla_kjv"
HOPPER = fakes.backend(
    "hopper",
    priority=5,
    devices={"sm_90"},
    dtypes={"bfloat16"},
    layouts={"nvfp4": [64], "bf16": [64]},
    query_len={"single", "varlen"},
)


@pytest.fixture(autouse=True)
def _backends(monkeypatch):
    """A backend for a GPU that this machine need not have, and one for CPUs that computes in float32."""
    monkeypatch.setattr(registry, "_default", fakes.registry(HOPPER, fakes.backend("slow")))


def inspect(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["inspect", *arguments])


def found(*arguments: str) -> dict:
    shown = inspect(*arguments, "--json")
    return json.loads(shown.stdout) | {"exit_code": shown.exit_code}


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor], **config) -> str:
    write_checkpoint(folder / "checkpoint", CONFIG | config, tensors)
    return str(folder / "checkpoint")


def cache(report: dict, layout: str) -> dict:
    return next(row for row in report["caches"] if row["layout"] == layout)


def test_it_prints_family_dims_rope_scale_and_formats():
    shown = inspect(str(TINY))
    assert shown.exit_code == 0
    for line in (
        "  model    deepseek_v3",
        "  layers   3 with MLA: 0-2, names of hugging face under model.layers.0.self_attn.*",
        "  dims     192 hidden, 4 heads, query rank 96, latent 512, nope 128, rope 64, value 128",
        "  softmax  scale 0.093565168",
        "    0-2    bfloat16: q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj",
    ):
        assert line in shown.stdout.splitlines()


def test_the_cache_table_has_bytes_a_layer_and_of_all_layers():
    lines = inspect(str(TINY), "--device", "cpu").stdout.splitlines()
    rows = [line.split() for line in lines if line.startswith(("  bf16 ", "  fp8_ds_mla "))]
    assert [row[:3] for row in rows] == [["bf16", "1152", "3456"], ["fp8_ds_mla", "656", "1968"]]


def test_a_layout_that_cannot_hold_the_rows_says_why(tmp_path):
    row = cache(found(checkpoint(tmp_path, dense())), "fp8_ds_mla")
    assert row["bytes"] is None
    assert "holds 512 latent and 64 rope values" in row["refusal"]


def test_backends_are_asked_for_the_named_device_and_layout():
    report = found(str(TINY), "--device", "cuda:sm_90a", "--cache", "nvfp4")
    serving = {(row["backend"], row["kernel"]) for row in report["backends"] if row["serves"]}
    assert serving == {("hopper", "mha_prefill"), ("hopper", "mqa_decode")}


def test_a_backend_that_would_not_serve_gives_its_reasons():
    report = found(str(TINY), "--device", "cpu")
    (row,) = [r for r in report["backends"] if (r["backend"], r["kernel"]) == ("hopper", "mqa_decode")]
    assert not row["serves"]
    assert "device: wanted cpu, offered sm_90" in row["reasons"]


def test_a_layout_names_those_who_serve_prefill_and_decode_over_it():
    report = found(str(TINY), "--device", "cuda:sm_90a")
    assert cache(report, "nvfp4")["backends"] == ["hopper"]
    assert cache(report, "fp8_ds_mla")["backends"] == []


@pytest.mark.parametrize(
    ("config", "arguments", "expected"),
    [
        ({}, [], "bfloat16"),
        ({"torch_dtype": "float16"}, [], "float16"),
        ({"dtype": "float32"}, [], "float32"),
        ({"dtype": "float8_e4m3fn"}, [], "bfloat16"),
        ({"dtype": "float32"}, ["--dtype", "float16"], "float16"),
    ],
    ids=["nothing said", "old key", "new key", "no type to compute in", "asked for"],
)
def test_a_layer_computes_in_what_the_checkpoint_says(tmp_path, config, arguments, expected):
    assert found(checkpoint(tmp_path, dense(), **config), *arguments)["dtype"] == expected


def test_layers_that_store_their_weights_otherwise_have_a_line_of_their_own(tmp_path):
    tensors = dense()
    name = PREFIX.format(1) + "o_proj.weight"
    tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": torch.ones(())}
    lines = inspect(checkpoint(tmp_path, tensors)).stdout.splitlines()
    assert any(line.split() and line.split()[0] == "0" and "fp8" not in line for line in lines)
    assert any(line.startswith("    1 ") and line.endswith("; fp8, one scale: o_proj") for line in lines)


def test_layers_beyond_the_models_own_are_named(tmp_path):
    report = found(checkpoint(tmp_path, dense(), num_hidden_layers=1))
    assert (report["layers"], report["extra_layers"], report["exit_code"]) == ([0], [1], 0)


def test_an_indexer_is_told_with_its_cache_bytes(tmp_path):
    indexer = {"index_n_heads": 4, "index_head_dim": 128, "index_topk": 64}
    shown = inspect(checkpoint(tmp_path, dense(), model_type="deepseek_v32", **indexer))
    assert (
        "indexer of 4 x 128, top 64, in all layers; a key takes 132 bytes a token in idx_fp8" in shown.stdout
    )


def test_all_problems_are_listed_with_exit_code_1(tmp_path):
    shown = inspect(checkpoint(tmp_path, broken()))
    assert shown.exit_code == 1
    assert shown.stdout.splitlines()[-4:] == [
        "3 problems",
        "  model.layers.0.self_attn.o_proj.weight is missing, expected [64, 32]",
        "  model.layers.1.self_attn.k_proj.weight [5] is unexpected",
        "  model.layers.1.self_attn.kv_b_proj.weight has shape [3, 4], expected [64, 32]",
    ]


def test_a_layer_that_the_checkpoint_lacks_is_a_problem(tmp_path):
    report = found(checkpoint(tmp_path, dense(), num_hidden_layers=4))
    assert report["problems"] == ["the config has MLA layers that the checkpoint lacks: 2, 3"]


def test_a_checkpoint_without_mla_is_a_problem(tmp_path):
    report = found(checkpoint(tmp_path, {"model.embed_tokens.weight": torch.zeros(2, 2)}))
    assert report["problems"] == [f"no tensor of {tmp_path / 'checkpoint'} belongs to an MLA attention"]


def test_a_shard_that_is_missing_is_a_problem_and_the_rest_is_shown(tmp_path):
    path = tmp_path / "checkpoint"
    write_checkpoint(path, CONFIG, dense(), max_shard_bytes=10000)
    last = max(path.glob("*.safetensors"))
    last.unlink()
    report = found(str(path))
    assert (report["layers"], report["exit_code"]) == ([0, 1], 1)
    assert f"{last} is missing" in report["problems"][0]


def test_a_model_that_is_refused_is_refused_by_name(tmp_path):
    shown = inspect(checkpoint(tmp_path, dense(), sliding_window=512))
    assert shown.exit_code == 2
    assert "sliding_window=512 is not supported" in shown.stderr


@pytest.mark.parametrize(
    ("numbers", "text"), [([0, 1, 2, 5], "0-2, 5"), ([3], "3"), ([], ""), ([5, 4], "4-5")], ids=str
)
def test_ranges_are_written_short(numbers, text):
    assert ranges(numbers) == text
