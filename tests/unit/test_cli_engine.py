"""The engine of mla run: shuffled pages, shared prefixes, and NaN wherever no token was written."""

from __future__ import annotations

import pytest
import torch

from mla_core.cli.engine import Engine
from mla_core.cli.scenario import default_scenario, parse_requests
from mla_core.errors import UnsupportedError
from tests.support import build, random_hidden, tiny_config

LAYER = build(tiny_config(), max_decode_query_len=3, workspace_tokens=64)


def finished(scenario, layer=LAYER, page_size=8, seed=0) -> Engine:
    engine = Engine([layer], scenario, page_size, seed)
    for number, step in enumerate(scenario.steps):
        engine.run(step, {layer.layer_idx: random_hidden(step.tokens, layer.config, number)})
    return engine


def written_rows(engine: Engine) -> int:
    return int(engine.pool.layer(0).data.isfinite().all(dim=-1).sum())


def test_only_the_rows_of_live_tokens_are_written():
    # 172 tokens of main, 40 of other; each copy has its own partial page (4 of 148 tokens) and its new ones.
    assert written_rows(finished(default_scenario())) == 172 + 40 + (4 + 1) + (4 + 3) + (4 + 1)


def test_everything_else_is_not_a_number():
    data = finished(default_scenario()).pool.layer(0).data
    assert bool((data.isnan().all(dim=-1) | data.isfinite().all(dim=-1)).all())


def test_copies_read_their_parents_rows():
    engine = finished(default_scenario())
    (main, _), (copy, _) = (engine.rows(LAYER, name, 148) for name in ("main", "copy2"))
    assert torch.equal(main, copy)


def test_pages_are_not_in_order():
    table = finished(parse_requests("prefill:200"))._table(["request0"])[0]
    assert table.tolist() != sorted(table.tolist())


def test_rows_put_into_the_cache_are_remembered_as_it_holds_them():
    engine = finished(parse_requests("decode:1+20"))
    latent_SL, k_rope_SR = engine.filled[0, "request0"]
    again = engine.rows(LAYER, "request0", 20)
    assert torch.equal(latent_SL, again[0])
    assert torch.equal(k_rope_SR, again[1])
    assert bool(latent_SL.isfinite().all())


def test_a_step_is_timed():
    scenario = parse_requests("prefill:9")
    engine = Engine([LAYER], scenario, 8, 0)
    outcome = engine.run(scenario.steps[0], {0: random_hidden(9, LAYER.config, 0)})
    assert min(outcome.prepare_seconds, outcome.layer_seconds) > 0
    assert outcome.outputs[0].shape == (9, LAYER.config.hidden_size)


def test_a_page_size_that_the_backend_does_not_take_is_refused_at_once(monkeypatch):
    def refuse(layer: object, page_size: int) -> None:
        raise UnsupportedError("fake", [])

    monkeypatch.setattr("mla_core.admission.check_page_size", refuse)
    with pytest.raises(UnsupportedError):
        Engine([LAYER], parse_requests("prefill:9"), 8, 0)
