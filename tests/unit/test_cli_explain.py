"""mla explain decides for devices and layouts that are not here, and says why the others would not do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mla_core import registry
from mla_core.cli.app import app
from mla_core.plan import Plan
from tests.unit import fakes

TINY = Path(__file__).resolve().parents[2] / "tests/data/tiny_mla_kjv"
HOPPER = fakes.backend(
    "hopper",
    priority=5,
    devices={"sm_90"},
    dtypes={"bfloat16"},
    layouts={"nvfp4": [64]},
    query_len={"single", "varlen"},
    max_query_len=4,
)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch):
    """A backend for a GPU that this machine need not have; its kernels exist nowhere."""
    monkeypatch.setattr(registry, "_default", fakes.registry(HOPPER, fakes.backend("slow")))


def explain(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments])


def answer(*arguments: str) -> dict:
    shown = explain(*arguments, "--json")
    return json.loads(shown.stdout) | {"exit_code": shown.exit_code}


def reasons(found: dict, backend: str) -> list[str]:
    rows = [row for row in found["rejected"] if row["backend"] == backend]
    return sorted({reason["field"] for row in rows for reason in row["reasons"]})


def test_a_device_that_is_not_here_gets_its_plan():
    found = answer(
        "deepseek-v3", "--device", "cuda:sm_90a", "--cache", "nvfp4", "--max-decode-query-len", "4"
    )
    assert (found["exit_code"], found["fits"]) == (0, True)
    assert (found["choices"]["mha"], found["choices"]["mqa"]) == ("hopper", "hopper")


def test_the_losers_of_a_plan_have_reasons():
    found = answer("deepseek-v3", "--device", "cuda:sm_90a", "--cache", "nvfp4")
    assert reasons(found, "slow") == ["device", "dtype", "layout"]


def test_the_json_of_a_plan_is_the_plan():
    found = answer("deepseek-v3", "--device", "cuda:sm_90a", "--cache", "nvfp4")
    del found["exit_code"], found["fits"]
    assert Plan.model_validate(found).choices["mqa"] == "hopper"


def test_a_plan_reads_as_request_and_choices():
    text = explain("deepseek-v3", "--device", "cuda:sm_90a", "--cache", "nvfp4", "--tp", "8").stdout
    assert text.startswith(
        "layer    dtype bfloat16, layout nvfp4, heads 16, latent 512, nope 128, rope 64, value 128"
    )
    assert "\n  mqa     hopper\n" in text


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--cache", "bf16"], "layout"),
        (["--cache", "nvfp4", "--page-size", "32"], "page_size"),
        (["--cache", "nvfp4", "--max-decode-query-len", "5"], "max_query_len"),
        (["--cache", "nvfp4", "--dtype", "float16"], "dtype"),
        (["--cache", "nvfp4", "--prefill-form", "absorb"], "kernel"),
    ],
    ids=["cache", "page-size", "max-decode-query-len", "dtype", "prefill-form"],
)
def test_each_option_is_part_of_the_question(arguments, field):
    found = answer("deepseek-v3", "--device", "cuda:sm_90", *arguments)
    assert (found["exit_code"], found["fits"]) == (2, False)
    assert field in reasons(found, "hopper")


def test_when_nothing_fits_the_message_has_every_candidate():
    shown = explain("deepseek-v3", "--device", "cuda:sm_80")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "hopper  mqa_decode   device: wanted cuda:sm_80, offered sm_90" in shown.stderr
    assert "slow    mqa_decode   device: wanted cuda:sm_80, offered cpu" in shown.stderr


def test_a_named_backend_is_refused_and_not_replaced():
    found = answer("deepseek-v3", "--backend", "hopper", "--dtype", "float32")
    assert (found["fits"], found["works"]) == (False, "backend='slow'")


def test_a_config_file_can_be_asked_about():
    found = answer("--config", str(TINY / "config.json"), "--dtype", "float32")
    assert (found["request"]["heads"], found["choices"]["mqa"]) == (4, "slow")


def test_a_directory_can_be_asked_about_by_position():
    assert answer(str(TINY), "--dtype", "float32")["request"]["heads"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name one model, a preset or a path, got none"),
        (
            ["deepseek-v3", "--model", "glm-5"],
            "name one model, a preset or a path, got deepseek-v3 and glm-5",
        ),
        (["deepsek"], "'deepsek' is neither a path nor a preset; did you mean"),
        (["deepseek-v3", "--device", "tpu"], "not a device to plan for: 'tpu'"),
        (["deepseek-v3", "--tp", "3"], "128 heads cannot be split over tp_size=3 ranks"),
        (["deepseek-v3", "--backend", "hopper|"], "backend: expected a backend name"),
    ],
    ids=["nothing", "two", "typo", "device", "tp", "spec"],
)
def test_a_question_that_makes_no_sense_is_refused(arguments, message):
    shown = explain(*arguments)
    assert shown.exit_code == 2
    assert f"error: {message}" in shown.stderr
