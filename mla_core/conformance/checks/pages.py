"""Pages: any order, any garbage where nothing is owned, partial last pages, wide tables, large caches."""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_core.cache.latent import LatentCache
from mla_core.conformance.bench import Bench, Unavailable, Wrong
from mla_core.conformance.checks.basic import lengths, same_bits
from mla_core.conformance.scenes import HOSTILE, Lengths, MqaScene

__all__ = ["beyond_32_bits", "garbage_is_ignored", "partial_last_page", "shuffled", "wide_table"]

_LARGE = 1 << 31
_MEMORY_ERRORS = ("alloc", "memory")


def shuffled(bench: Bench) -> None:
    """Several shuffles of the same requests' pages."""
    for seed in range(3):
        bench.check(bench.mqa(lengths(bench), seed=seed))


def garbage_is_ignored(bench: Bench) -> None:
    """Bytes and table entries that no token owns may be anything: the answer keeps its bits."""
    scene = bench.mqa(lengths(bench))
    poisoned = bench.check(scene)
    for byte in (0, 0x55):
        changed = replace(scene, cache=_refilled(scene, byte), block_table=_other_entries(scene))
        if not same_bits(bench.run(changed), poisoned):
            raise Wrong("the answer depends on bytes or table entries that no token owns")


def partial_last_page(bench: Bench) -> None:
    """Every length from one token to one page and one token; long pages in steps."""
    page = bench.layer.page_size or 16
    every = sorted({*range(1, page + 2, max(page // 8, 1)), page, page + 1})
    queries = bench.layer.max_query_len if bench.cell.kernel == "mqa_decode" else 2
    asked = bench.layer.query_len == "uniform"
    rows = tuple(queries if asked else min(queries, length) for length in every)
    bench.check(bench.mqa(Lengths(rows, tuple(max(every[i], rows[i]) for i in range(len(every))))))


def wide_table(bench: Bench) -> None:
    """The table's width is whatever is passed, in 32 and in 64 bits."""
    for columns in (0, 37):
        scene = bench.mqa(lengths(bench), extra_columns=columns)
        bench.check(scene)
        bench.check(replace(scene, block_table=scene.block_table.long()))


def beyond_32_bits(bench: Bench) -> None:
    """The last pages of a cache with more than 2^31 elements: offsets are 64 bits wide."""
    scene = bench.mqa(lengths(bench))
    small = scene.cache
    per_page = small.data[0].numel()
    if per_page == 0:
        raise Unavailable("a page without elements")
    num_pages = _LARGE // per_page + 1 + small.num_pages
    data = _untouched(num_pages, small)
    first = num_pages - small.num_pages
    data[first:].copy_(small.data)
    cache = LatentCache.from_tensor(data, small.layout, small.page_size, scales=small.scales)
    owned = (scene.block_table >= 0) & (scene.block_table < small.num_pages)
    moved = torch.where(owned, scene.block_table + first, scene.block_table)
    bench.compare(
        bench.run(replace(scene, cache=cache, block_table=moved)), scene.expected(bench.cell.control)
    )


def _untouched(num_pages: int, small: LatentCache) -> torch.Tensor:
    """Memory that the system maps but does not yet provide, where it does so lazily."""
    try:
        return torch.empty(num_pages, *small.data.shape[1:], dtype=small.data.dtype, device=small.data.device)
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in _MEMORY_ERRORS):
            raise
        raise Unavailable(f"no memory for {num_pages} pages: {error}") from error


def _refilled(scene: MqaScene, byte: int) -> LatentCache:
    """The same cache with another byte wherever no token is stored."""
    old = scene.cache
    data = old.data.clone()
    data.view(torch.uint8).fill_(byte)
    new = replace(old, data=data)
    targets = _owned(scene)
    rows = old.layout.read(old.data, *targets)
    old.layout.write(data, *targets, rows)
    return new


def _owned(scene: MqaScene) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and offset of every stored token."""
    page_size = scene.cache.page_size
    pages, offsets = [], []
    for b, keys in enumerate(scene.lengths.keys):
        where = torch.arange(keys, device=scene.block_table.device)
        pages.append(scene.block_table[b].long()[where // page_size])
        offsets.append(where % page_size)
    return torch.cat(pages), torch.cat(offsets)


def _other_entries(scene: MqaScene) -> torch.Tensor:
    """Other nonsense in the table entries that no request needs."""
    table = scene.block_table.clone()
    for b, keys in enumerate(scene.lengths.keys):
        needed = -(-keys // scene.cache.page_size)
        table[b, needed:] = HOSTILE[b % len(HOSTILE)]
    return table
