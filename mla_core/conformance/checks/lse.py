"""lse: float32, natural logarithm, -inf for a row that sees nothing; merges give the whole."""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_core.conformance.bench import Bench, Scene, Wrong
from mla_core.conformance.checks.basic import lengths
from mla_core.conformance.checks.batch import scene_of
from mla_core.conformance.oracle import Answer
from mla_core.conformance.scenes import Lengths, MhaScene, MqaScene
from mla_core.ops import merge

__all__ = ["empty_rows", "merge_is_associative", "not_asked", "split_anywhere", "values"]


def values(bench: Bench) -> None:
    """Output and lse of a batch; a wrong base or sign is far outside the tolerance."""
    bench.check(scene_of(bench))


def empty_rows(bench: Bench) -> None:
    """Requests without keys between others: output 0 and lse -inf, never NaN."""
    if bench.cell.kernel == "mha_prefill":
        bench.check(bench.mha(Lengths((3, 2, 4), (4, 0, 5), causal=False)))
        # More queries than keys: the first ones come before every key.
        bench.check(bench.mha(Lengths((4, 2), (2, 3)), seed=1))
        return
    whole = lengths(bench)
    keys = (whole.keys[0], 0, whole.keys[2], 0)
    bench.check(bench.mqa(replace(whole, keys=keys)))


def not_asked(bench: Bench) -> None:
    """Without an lse tensor the output is the same."""
    bench.check(scene_of(bench), lse=False)


def split_anywhere(bench: Bench) -> None:
    """Attention over two parts of the keys, merged by lse, is attention over all of them."""
    for whole, parts in _splits(bench):
        one, other = (bench.run(part) for part in parts)
        out, lse = merge(one.out_THV, one.lse_TH, other.out_THV, other.lse_TH)
        bench.compare(Answer(out, lse), whole.expected(bench.cell.control))


def merge_is_associative(bench: Bench) -> None:
    """(a + b) + c and a + (b + c) are both the whole, with an empty part among them."""
    for whole, (first, second) in _splits(bench):
        a, b = bench.run(first), bench.run(second)
        nothing = Answer(torch.zeros_like(a.out_THV), torch.full_like(a.lse_TH, -torch.inf))
        for left in (_merged(_merged(a, nothing), b), _merged(a, _merged(nothing, b)), _merged(b, a)):
            bench.compare(left, whole.expected(bench.cell.control))


def _merged(one: Answer, other: Answer) -> Answer:
    return Answer(*merge(one.out_THV, one.lse_TH, other.out_THV, other.lse_TH))


def _splits(bench: Bench) -> list[tuple[Scene, tuple[Scene, Scene]]]:
    """One request's keys cut in two, at several places; one side may be empty."""
    if bench.cell.kernel == "mha_prefill":
        whole = bench.mha(Lengths((4,), (9,), causal=False))
        return [(whole, _cut(whole, at)) for at in range(10)]
    page = bench.layer.page_size or 16
    paged = bench.mqa(Lengths((1,), (3 * page + 1,)))
    return [(paged, _cut_pages(paged, pages)) for pages in range(1, 4)]


def _cut(scene: MhaScene, at: int) -> tuple[MhaScene, MhaScene]:
    tokens = scene.lengths.keys[0]
    spans = (slice(0, at), slice(at, tokens))
    first, second = (
        replace(
            scene,
            lengths=Lengths(scene.lengths.queries, (span.stop - span.start,), causal=False),
            k_SHE=scene.k_SHE[span],
            v_SHV=scene.v_SHV[span],
        )
        for span in spans
    )
    return first, second


def _cut_pages(scene: MqaScene, pages: int) -> tuple[MqaScene, MqaScene]:
    at = pages * scene.cache.page_size
    rest = scene.lengths.keys[0] - at
    if rest < 1:
        raise Wrong("the kit cut a request beyond its end")
    first = replace(scene, lengths=Lengths((1,), (at,)), _answers={})
    second = replace(
        scene,
        lengths=Lengths((1,), (rest,)),
        block_table=scene.block_table[:, pages:].contiguous(),
        _answers={},
    )
    return first, second
