"""R09: any declared page size, any placement of pages and any chunking give the same result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_core import MLA, BackendInfo, Capabilities, IntSet, LatentCache, registry
from mla_core.errors import CacheError, UnsupportedError
from tests import faults
from tests.support import SCENARIOS, TOLERANCE, World, build, tiny_config

ANY = IntSet.range(1)
PICKY = BackendInfo(
    name="picky",
    target="mla_vanilla.backend:Vanilla",
    capabilities=Capabilities(
        devices={"cpu"},
        kernels={"mha_prefill", "mqa_decode"},
        dtypes={"float32"},
        layouts={"fp32": IntSet.of(16, 64)},
        query_len={"single"},
        heads=ANY,
        latent=ANY,
        nope=ANY,
        rope=ANY,
        value=ANY,
        returns={"lse"},
    ),
)


@pytest.fixture
def picky() -> Iterator[MLA]:
    """A layer whose decode backend takes pages of 16 and 64 tokens only."""
    registry.add(PICKY)
    try:
        yield MLA(tiny_config(), backend="picky", dtype=torch.float32)
    finally:
        registry.remove("picky")


@pytest.mark.parametrize("page_size", [1, 2, 3, 7, 16, 64, 1024])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_page_size_gives_the_oracles_result(scenario, page_size):
    assert SCENARIOS[scenario].error(tiny_config(), page_size=page_size) < TOLERANCE[torch.float32]


@settings(max_examples=20)
@given(
    scenario=st.sampled_from(sorted(SCENARIOS)),
    page_size=st.integers(1, 9),
    seed=st.integers(0, 1000),
    workspace=st.integers(1, 20),
)
def test_any_placement_of_pages_and_any_chunking_gives_the_oracles_result(
    scenario, page_size, seed, workspace
):
    options = {"page_size": page_size, "seed": seed}
    config, known = tiny_config(), SCENARIOS[scenario]
    layer = build(config, **{**known.options, "workspace_tokens": workspace})
    assert World(layer, known.lengths, **options).errors(known.steps) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("workspace", [1, 2, 3, 5, 8, 9, 1000])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_chunk_borders_need_not_be_page_borders(workspace, page_size):
    world = World(build(tiny_config(), workspace_tokens=workspace), [17, 12, 8], page_size=page_size)
    steps = [[(0, 9), (1, 5)], [(0, 4), (1, 7), (2, 8)], [(0, 4)]]
    assert world.errors(steps) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("width", [5, 6, 50])
@pytest.mark.parametrize("scenario", ["chunked_prefill", "decode"])
def test_the_width_of_the_block_table_does_not_matter(scenario, width):
    world = SCENARIOS[scenario].world(tiny_config())

    def widened(table: torch.Tensor) -> torch.Tensor:
        filler = torch.full((len(table), 50), -7, dtype=table.dtype)
        return torch.cat([table, filler], dim=1)[:, :width]

    world.distort = widened
    assert world.errors(SCENARIOS[scenario].steps) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_pages_read_in_a_wrong_place_are_noticed(page_size):
    world = SCENARIOS["chunked_prefill"].world(tiny_config(), page_size=page_size)
    with faults.wrong_page(world):
        assert world.errors(SCENARIOS["chunked_prefill"].steps) > 1e-3


def test_a_context_chunk_without_keys_of_a_request_must_not_count():
    world = SCENARIOS["chunked_prefill"].world(tiny_config())
    with faults.empty_parts_counted(world):
        assert world.errors(SCENARIOS["chunked_prefill"].steps) > 1e-3


@pytest.mark.parametrize("page_size", [16, 64])
def test_a_declared_page_size_is_accepted(picky, page_size):
    assert picky.new_cache(2, page_size).page_size == page_size


@pytest.mark.parametrize("page_size", [1, 15, 32, 128])
def test_another_page_size_is_refused_when_the_cache_is_made(picky, page_size):
    with pytest.raises(UnsupportedError, match=f"page_size: wanted {page_size}, offered 16, 64"):
        picky.new_cache(2, page_size)


def test_another_page_size_is_refused_when_a_pool_is_made(picky):
    with pytest.raises(UnsupportedError, match="page_size: wanted 8, offered 16, 64"):
        picky.new_pool(2, 2, 8)


def test_the_page_size_of_a_foreign_cache_is_checked_when_a_step_is_prepared(picky):
    world = World(build(tiny_config()), [3], page_size=8)
    with pytest.raises(UnsupportedError, match="page_size: wanted 8, offered 16, 64"):
        picky.prepare(world.batch([(0, 3)]), world.cache)


def test_the_page_size_comes_from_the_cache_and_a_contradiction_is_refused():
    layer = build(tiny_config())
    with pytest.raises(CacheError, match="page_size=8 but the tensor has pages of 4 tokens"):
        LatentCache.from_tensor(torch.zeros(2, 4, 20), layer.layout, 8)
