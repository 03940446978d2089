"""A manifest that loads a kernel library, which a manifest must not."""

from __future__ import annotations

import torch

from mla_liars.manifest import info

__all__ = ["HEAVY"]

HEAVY = info("heavy").model_copy(update={"summary": f"loads torch {torch.__version__}"})
