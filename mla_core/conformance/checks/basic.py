"""What a single declared value must do: a small mixed call, compared with the oracle."""

from __future__ import annotations

from mla_core.conformance.bench import Bench, Wrong
from mla_core.conformance.oracle import Answer
from mla_core.conformance.scenes import Lengths

__all__ = ["lengths", "mha", "mqa"]

_RUNS = 3


def lengths(bench: Bench, *, long: bool = False) -> Lengths:
    """Requests as the cell's kernel gets them: query lengths as asked, keys around a page border."""
    page = bench.layer.page_size or 16
    keys = (2 * page + 1, page, page - 1 or 3, 3 * page)
    if long:
        keys = tuple(200 + 3 * key for key in keys)
    queries = _queries(bench)
    return Lengths(queries, tuple(max(key, query) for key, query in zip(keys, queries, strict=True)))


def _queries(bench: Bench) -> tuple[int, int, int, int]:
    if bench.cell.kernel != "mqa_decode":
        return (7, 1, 4, 5)
    most = bench.layer.max_query_len
    asked = bench.layer.query_len or ("single" if most == 1 else "varlen")
    if asked == "varlen":
        return (1, most, max(most - 1, 1), most)
    return (most,) * 4


def mha(bench: Bench) -> None:
    """Causal among new tokens, causal after a prefix, and a context chunk without mask."""
    first = Lengths((5, 1, 4), (5, 4, 6))
    bench.check(bench.mha(first))
    bench.check(bench.mha(Lengths((3, 5), (7, 2), causal=False), seed=1))
    _promises(bench, first)


def mqa(bench: Bench) -> None:
    """One batch over shuffled pages."""
    first = lengths(bench)
    bench.check(bench.mqa(first))
    _promises(bench, first)


def _promises(bench: Bench, first: Lengths) -> None:
    """deterministic: the same bits again. batch_invariant: the same bits alone."""
    make = bench.mha if bench.cell.kernel == "mha_prefill" else bench.mqa
    if bench.layer.deterministic:
        scene = make(first)
        answers = [bench.run(scene) for _ in range(_RUNS)]
        if any(not same_bits(answers[0], answer) for answer in answers[1:]):
            raise Wrong("the same call gave other bits")
    if bench.layer.batch_invariant:
        _check_invariant(bench, first)


def _check_invariant(bench: Bench, first: Lengths) -> None:
    from mla_core.conformance.checks.batch import solo_scenes

    scene = (bench.mha if bench.cell.kernel == "mha_prefill" else bench.mqa)(first)
    together = bench.run(scene)
    for rows, solo in solo_scenes(scene):
        alone = bench.run(solo)
        if not same_bits(Answer(together.out_THV[rows], together.lse_TH[rows]), alone):
            raise Wrong("a request alone gave other bits than in a batch")


def same_bits(one: Answer, other: Answer) -> bool:
    """Equal values; NaN where lse was not asked counts as equal."""
    lse, other_lse = (answer.lse_TH.nan_to_num(nan=0.0) for answer in (one, other))
    return bool((one.out_THV == other.out_THV).all()) and bool((lse == other_lse).all())
