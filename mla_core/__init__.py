"""Multi-head Latent Attention as one layer with pluggable backends; importing this loads nothing else."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Public name to the module that defines it; None: the name is a module. Loaded at first touch, so that listing and
# planning never import torch.
_HOME: dict[str, str | None] = {
    "MLA": "layer",
    "MLAConfig": "config",
    "Batch": "batch",
    "Step": "step",
    "BlockAllocator": "cache",
    "CacheGeometry": "cache",
    "CachePool": "cache",
    "LatentCache": "cache",
    "Layout": "cache",
    "Scales": "cache",
    "SlotTargets": "cache",
    "Backend": "backend",
    "LayerContext": "backend",
    "MhaSegments": "backend",
    "MqaSegments": "backend",
    "RopeInputs": "backend",
    "BackendInfo": "manifest",
    "SparseInfo": "manifest",
    "Capabilities": "capabilities",
    "Declined": "capabilities",
    "IntSet": "capabilities",
    "Limit": "capabilities",
    "DeviceInfo": "request",
    "LayerRequest": "request",
    "Plan": "plan",
    "Reason": "request",
    "resolve": "resolve",
    "hookimpl": "hooks",
    "errors": None,
    "ops": None,
    "reference": None,
    "registry": None,
}

__all__ = [*_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mla_core' has no attribute {name!r}")
    home = _HOME[name]
    module = import_module(f"mla_core.{home or name}")
    return module if home is None else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
