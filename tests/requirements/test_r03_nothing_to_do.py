"""R03: no tokens, no requests, or requests without tokens work in every phase and touch nothing."""

from __future__ import annotations

import pytest
import torch

from mla_core import Batch, BlockAllocator
from mla_core.ops import merge
from tests.support import SCENARIOS, TOLERANCE, World, build, poisoned_cache, tiny_config

FORMS = {
    "expand": {},
    "chunked": {"workspace_tokens": 2},
    "absorb": {"prefill_form": "absorb"},
    "verify": {"max_decode_query_len": 4},
}


@pytest.fixture(params=FORMS, name="world")
def _world(request) -> World:
    """Three requests with 5, 0 and 7 tokens cached."""
    world = World(build(tiny_config(), **FORMS[request.param]), [9, 4, 8])
    world.outputs([(0, 5), (2, 7)])
    return world


def nothing_runs(world: World, counts, monkeypatch, **capacity: int) -> torch.Tensor:
    """One step in which a kernel call or a changed byte is a failure."""

    def refuse(*arguments):
        raise AssertionError("a kernel was called although there is nothing to do")

    before = world.cache.data.clone()
    monkeypatch.setattr(type(world.layer.kernels.mqa), "mqa", refuse)
    monkeypatch.setattr(type(world.layer.kernels.mqa), "mha", refuse)
    batch = world.batch(counts, **capacity)
    out_TD = world.layer(world.hidden(counts, batch.num_rows), world.layer.prepare(batch, world.cache))
    assert torch.equal(before.view(torch.uint8), world.cache.data.view(torch.uint8))
    return out_TD


NOTHING = {
    "no_requests": [],
    "one_request": [(0, 0)],
    "request_without_context": [(1, 0)],
    "several": [(2, 0), (1, 0), (0, 0)],
}


@pytest.mark.parametrize("counts", NOTHING.values(), ids=NOTHING.keys())
def test_a_step_without_tokens_returns_no_rows_and_runs_no_kernel(world, counts, monkeypatch):
    assert nothing_runs(world, counts, monkeypatch).shape == (0, 40)


@pytest.mark.parametrize("counts", NOTHING.values(), ids=NOTHING.keys())
def test_a_padded_step_without_tokens_returns_zeros_and_runs_no_kernel(world, counts, monkeypatch):
    out_TD = nothing_runs(world, counts, monkeypatch, max_tokens=6, max_requests=5)
    assert torch.equal(out_TD, torch.zeros(6, 40))


def test_the_attention_of_no_tokens_is_empty_with_an_empty_lse(world):
    batch = world.batch([(0, 0)])
    step = world.layer.prepare(batch, world.cache)
    values, lse = world.layer.attention(world.hidden([(0, 0)]), step, return_lse=True)
    assert (values.shape, lse.shape, lse.dtype) == ((0, 3, 6), (0, 3), torch.float32)


def test_requests_without_tokens_between_others_change_nothing(world):
    assert world.errors([[(1, 0), (0, 2), (1, 0), (2, 0), (1, 0)], [(1, 4), (0, 0), (2, 1)]]) < 1e-5


def test_the_table_of_a_request_without_tokens_may_be_garbage(world):
    def garbage(table: torch.Tensor) -> torch.Tensor:
        return table.index_fill(0, torch.tensor([1]), 2**31 - 1)

    batch = world.batch([(0, 1), (2, 0)])
    stale = Batch(
        query_start_loc=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        block_table=garbage(batch.block_table),
        slot_mapping=batch.slot_mapping,
    )
    out_TD = world.layer(world.hidden([(0, 1)]), world.layer.prepare(stale, world.cache))
    torch.testing.assert_close(out_TD.double(), world.expected(0).hidden_SD[5:6], rtol=1e-4, atol=1e-5)


def test_a_batch_of_only_padding_needs_no_request():
    layer = build(tiny_config())
    batch = Batch.build([], [], torch.zeros(0, 3, dtype=torch.int32), 4, max_tokens=3, max_requests=2)
    step = layer.prepare(batch, poisoned_cache(layer, 2, 4))
    assert torch.equal(layer(torch.full((3, 40), torch.nan), step), torch.zeros(3, 40))


def test_a_table_without_columns_serves_a_batch_without_tokens():
    layer = build(tiny_config())
    batch = Batch.build([0, 0], [0, 0], torch.zeros(2, 0, dtype=torch.int64), 4)
    assert layer(torch.zeros(0, 40), layer.prepare(batch, poisoned_cache(layer, 2, 4))).shape == (0, 40)


def test_a_cache_without_pages_serves_a_batch_without_tokens():
    layer = build(tiny_config())
    batch = Batch.build([0], [0], [[]], 4)
    assert layer(torch.zeros(0, 40), layer.prepare(batch, layer.new_cache(0, 4))).shape == (0, 40)


def test_writing_no_rows_changes_no_byte():
    layer = build(tiny_config())
    cache = poisoned_cache(layer, 2, 4)
    cache.write(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 16), torch.zeros(0, 4))
    assert cache.data.isnan().all()


def test_reading_no_tokens_gives_no_rows():
    cache = poisoned_cache(build(tiny_config()), 2, 4)
    latent_SL, k_rope_SR = cache.read(torch.tensor([1]), 0)
    assert (latent_SL.shape, k_rope_SR.shape) == ((0, 16), (0, 4))


def test_merging_no_rows_gives_no_rows():
    out, lse = merge(torch.zeros(0, 3, 6), torch.zeros(0, 3), torch.zeros(0, 3, 6), torch.zeros(0, 3))
    assert (out.shape, lse.shape) == ((0, 3, 6), (0, 3))


def test_a_request_of_no_tokens_takes_no_page():
    allocator = BlockAllocator(2, 4)
    assert allocator.allocate("empty", 0) == []
    assert allocator.table(["empty"]).shape == (1, 0)
    assert allocator.table([]).shape == (0, 0)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_steps_without_tokens_between_the_others_change_no_result(scenario):
    world = SCENARIOS[scenario].world(tiny_config())
    steps = [step for counts in SCENARIOS[scenario].steps for step in (counts, [], [(0, 0)])]
    assert world.errors(steps) < TOLERANCE[torch.float32]
