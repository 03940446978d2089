"""Values against the oracle where numbers are hard: long contexts, large scores, flat ones, no mask."""

from __future__ import annotations

from dataclasses import replace

from mla_core.conformance.bench import Bench, Wrong
from mla_core.conformance.checks.basic import lengths
from mla_core.conformance.scenes import Lengths, MqaScene
from mla_core.errors import UnsupportedError

__all__ = ["flat_scores", "large_scores", "long", "obeyed_or_refused", "uncausal"]

# exp overflows float32 beyond 88, and float16 holds no more than 65504.
_LARGE, _FLAT = 60.0, 0.01


def long(bench: Bench) -> None:
    """Several hundred keys: more than one block of any kernel."""
    if bench.cell.kernel == "mha_prefill":
        bench.check(bench.mha(Lengths((6, 130), (600, 130))))
    else:
        bench.check(bench.mqa(lengths(bench, long=True)))


def large_scores(bench: Bench) -> None:
    """Scores of some hundred: nothing overflows, the maximum is subtracted."""
    _at_spread(bench, _LARGE)


def flat_scores(bench: Bench) -> None:
    """Scores of almost zero: every key counts the same."""
    _at_spread(bench, _FLAT)


def uncausal(bench: Bench) -> None:
    """causal=False: every query row sees all keys. The absorbed form may refuse it instead."""
    if bench.cell.kernel == "mha_prefill":
        bench.check(bench.mha(Lengths((4, 3, 2), (9, 3, 1), causal=False)))
    else:
        obeyed_or_refused(bench, bench.mqa(replace(lengths(bench), causal=False)))


def obeyed_or_refused(bench: Bench, scene: MqaScene) -> None:
    """No capability says whether a kernel can leave the mask off, so it may also refuse, cleanly."""
    try:
        bench.check(scene)
    except UnsupportedError as refusal:
        if bench.touched:
            raise Wrong(f"refused, but had written before: {refusal}") from refusal
        if bench.cell.control is not None:
            raise Wrong("refused") from refusal


def _at_spread(bench: Bench, spread: float) -> None:
    if bench.cell.kernel == "mha_prefill":
        scene = bench.mha(Lengths((5, 1, 4), (5, 4, 6)), spread=spread)
    else:
        scene = bench.mqa(lengths(bench), spread=spread)
    # Rounding of the scores is relative to their size, and with it the error that is left.
    bench.at_spread(spread).check(scene)
