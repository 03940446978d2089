"""Stages of a whole layer: owned ones happen exactly once, in every phase and mix of phases."""

from __future__ import annotations

from mla_core.conformance.bench import Bench
from mla_core.conformance.layers import LayerRun, forms

__all__ = ["chunked_prefill", "gate", "mixed_batch", "once", "verification"]


def once(bench: Bench) -> None:
    """Prefill, a cached prefix, and decode: rope, append and v_up each act once."""
    for form in forms(bench):
        LayerRun(bench, form=form).check([[(0, 7), (1, 3)], [(0, 4)], [(1, 1), (0, 1)], [(0, 1)]])


def gate(bench: Bench) -> None:
    """A gate acts once, on the attention output, before the output projection."""
    for kind in ("per_head", "elementwise"):
        for form in forms(bench):
            LayerRun(bench, form=form, gate=kind).check([[(0, 6), (1, 2)], [(0, 1), (1, 1)]])


def chunked_prefill(bench: Bench) -> None:
    """A prefix in chunks of any size, some of them empty for a request."""
    for form in forms(bench):
        for workspace in (1, 4):
            run = LayerRun(bench, form=form, workspace_tokens=workspace)
            run.check([[(0, 6), (1, 3)], [(2, 2), (0, 5), (1, 2)]])


def verification(bench: Bench) -> None:
    """Draft tokens after a prefix, as many as declared."""
    most = bench.layer.max_query_len
    for form in forms(bench):
        run = LayerRun(bench, form=form, max_decode_query_len=most)
        run.check([[(0, 7), (1, 5)], [(1, most), (0, most)], [(0, most)]])


def mixed_batch(bench: Bench) -> None:
    """Prefill, continued prefill and decode in one step, decode first and last."""
    for form in forms(bench):
        run = LayerRun(bench, form=form, workspace_tokens=3)
        run.check([[(0, 4), (1, 6)], [(0, 1), (2, 7), (1, 3), (3, 1)], [(3, 1), (0, 1), (1, 2), (2, 1)]])
