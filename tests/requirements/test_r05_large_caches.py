"""R05: caches beyond 2^31 elements, and caches that are slices of larger tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mla_core import MLA, LatentCache
from tests import faults
from tests.support import SCENARIOS, TOLERANCE, World, build, tiny_config

PAGE_SIZE = 64


@pytest.fixture
def huge_cache(_poisoned_scratch) -> Callable[[MLA, int, int], LatentCache]:
    """4.3 GB of bfloat16 addresses; only the pages that are touched become memory."""

    def make(layer: MLA, num_pages: int, page_size: int) -> LatentCache:
        pages = -(-(2**31) // (page_size * layer.layout.row)) + num_pages
        # Filling it, as the poisoned scratch would, would make all of it memory.
        torch.utils.deterministic.fill_uninitialized_memory = False
        data = torch.empty(pages, page_size, layer.layout.row, dtype=torch.bfloat16)
        torch.utils.deterministic.fill_uninitialized_memory = True
        assert data.numel() > 2**31
        return LatentCache.from_tensor(data, layer.layout, page_size)

    return make


def to_the_end(world: World) -> None:
    """Move every request's pages behind element 2^31, and poison them."""
    shift = -(-(2**31) // world.cache.data.stride(0))
    for request in world.requests:
        request.pages = [page + shift for page in request.pages]
        world.cache.data[request.pages] = torch.nan
    assert min(r.pages[0] for r in world.requests) * world.cache.data.stride(0) >= 2**31


@pytest.mark.parametrize(
    "options",
    [{"workspace_tokens": 50}, {"prefill_form": "absorb"}, {"max_decode_query_len": 4}],
    ids=["expand", "absorb", "verify"],
)
def test_pages_beyond_2_to_the_31_elements_are_written_and_read(huge_cache, options):
    layer = build(tiny_config(), dtype=torch.bfloat16, **options)
    world = World(layer, [140, 70], page_size=PAGE_SIZE, make_cache=huge_cache)
    to_the_end(world)
    steps = [[(0, 130), (1, 66)], [(1, 1), (0, 4)], [(0, 6), (1, 3)]]
    assert world.errors(steps) < TOLERANCE[torch.bfloat16]


def test_slots_beyond_2_to_the_31_bytes_survive_a_round_trip(huge_cache):
    layer = build(tiny_config(), dtype=torch.bfloat16)
    cache = huge_cache(layer, 8, PAGE_SIZE)
    last = cache.num_pages * PAGE_SIZE - 1
    cache.write(torch.tensor([last, last - 1]), torch.ones(2, 16), torch.full((2, 4), 2.0))
    latent_SL, k_rope_SR = cache.read(torch.tensor([cache.num_pages - 1]), PAGE_SIZE)
    assert torch.equal(latent_SL[-2:], torch.ones(2, 16).bfloat16())
    assert torch.equal(k_rope_SR[-2:], torch.full((2, 4), 2.0).bfloat16())


def slice_along(dim: int, start: int, step: int) -> Callable[[MLA, int, int], LatentCache]:
    """A cache that is every `step`-th element of a larger NaN tensor along one dim."""

    def make(layer: MLA, num_pages: int, page_size: int) -> LatentCache:
        shape = [num_pages, page_size, layer.layout.row]
        larger = list(shape)
        larger[dim] = start + step * shape[dim] + 3
        whole = torch.full(larger, torch.nan, dtype=layer.dtype)
        index = [slice(None)] * 3
        index[dim] = slice(start, start + step * shape[dim], step)
        return LatentCache.from_tensor(whole[tuple(index)], layer.layout, page_size)

    return make


def transposed(layer: MLA, num_pages: int, page_size: int) -> LatentCache:
    """Pages interleaved token by token."""
    whole = torch.full((page_size, num_pages, layer.layout.row), torch.nan, dtype=layer.dtype)
    return LatentCache.from_tensor(whole.transpose(0, 1), layer.layout, page_size)


def one_of_many_layers(layer: MLA, num_pages: int, page_size: int) -> LatentCache:
    """Layer 2 of an engine's own [pages, layers, tokens, row] tensor."""
    whole = torch.full((num_pages, 4, page_size, layer.layout.row), torch.nan, dtype=layer.dtype)
    return LatentCache.from_tensor(whole[:, 2], layer.layout, page_size)


STRIDED = {
    "pages": slice_along(0, 2, 1),
    "every_second_page": slice_along(0, 1, 2),
    "tokens": slice_along(1, 1, 1),
    "every_second_token": slice_along(1, 0, 2),
    "rows": slice_along(2, 3, 1),
    "every_second_value": slice_along(2, 0, 2),
    "transposed": transposed,
    "one_of_many_layers": one_of_many_layers,
}


@pytest.mark.parametrize("make_cache", STRIDED.values(), ids=STRIDED.keys())
@pytest.mark.parametrize("scenario", ["chunked_prefill", "absorbed_context", "mixed"])
def test_a_cache_may_be_a_slice_of_a_larger_tensor_along_any_dim(scenario, make_cache):
    assert SCENARIOS[scenario].error(tiny_config(), make_cache=make_cache) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("make_cache", STRIDED.values(), ids=STRIDED.keys())
def test_writing_a_sliced_cache_leaves_the_rest_of_the_tensor_alone(make_cache):
    world = SCENARIOS["mixed"].world(tiny_config(), make_cache=make_cache)
    whole = world.cache.data._base
    world.errors(SCENARIOS["mixed"].steps)
    tokens = sum(request.done for request in world.requests)
    assert int(whole.isfinite().sum()) == tokens * world.layer.layout.row


def test_from_tensor_shares_the_memory_it_is_given():
    layer = build(tiny_config())
    data = torch.full((3, 4, 20), torch.nan)
    LatentCache.from_tensor(data, layer.layout, 4).write(
        torch.tensor([5]), torch.ones(1, 16), torch.ones(1, 4)
    )
    assert torch.equal(data[1, 1], torch.ones(20))


def test_a_wrong_page_in_a_sliced_cache_is_noticed():
    world = SCENARIOS["cached_prefix"].world(tiny_config(), make_cache=STRIDED["every_second_page"])
    with faults.wrong_page(world):
        assert world.errors(SCENARIOS["cached_prefix"].steps) > 1e-3


def test_offsets_that_wrap_at_32_bits_are_noticed(huge_cache, monkeypatch):
    layer = build(tiny_config(), dtype=torch.bfloat16, prefill_form="absorb")
    world = World(layer, [140], page_size=PAGE_SIZE, make_cache=huge_cache)
    to_the_end(world)
    honest = type(layer.layout).gather_pages

    def wrapping(layout, data: Tensor, pages_P: Tensor) -> Tensor:
        return honest(layout, data, (pages_P * data.stride(0)) % 2**31 // data.stride(0))

    monkeypatch.setattr(type(layer.layout), "gather_pages", wrapping)
    assert world.errors([[(0, 130)], [(0, 10)]]) > 10 * TOLERANCE[torch.bfloat16]
