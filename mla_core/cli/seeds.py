"""One seed for a whole run, and independent streams of random numbers from it."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["stream"]


def stream(seed: int, purpose: str) -> torch.Generator:
    """Numbers for one purpose. Streams of equal numbers would make weights and inputs resonate."""
    digest = hashlib.sha256(f"{seed} {purpose}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
