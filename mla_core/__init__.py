"""Multi-head Latent Attention as one layer with pluggable backends; importing this loads nothing else."""

from __future__ import annotations

from importlib import import_module

# As typing.TYPE_CHECKING, without importing typing.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from mla_core import errors, ops, reference, registry
    from mla_core.backend import Backend, LayerContext, MhaSegments, MqaSegments, RopeInputs
    from mla_core.batch import Batch
    from mla_core.cache import (
        BlockAllocator,
        CacheGeometry,
        CachePool,
        LatentCache,
        Layout,
        Scales,
        SlotTargets,
    )
    from mla_core.capabilities import Capabilities, Declined, IntSet, Limit
    from mla_core.config import MLAConfig
    from mla_core.errors import MLAError, NoBackendFits, UnsupportedError
    from mla_core.hooks import hookimpl
    from mla_core.layer import MLA
    from mla_core.manifest import BackendInfo, SparseInfo
    from mla_core.plan import Plan, Rejection
    from mla_core.request import DeviceInfo, KernelRequest, LayerRequest, Reason
    from mla_core.step import Step

__all__ = [
    "Backend",
    "BackendInfo",
    "Batch",
    "BlockAllocator",
    "CacheGeometry",
    "CachePool",
    "Capabilities",
    "Declined",
    "DeviceInfo",
    "IntSet",
    "KernelRequest",
    "LatentCache",
    "LayerContext",
    "LayerRequest",
    "Layout",
    "Limit",
    "MLA",
    "MLAConfig",
    "MLAError",
    "MhaSegments",
    "MqaSegments",
    "NoBackendFits",
    "Plan",
    "Reason",
    "Rejection",
    "RopeInputs",
    "Scales",
    "SlotTargets",
    "SparseInfo",
    "Step",
    "UnsupportedError",
    "errors",
    "hookimpl",
    "ops",
    "reference",
    "registry",
]

# Public name to the module that defines it, loaded at first touch: listing and planning never import torch.
_HOME = {
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
    "KernelRequest": "request",
    "LayerRequest": "request",
    "Reason": "request",
    "Plan": "plan",
    "Rejection": "plan",
    "hookimpl": "hooks",
    "MLAError": "errors",
    "NoBackendFits": "errors",
    "UnsupportedError": "errors",
}
_MODULES = ("errors", "ops", "reference", "registry")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"mla_core.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'mla_core' has no attribute {name!r}")
    return getattr(import_module(f"mla_core.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
