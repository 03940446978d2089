"""mla run runs every phase and compares every output with the oracle; a wrong layer makes it exit with 1."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import mla_vanilla.backend
from mla_core import reference, registry
from mla_core.checkpoint import open_checkpoint, write_checkpoint
from mla_core.cli.app import app
from mla_core.config_presets import PRESETS
from mla_core.layer import MLA
from tests.unit.test_checkpoint_weights import CONFIG, broken

TINY = {
    "model_type": "deepseek_v3",
    "hidden_size": 40,
    "num_attention_heads": 3,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
}
SMALL = ("--model", "tiny", "--dtype", "float32", "--page-size", "8")


@pytest.fixture(autouse=True)
def _tiny_preset(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", TINY)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["run", *arguments], catch_exceptions=False)


def report(*arguments: str, exit_code: int = 0) -> dict[str, Any]:
    shown = run(*arguments, "--json")
    assert shown.exit_code == exit_code, shown.output
    return json.loads(shown.stdout)


class OnePercentMore(mla_vanilla.backend.Vanilla):
    """Absorbed attention that is 1 % too large."""

    def mqa(self, *arguments: Any) -> None:
        super().mqa(*arguments)
        arguments[4].mul_(1.01)


@pytest.fixture
def wrong_backend(monkeypatch):
    info = registry.info("vanilla").model_copy(
        update={"name": "wrong", "target": f"{__name__}:OnePercentMore", "distribution": None}
    )
    found = registry.Registry()
    found.add(info)
    monkeypatch.setattr(registry, "_default", found)
    monkeypatch.setattr(found.backends, "load", lambda name: OnePercentMore)


def test_a_preset_is_written_read_back_run_and_verified():
    found = report(*SMALL)
    assert (found["verified"], found["model"], found["layers"]) == (True, "tiny", [0])
    assert 0 < found["error"] < found["tolerance"] == 1e-4


def test_the_default_scenario_runs_every_phase_and_mixes_them():
    steps = report(*SMALL)["steps"]
    assert [step["name"] for step in steps] == ["prefill", "chunk", *["decode"] * 4, "mixed"]
    assert {each["phase"] for each in steps[-1]["requests"]} == {"prefill", "chunk", "decode", "verify"}


def test_every_request_of_every_step_has_an_error_of_its_own():
    errors = [each["error"] for step in report(*SMALL)["steps"] for each in step["requests"]]
    assert len(errors) == 11
    assert all(0 < error < 1e-4 for error in errors)


def test_the_default_workspace_is_smaller_than_the_first_context():
    found = report(*SMALL)
    assert found["plan"]["workspace_tokens"] < found["steps"][1]["requests"][0]["context"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dtype", "bfloat16"),
        ("--dtype", "float16"),
        ("--cache", "bf16"),
        ("--prefill-form", "absorb"),
        ("--page-size", "1"),
        ("--workspace-tokens", "5"),
        ("--seed", "7"),
        ("--layers", "1,3"),
    ],
    ids=" ".join,
)
def test_every_option_runs_verified(arguments):
    assert report(*SMALL, *arguments)["verified"] is True


def test_the_cache_stores_what_was_asked():
    assert [report(*SMALL, "--cache", cache)["cache_bytes_per_token"] for cache in ("auto", "bf16")] == [
        80,
        40,
    ]


def test_layers_share_a_step_and_each_is_judged_by_its_own_weights():
    found = report(*SMALL, "--layers", "0-2")
    assert (found["layers"], found["verified"], found["cache_bytes_per_token"]) == ([0, 1, 2], True, 240)


def test_requests_with_long_contexts_run_over_rows_put_into_the_cache():
    found = report(*SMALL, "--requests", "prefill:30,chunk:9+200,decode:1+3000x2,verify:3+100")
    assert found["verified"] is True
    assert [(each["tokens"], each["context"]) for each in found["steps"][0]["requests"]] == [
        (30, 0),
        (9, 200),
        (1, 3000),
        (1, 3000),
        (3, 100),
    ]


def test_the_same_seed_gives_the_same_errors():
    first, second, other = (report(*SMALL, "--seed", seed)["error"] for seed in ("1", "1", "2"))
    assert first == second != other


def test_a_wrong_kernel_makes_it_exit_with_1(wrong_backend):
    found = report(*SMALL, "--backend", "wrong", exit_code=1)
    assert found["verified"] is False
    assert [step["error"] < 1e-4 for step in found["steps"]] == [True, True, *[False] * 5]


def test_a_wrong_kernel_is_not_noticed_without_verification(wrong_backend):
    found = report(*SMALL, "--backend", "wrong", "--no-verify")
    assert (found["verified"], found["error"]) == (None, None)


def test_the_verdict_on_a_wrong_kernel_says_by_how_much(wrong_backend):
    shown = run(*SMALL, "--backend", "wrong")
    assert shown.exit_code == 1
    assert "FAILED: outputs differ from the float64 oracle: largest relative error 1.0" in shown.stdout


def test_a_layer_that_differs_from_the_oracle_by_its_softmax_scale_is_noticed(monkeypatch):
    honest = reference.cached_layer

    def other_scale(config, *arguments, **options):
        scale = 1.01 * config.softmax_scale
        return honest(config.model_copy(update={"softmax_scale_override": scale}), *arguments, **options)

    monkeypatch.setattr(reference, "cached_layer", other_scale)
    assert report(*SMALL, exit_code=1)["verified"] is False


def test_a_kernel_that_reads_memory_nobody_wrote_is_noticed(monkeypatch):
    honest = mla_vanilla.backend._gather

    def careless(group, *arguments):
        return honest(replace(group, unowned=None), *arguments)

    monkeypatch.setattr(mla_vanilla.backend, "_gather", careless)
    found = report(*SMALL, exit_code=1)
    assert (found["verified"], found["error"]) == (False, None)


def test_the_text_shows_plan_phases_timing_and_verdict():
    text = run(*SMALL).stdout
    for part in (
        "model    deepseek_v3, 40 hidden, 3 heads, layers 0 in float32",
        "cache    fp32, 80 bytes a token and layer",
        "backend 'auto' (auto) on cpu",
        "  mqa     vanilla",
        "inputs   random hidden states, seed 0",
        "STEP       REQUEST",
        "decode x4",
        "chunk 24+148",
        "check    every output agrees with the float64 oracle",
    ):
        assert part in text, text


def test_quiet_means_no_progress_bar_outside_a_terminal():
    assert run(*SMALL).stderr == ""


def test_a_written_checkpoint_is_kept_and_runs_again(tmp_path):
    folder = tmp_path / "kept"
    written = report(*SMALL, "--layers", "0,2", "--write", str(folder))
    again = report(str(folder), "--dtype", "float32", "--page-size", "8", "--layers", "0,2")
    assert list(open_checkpoint(folder).layers) == [0, 2]
    assert again["error"] == written["error"]


def test_an_existing_directory_is_not_written_to(tmp_path):
    (tmp_path / "precious").write_text("mine")
    shown = run(*SMALL, "--write", str(tmp_path))
    assert shown.exit_code == 2
    assert "is not empty; name a new directory" in shown.stderr


def test_a_checkpoint_runs_its_first_attention_layer_by_default(tmp_path):
    run(*SMALL, "--layers", "2-3", "--write", str(tmp_path / "x"))
    assert report("--checkpoint", str(tmp_path / "x"), "--dtype", "float32")["layers"] == [2]


def test_a_checkpoint_with_wrong_shapes_is_refused(tmp_path):
    run(*SMALL, "--write", str(tmp_path / "x"))
    config = tmp_path / "x/config.json"
    config.write_text(config.read_text().replace('"v_head_dim": 6', '"v_head_dim": 8'))
    shown = run(str(tmp_path / "x"), "--dtype", "float32")
    assert shown.exit_code == 2
    assert "kv_b_proj.weight has shape [48, 16], expected [54, 16]" in shown.stderr


def test_what_is_wrong_with_several_layers_is_said_at_once_and_by_the_checkpoints_names(tmp_path):
    write_checkpoint(tmp_path / "checkpoint", CONFIG, broken("model.layers.{}.attention.", "dense"))
    shown = run(str(tmp_path / "checkpoint"), "--layers", "0-1")
    assert shown.exit_code == 2
    assert shown.stderr.splitlines()[1:] == [
        "  model.layers.0.attention.dense.weight is missing, expected [64, 32]",
        "  model.layers.1.attention.k_proj.weight [5] is unexpected",
        "  model.layers.1.attention.kv_b_proj.weight has shape [3, 4], expected [64, 32]",
    ]


def test_a_quantised_checkpoint_is_judged_by_what_its_tensors_stand_for(tmp_path):
    weights = open_checkpoint(_kept(tmp_path)).read(open_checkpoint(tmp_path / "dense").names())
    name = "model.layers.0.self_attn.o_proj.weight"
    weights[name] = (weights[name] * 100).to(torch.float8_e4m3fn)
    weights[f"{name}_scale_inv"] = torch.full((1, 1), 0.01)
    write_checkpoint(tmp_path / "fp8", TINY, weights)
    assert report(str(tmp_path / "fp8"), "--dtype", "float32")["verified"] is True


def _kept(folder: Path) -> Path:
    run(*SMALL, "--no-verify", "--write", str(folder / "dense"))
    return folder / "dense"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name one model, a preset or a path, got none"),
        (("tiny", "--model", "tiny"), "name one model, a preset or a path, got tiny and tiny"),
        (("--model", "tiny", "--layers", "4"), "there is no MLA layer 4; layers: 0, 1, 2, 3"),
        (("--model", "tiny", "--layers", "0,0"), "layers '0,0' must name at least one layer, and none twice"),
        (("--model", "tiny", "--layers", "x"), "not layers: 'x'; write 0 or 0,1 or 0-3"),
        (("--model", "tiny", "--cache", "fp5"), "unknown cache layout 'fp5'"),
        (("--model", "tiny", "--backend", "nobody"), "unknown backend 'nobody'"),
        (("--model", "tiny", "--device", "cuda:99"), "device 'cuda:99' is not here"),
        (("--model", "tiny", "--device", "warp"), "not a device: 'warp'"),
        (("--model", "tiny", "--device", "meta"), "device 'meta' is not supported"),
        (("--model", "tiny", "--requests", "decode:5+5"), "request 'decode:5+5': decode adds one token"),
        (("--model", "tiny", "--text", "nowhere.txt"), "tokenizer.json does not exist"),
        (("--checkpoint", "nowhere"), "nowhere is not a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_run_is_refused_with_the_reason(arguments, message):
    shown = run(*arguments)
    assert shown.exit_code == 2
    assert message in shown.stderr


def test_nothing_is_loaded_before_the_plan_is_made(monkeypatch):
    monkeypatch.setattr(MLA, "load_hf", lambda *_: pytest.fail("weights were loaded"))
    assert run(*SMALL, "--cache", "idx_fp8").exit_code == 2


def test_threads_are_torchs_own():
    before = torch.get_num_threads()
    try:
        report(*SMALL, "--threads", "1")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
