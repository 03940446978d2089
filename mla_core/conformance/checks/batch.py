"""Batch independence: any order of requests, and each request alone, give the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import torch

from mla_core.conformance.bench import Bench, Scene
from mla_core.conformance.checks.basic import lengths
from mla_core.conformance.oracle import Answer
from mla_core.conformance.scenes import Lengths, MhaScene

__all__ = ["order", "picked", "solo", "solo_scenes"]


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


def rows_of(scene: Scene, requests: list[int]) -> torch.Tensor:
    """Query rows of these requests, in this order."""
    return _spans(scene.lengths.queries, requests)


def _spans(counts: tuple[int, ...], requests: list[int]) -> torch.Tensor:
    starts = [0, *accumulate(counts)]
    return torch.cat([torch.arange(starts[b], starts[b + 1]) for b in requests])


def _rows(answer: Answer, rows: torch.Tensor) -> Answer:
    return Answer(answer.out_THV[rows], answer.lse_TH[rows])
