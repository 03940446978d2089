"""What selection needs to know about a torch device."""

from __future__ import annotations

import torch

from mla_core.errors import ConfigError
from mla_core.request import DeviceInfo

__all__ = ["device_info", "usable_device"]

# From Hopper on, kernels may use instructions of exactly one architecture (the suffix "a").
_FIRST_ARCH_SPECIFIC = 90


def usable_device(device: torch.device | str) -> torch.device:
    """The device as tensors on it report it: "cuda" becomes the current one, with its index.

    Raises ConfigError when layers cannot run on it.
    """
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"layers run on cpu and cuda devices, not on {str(device)!r}")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {str(device)!r} was asked for, but torch {torch.__version__} sees no CUDA")
    return torch.empty(0, device=found).device


def device_info(device: torch.device) -> DeviceInfo:
    """Kind, architecture and name of a torch device."""
    if device.type == "cpu":
        return DeviceInfo(kind="cpu")
    major, minor = torch.cuda.get_device_capability(device)
    version = 10 * major + minor
    suffix = "a" if version >= _FIRST_ARCH_SPECIFIC else ""
    return DeviceInfo(kind="cuda", arch=f"sm_{version}{suffix}", name=torch.cuda.get_device_name(device))
