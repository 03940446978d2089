"""Graph steps: fixed shapes, tensors that never move, and the same numbers as an ordinary step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import Tensor

from mla_core import MLA, BackendInfo, Batch, registry
from mla_core.errors import BatchError, CacheError, ContractError, NoBackendFits
from tests.support import build, random_hidden, relative_error, tiny_config

CONFIG = tiny_config(output_bias=True)
PAGE, PAGES = 4, 12


class Graphable:
    """Decode from the segments' tensors alone, as a captured kernel would; `meta` is one of its own."""

    def __init__(self, context) -> None:
        self.latent = context.request.latent

    def prepare(self, kernel, segments, geometry):
        if kernel != "mqa_decode":
            return None
        if segments.meta is None:
            return segments.seq_lens.clone()
        return segments.meta.copy_(segments.seq_lens)

    def mqa(self, q_THL, cache, segments, scale, out_THL, lse_TH) -> None:
        keys = cache.data.view(-1, cache.layout.width)
        for b in range(segments.seq_lens.shape[0]):
            start, end = segments.query_start_loc[b : b + 2].tolist()
            length = int(segments.meta[b])
            where = torch.arange(length)
            slots = segments.block_table[b].long()[where // PAGE] * PAGE + where % PAGE
            for row in range(start, end):
                seen = keys[slots[: length - (end - 1 - row)]]
                weights = torch.softmax(scale * q_THL[row] @ seen.T, dim=-1)
                out_THL[row] = weights @ seen[:, : self.latent]


@pytest.fixture(autouse=True)
def graphable() -> Iterator[None]:
    vanilla = registry.info("vanilla").capabilities
    capabilities = vanilla.model_copy(update={"cuda_graph": "decode", "kernels": frozenset({"mqa_decode"})})
    registry.add(BackendInfo(name="graphable", target=f"{__name__}:Graphable", capabilities=capabilities))
    yield
    registry.remove("graphable")


def graph_layer() -> MLA:
    spec = "prefill=vanilla;decode=graphable"
    return build(CONFIG, backend=spec, cuda_graph="decode", max_decode_query_len=2)


def batch(queries: list[int], contexts: list[int], table: Tensor) -> Batch:
    return Batch.build(queries, contexts, table[: len(queries)], PAGE, max_tokens=5, max_requests=3)


def tensors(record: object) -> Iterator[Tensor]:
    """Every tensor that a captured graph could hold."""
    for item in fields(record):
        value = getattr(record, item.name)
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            for part in value:
                if is_dataclass(part):
                    yield from tensors(part)
        elif is_dataclass(value) and item.name != "cache":
            yield from tensors(value)


class World:
    """The same requests through a graph step and through ordinary steps, each with a cache of its own."""

    def __init__(self) -> None:
        self.layer, self.plain = graph_layer(), build(CONFIG, max_decode_query_len=2)
        self.caches = [layer.new_cache(PAGES, PAGE) for layer in (self.layer, self.plain)]
        self.table = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).view(3, 4)
        for cache in self.caches:
            cache.data.normal_(generator=torch.Generator().manual_seed(1))

    def compare(self, step, queries: list[int], contexts: list[int]) -> float:
        live = sum(queries)
        hidden = random_hidden(5, CONFIG, seed=live)
        hidden[live:] = torch.nan
        actual = self.layer(hidden, step)
        plain = Batch.build(queries, contexts, self.table[: len(queries)], PAGE)
        expected = self.plain(hidden[:live], self.plain.prepare(plain, self.caches[1]))
        assert torch.equal(actual[live:], torch.zeros_like(actual[live:]))
        assert relative_error(self.caches[0].data, self.caches[1].data) < 1e-6
        return relative_error(actual[:live], expected)


REFRESHES = [([1, 2, 1], [9, 3, 5]), ([2], [6]), ([1, 1], [0, 13]), ([2, 2, 1], [4, 1, 0])]


def test_a_refreshed_step_gives_the_numbers_of_an_ordinary_one_and_moves_no_tensor() -> None:
    world = World()
    step = world.layer.prepare(batch([2, 1], [3, 7], world.table), world.caches[0], graph=True)
    before = [tensor.data_ptr() for tensor in tensors(step)]
    meta = step.parts[0].segments.meta.data_ptr()
    assert world.compare(step, [2, 1], [3, 7]) < 1e-5
    for queries, contexts in REFRESHES:
        world.layer.refresh(step, batch(queries, contexts, world.table))
        assert world.compare(step, queries, contexts) < 1e-5, (queries, contexts)
    assert [tensor.data_ptr() for tensor in tensors(step)] == before
    assert step.parts[0].segments.meta.data_ptr() == meta


def test_refreshing_writes_into_no_batch_of_the_caller() -> None:
    layer, table = graph_layer(), torch.arange(12, dtype=torch.int32).view(3, 4)
    first, second = batch([1, 1], [2, 3], table), batch([2], [5], table)
    before = [[x.clone() for x in tensors(each)] for each in (first, second)]
    step = layer.prepare(first, layer.new_cache(PAGES, PAGE), graph=True)
    layer.refresh(step, second)
    for each, values in zip((first, second), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors(each), values, strict=True))
    assert first.query_lens == (1, 1, 0)


def test_a_step_that_is_not_refreshed_gives_other_numbers() -> None:
    world = World()
    step = world.layer.prepare(batch([2, 1], [3, 7], world.table), world.caches[0], graph=True)
    hidden = random_hidden(5, CONFIG, seed=3)
    stale = world.layer(hidden, step)
    world.layer.refresh(step, batch([2, 1], [4, 9], world.table))
    assert relative_error(world.layer(hidden, step)[:3], stale[:3]) > 1e-3


def test_a_batch_of_another_capacity_is_refused() -> None:
    world = World()
    step = world.layer.prepare(batch([1], [3], world.table), world.caches[0], graph=True)
    other = Batch.build([1], [3], world.table[:1], PAGE, max_tokens=6, max_requests=3)
    with pytest.raises(BatchError, match=r"has shape \[6\], but the graph step was prepared with \[5\]"):
        world.layer.refresh(step, other)


def test_prefill_in_a_graph_step_is_refused() -> None:
    world = World()
    with pytest.raises(BatchError, match="request 1 has 3 new tokens"):
        world.layer.prepare(batch([1, 3], [3, 0], world.table), world.caches[0], graph=True)


def test_a_graph_step_that_stores_nothing_is_refused() -> None:
    world = World()
    with pytest.raises(CacheError, match="must store at least one token"):
        world.layer.prepare(batch([], [], world.table), world.caches[0], graph=True)


def test_a_graph_step_needs_a_layer_that_was_planned_for_it() -> None:
    layer = build(CONFIG)
    empty = Batch.build([1], [0], torch.zeros(1, 1, dtype=torch.int32), PAGE)
    with pytest.raises(ContractError, match="cuda_graph='decode'"):
        layer.prepare(empty, layer.new_cache(PAGES, PAGE), graph=True)


def test_a_backend_that_declares_no_graphs_is_refused() -> None:
    with pytest.raises(NoBackendFits, match="cuda_graph: wanted decode, offered none"):
        MLA(CONFIG, backend="vanilla", dtype=torch.float32, cuda_graph="decode")
