"""The judge of mla run agrees with the oracle over whole requests, in pieces and from any start."""

from __future__ import annotations

import math

import pytest
import torch

from mla_core import reference
from mla_core.cache import layout_for
from mla_core.cli import verify
from mla_core.cli.scenario import Request, Scenario, Step, Work
from mla_core.cli.verify import Judge, relative_error, tolerance
from tests.support import random_hidden, random_weights, tiny_config

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)
HIDDEN = {"main": random_hidden(11, CONFIG, 0), "copy": random_hidden(2, CONFIG, 1)}
SCENARIO = Scenario(
    (Request("main"), Request("copy", parent="main")),
    (
        Step("prefill", (Work("main", "prefill", 7, 0),)),
        Step("mixed", (Work("copy", "verify", 2, 7), Work("main", "chunk", 4, 7))),
    ),
)


def judge(**changes) -> Judge:
    arguments = {"weights": WEIGHTS, "scenario": SCENARIO, "hidden": HIDDEN, "filled": {}, "reader": None}
    return Judge.of(CONFIG, progress=lambda _: None, **{**arguments, **changes})


def exact(*parts: torch.Tensor) -> torch.Tensor:
    return reference.attention_layer(CONFIG, WEIGHTS, torch.cat(parts)).hidden_SD


@pytest.mark.parametrize("scores", [1 << 25, 40], ids=["whole", "pieces"])
def test_a_request_is_judged_by_the_oracle_over_its_whole_sequence(monkeypatch, scores):
    monkeypatch.setattr(verify, "_MAX_SCORES", scores)
    work = SCENARIO.steps[1].work[1]
    assert judge().error(work, exact(HIDDEN["main"])[7:]) < 1e-12


def test_a_copy_continues_its_parents_rows():
    work = SCENARIO.steps[1].work[0]
    right = exact(HIDDEN["main"][:7], HIDDEN["copy"])[7:]
    assert judge().error(work, right) < 1e-12
    assert judge().error(work, exact(HIDDEN["main"])[7:9]) > 0.1


def test_a_request_that_starts_with_cached_rows_sees_them():
    rows = reference.attention_layer(CONFIG, WEIGHTS, HIDDEN["main"][:7])
    work = Work("main", "chunk", 4, 7)
    scenario = Scenario((Request("main", cached=7),), (Step("chunk", (work,)),))
    hidden = {"main": HIDDEN["main"][7:]}
    found = judge(scenario=scenario, hidden=hidden, filled={"main": (rows.latent_SL, rows.k_rope_SR)})
    assert found.error(work, exact(HIDDEN["main"])[7:]) < 1e-12
    other = judge(scenario=scenario, hidden=hidden, filled={"main": (rows.latent_SL + 1, rows.k_rope_SR)})
    assert other.error(work, exact(HIDDEN["main"])[7:]) > 1e-3


def test_a_reader_replaces_the_rows_of_earlier_steps():
    asked = []

    def reader(request: str, length: int):
        asked.append((request, length))
        return torch.zeros(length, CONFIG.kv_lora_rank), torch.zeros(length, CONFIG.qk_rope_head_dim)

    work = SCENARIO.steps[1].work[1]
    assert judge(reader=reader).error(work, exact(HIDDEN["main"])[7:]) > 1e-3
    assert asked == [("main", 7), ("copy", 7)]


def test_progress_counts_every_token_once():
    seen = []
    Judge.of(CONFIG, WEIGHTS, SCENARIO, HIDDEN, {}, None, seen.append)
    assert sum(seen) == 13


def test_the_error_is_that_of_the_worst_token():
    right = torch.ones(2, 4, dtype=torch.float64)
    assert relative_error(torch.tensor([[1.0] * 4, [1.1] * 4]), right) == pytest.approx(0.1, rel=1e-5)


def test_not_a_number_is_an_infinite_error():
    right = torch.ones(2, 4, dtype=torch.float64)
    assert relative_error(torch.full((2, 4), math.nan), right) == math.inf


@pytest.mark.parametrize(
    ("dtype", "cache", "allowed"),
    [
        (torch.float32, "fp32", 1e-4),
        (torch.float32, "bf16", 1e-2),
        (torch.bfloat16, "auto", 1e-2),
        (torch.float16, "auto", 1e-2),
        (torch.bfloat16, "fp32", 1e-2),
    ],
)
def test_the_tolerance_follows_the_coarser_of_dtype_and_cache(dtype, cache, allowed):
    assert tolerance(dtype, layout_for(cache, dtype, 512, 64)) == allowed


def test_a_coarser_quantised_cache_is_allowed_more():
    layouts = [layout_for(name, torch.bfloat16, 512, 64) for name in ("fp8_e4m3", "nvfp4")]
    fp8, nvfp4 = (tolerance(torch.bfloat16, layout) for layout in layouts)
    assert 0.01 < fp8 < 0.1 < nvfp4 < 0.3
