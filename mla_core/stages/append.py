"""Stage append: store the new tokens' rotated rows in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mla_core.layer import MLA
    from mla_core.stages.project import Projected
    from mla_core.step import Step

__all__ = ["append"]


def append(layer: MLA, projected: Projected, step: Step) -> None:
    """Write latent and rotated rope key of every token that has a slot."""
    step.cache_of(layer).write_targets(step.targets, projected.latent_TL, projected.k_rope_TR)
