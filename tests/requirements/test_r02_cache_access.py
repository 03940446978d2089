"""R02: a result depends on the live tokens of its own request, and a write touches nothing but its slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_core import MLA, Batch, LatentCache
from mla_core.errors import CacheError
from tests import faults
from tests.support import SCENARIOS, TOLERANCE, World, build, poisoned_cache, tiny_config

FILLS = {"zero": 0.0, "infinity": torch.inf, "large": 1e30}


def bits(data: Tensor) -> Tensor:
    """The bytes, because NaN differs from itself."""
    return data.contiguous().view(torch.uint8).clone()


def filled_cache(value: float):
    def make(layer: MLA, num_pages: int, page_size: int) -> LatentCache:
        cache = layer.new_cache(num_pages, page_size)
        cache.data.fill_(value)
        return cache

    return make


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_unowned_cache_and_scratch_full_of_nan_change_nothing(scenario):
    assert SCENARIOS[scenario].error(tiny_config()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("scenario", ["chunked_prefill", "absorbed_context", "decode", "mixed"])
def test_every_content_of_unowned_memory_gives_the_same_bits(scenario, fill):
    outputs = []
    for make_cache in (poisoned_cache, filled_cache(FILLS[fill])):
        world = SCENARIOS[scenario].world(tiny_config(), make_cache=make_cache)
        outputs.append(torch.cat([torch.cat(world.outputs(counts)) for counts in SCENARIOS[scenario].steps]))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("scenario", ["absorbed_context", "decode", "verify", "mixed"])
def test_reading_rows_that_nobody_owns_is_noticed(scenario):
    world = SCENARIOS[scenario].world(tiny_config())
    with faults.unowned_rows_read(world):
        assert world.errors(SCENARIOS[scenario].steps) > 1e-3


@pytest.mark.parametrize("scenario", ["cached_prefix", "chunked_prefill", "absorbed_context", "mixed"])
def test_reading_a_wrong_page_is_noticed(scenario):
    world = SCENARIOS[scenario].world(tiny_config())
    with faults.wrong_page(world):
        assert world.errors(SCENARIOS[scenario].steps) > 1e-3


def test_scratch_memory_is_poisoned_in_these_tests():
    assert torch.empty(4).isnan().all()
    assert torch.ones(1).new_empty(2, 2).isnan().all()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_step_writes_the_slots_of_its_new_tokens_and_nothing_else(scenario):
    world = SCENARIOS[scenario].world(tiny_config())
    for counts in SCENARIOS[scenario].steps:
        slots = world.batch(counts).slot_mapping
        before = bits(world.cache.data).view(-1, world.cache.bytes_per_token)
        world.outputs(counts)
        after = bits(world.cache.data).view(-1, world.cache.bytes_per_token)
        changed = (before != after).any(dim=1).nonzero().squeeze(1)
        assert changed.tolist() == sorted(slots.tolist())


def test_cached_rows_are_the_normed_latent_and_the_rotated_key():
    world = SCENARIOS["mixed"].world(tiny_config())
    world.errors(SCENARIOS["mixed"].steps)
    for index, request in enumerate(world.requests):
        latent_SL, k_rope_SR = world.cache.read(torch.tensor(request.pages), request.done)
        expected = world.expected(index)
        torch.testing.assert_close(
            latent_SL.double(), expected.latent_SL[: request.done], rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(
            k_rope_SR.double(), expected.k_rope_SR[: request.done], rtol=1e-5, atol=1e-6
        )


def raw_batch(world: World, count: int, slots: Tensor) -> Batch:
    table = torch.tensor([world.requests[0].pages], dtype=torch.int32)
    starts = torch.tensor([0, count], dtype=torch.int32)
    return Batch(query_start_loc=starts, seq_lens=starts[1:], block_table=table, slot_mapping=slots)


def test_slot_minus_one_means_do_not_write():
    world = SCENARIOS["context"].world(tiny_config())
    slots = world.batch([(0, 6)]).slot_mapping
    slots[[1, 4]] = -1
    before = bits(world.cache.data[world.requests[0].pages])
    step = world.layer.prepare(raw_batch(world, 6, slots), world.cache)
    world.layer(world.hidden([(0, 6)]), step)
    stored = world.cache.data[world.requests[0].pages].flatten(0, 1)
    assert stored.isnan().all(dim=1).nonzero().squeeze(1).tolist() == [1, 4, *range(6, len(stored))]
    assert not torch.equal(before, bits(world.cache.data[world.requests[0].pages]))


def test_a_prefill_that_stores_nothing_leaves_every_byte_and_still_attends():
    world = SCENARIOS["context"].world(tiny_config())
    before = bits(world.cache.data)
    step = world.layer.prepare(raw_batch(world, 6, torch.full((6,), -1)), world.cache)
    out_TD = world.layer(world.hidden([(0, 6)]), step)
    assert torch.equal(before, bits(world.cache.data))
    torch.testing.assert_close(out_TD.double(), world.expected(0).hidden_SD[:6], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("slot", [-2, 28, 2**31 - 1])
def test_any_other_slot_outside_the_cache_is_refused_with_the_limit(slot):
    world = SCENARIOS["context"].world(tiny_config())
    slots = world.batch([(0, 6)]).slot_mapping
    slots[3] = slot
    with pytest.raises(CacheError, match=rf"slot {slot} .*7 pages of 4 tokens.*0 to 27"):
        world.layer.prepare(raw_batch(world, 6, slots), world.cache)


def test_the_first_and_the_last_slot_of_the_cache_are_ordinary():
    world = World(build(tiny_config()), [8], page_size=4)
    world.requests[0].pages = [world.cache.num_pages - 1, 0]
    assert world.errors([[(0, 5)], [(0, 1)], [(0, 2)]]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("scenario", ["chunked_prefill", "absorbed_context", "decode", "mixed"])
def test_block_tables_of_either_integer_type_may_hold_anything_beyond_need(scenario, dtype):
    assert SCENARIOS[scenario].error(tiny_config(), table_dtype=dtype) < TOLERANCE[torch.float32]


def test_table_entries_beyond_64_pages_worth_of_need_may_be_the_largest_integers():
    world = SCENARIOS["decode"].world(tiny_config(), table_dtype=torch.int64)

    def extremes(table: Tensor) -> Tensor:
        beyond = table.new_tensor([2**63 - 1, -(2**63)]).expand(len(table), 2)
        return torch.cat([table, beyond], dim=1)

    world.distort = extremes
    assert world.errors(SCENARIOS["decode"].steps) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("page", [-1, 99])
def test_a_needed_table_entry_outside_the_cache_is_refused_by_place_and_value(page):
    world = SCENARIOS["cached_prefix"].world(tiny_config())
    world.outputs([(0, 9)])

    def lost(table: Tensor) -> Tensor:
        table = table.clone()
        table[0, 1] = page
        return table

    world.distort = lost
    with pytest.raises(CacheError, match=rf"block_table\[0, 1\] is {page}.*pages 0 to 7"):
        world.layer.prepare(world.batch([(0, 8)]), world.cache)


def test_a_table_that_is_too_narrow_is_refused_with_both_widths():
    world = SCENARIOS["cached_prefix"].world(tiny_config())
    world.distort = lambda table: table[:, :2]
    with pytest.raises(CacheError, match="9 tokens and needs 3 pages of 4, but block_table has 2 columns"):
        world.layer.prepare(world.batch([(0, 9)]), world.cache)


def test_garbage_slots_of_padded_rows_write_nothing():
    world = SCENARIOS["context"].world(tiny_config())
    batch = world.batch([(0, 5)], max_tokens=8)
    batch.slot_mapping[5:] = torch.tensor([2, 0, 2**40])
    before = bits(world.cache.data).view(-1, world.cache.bytes_per_token)
    world.layer(world.hidden([(0, 5)], 8), world.layer.prepare(batch, world.cache))
    after = bits(world.cache.data).view(-1, world.cache.bytes_per_token)
    changed = (before != after).any(dim=1).nonzero().squeeze(1)
    assert changed.tolist() == sorted(batch.slot_mapping[:5].tolist())
