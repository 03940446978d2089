"""Weights: after a reload, whole or partial, nothing that was derived from the old ones is left."""

from __future__ import annotations

from mla_core.conformance.bench import Bench
from mla_core.conformance.layers import LayerRun, forms, random_weights

__all__ = ["partial_reload", "reload"]


def reload(bench: Bench) -> None:
    """Run, load other weights, run again."""
    for form in forms(bench):
        run = LayerRun(bench, form=form)
        run.check([[(0, 5)], [(0, 1)]])
        run.load(random_weights(run.config, seed=1))
        run.check([[(1, 5)], [(1, 1)]])


def partial_reload(bench: Bench) -> None:
    """Load kv_b_proj alone: W_uk and W_uv follow."""
    for form in forms(bench):
        run = LayerRun(bench, form=form)
        run.check([[(0, 5)], [(0, 1)]])
        changed = random_weights(run.config, seed=2)
        run.load({"kv_b_proj.weight": changed["kv_b_proj.weight"]}, partial=True)
        run.check([[(1, 5)], [(1, 1)]])
