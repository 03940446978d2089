"""Batch independence: any order of requests, each request alone, or beside a sick one give the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import torch

from mla_core.conformance.bench import Bench, Scene
from mla_core.conformance.checks.basic import lengths
from mla_core.conformance.oracle import Answer
from mla_core.conformance.scenes import Lengths, MhaScene, poison

__all__ = ["neighbour_of_nan", "order", "picked", "solo", "solo_scenes"]


def scene_of(bench: Bench) -> Scene:
    """A batch of several requests for the cell's kernel."""
    if bench.cell.kernel == "mha_prefill":
        return bench.mha(Lengths((5, 1, 4, 2), (5, 4, 6, 9)))
    return bench.mqa(lengths(bench))


def order(bench: Bench) -> None:
    """Requests in reverse and in a mixed order; every row still is the oracle's."""
    scene = scene_of(bench)
    for turn in ([3, 2, 1, 0], [2, 0, 3, 1]):
        changed = picked(scene, turn)
        expected = _rows(scene.expected(bench.cell.control), rows_of(scene, turn))
        bench.compare(bench.run(changed), expected)


def solo(bench: Bench) -> None:
    """Each request alone gives its rows of the batch."""
    scene = scene_of(bench)
    whole = scene.expected(bench.cell.control)
    bench.compare(bench.run(scene), whole)
    for rows, alone in solo_scenes(scene):
        bench.compare(bench.run(alone), _rows(whole, rows))


def neighbour_of_nan(bench: Bench) -> None:
    """A request that is all NaN, first or in the middle, changes no other request's rows."""
    scene = scene_of(bench)
    whole = scene.expected(bench.cell.control)
    for sick in (0, 2):
        others = rows_of(scene, [b for b in range(len(scene.lengths.queries)) if b != sick])
        bench.compare(_rows(bench.run(_with_nan(scene, sick)), others), _rows(whole, others))


def solo_scenes(scene: Scene) -> Iterator[tuple[torch.Tensor, Scene]]:
    """(rows in the batch, the request alone), request by request."""
    for request in range(len(scene.lengths.queries)):
        yield rows_of(scene, [request]), picked(scene, [request])


def picked(scene: Scene, requests: list[int]) -> Scene:
    """The same call with only these requests, in this order."""
    queries = tuple(scene.lengths.queries[b] for b in requests)
    keys = tuple(scene.lengths.keys[b] for b in requests)
    chosen = Lengths(queries, keys, scene.lengths.causal)
    rows = rows_of(scene, requests)
    if isinstance(scene, MhaScene):
        columns = _spans(scene.lengths.keys, requests)
        tensors = {"q_THE": scene.q_THE[rows], "k_SHE": scene.k_SHE[columns], "v_SHV": scene.v_SHV[columns]}
        return replace(scene, lengths=chosen, **tensors)
    table = scene.block_table[requests]
    return replace(scene, lengths=chosen, q_THX=scene.q_THX[rows], block_table=table, _answers={})


def _with_nan(scene: Scene, request: int) -> Scene:
    """The same call with NaN for everything of one request: queries, and keys or cached pages."""
    rows = rows_of(scene, [request])
    if isinstance(scene, MhaScene):
        columns = _spans(scene.lengths.keys, [request])
        tensors = {"k_SHE": _filled(scene.k_SHE, columns), "v_SHV": _filled(scene.v_SHV, columns)}
        return replace(scene, q_THE=_filled(scene.q_THE, rows), **tensors)
    used = -(-scene.lengths.keys[request] // scene.cache.page_size)
    data = scene.cache.data.clone()
    for page in scene.block_table[request, :used].tolist():
        poison(data[page])
    return replace(scene, q_THX=_filled(scene.q_THX, rows), cache=replace(scene.cache, data=data))


def _filled(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return x.index_fill(0, rows.to(x.device), torch.nan)


def rows_of(scene: Scene, requests: list[int]) -> torch.Tensor:
    """Query rows of these requests, in this order."""
    return _spans(scene.lengths.queries, requests)


def _spans(counts: tuple[int, ...], requests: list[int]) -> torch.Tensor:
    starts = [0, *accumulate(counts)]
    return torch.cat([torch.arange(starts[b], starts[b + 1]) for b in requests])


def _rows(answer: Answer, rows: torch.Tensor) -> Answer:
    return Answer(answer.out_THV[rows], answer.lse_TH[rows])
