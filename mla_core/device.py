"""What selection needs to know about a torch device."""

from __future__ import annotations

import torch

from mla_core.request import DeviceInfo

__all__ = ["device_info"]

# From Hopper on, kernels may use instructions of exactly one architecture (the suffix "a").
_FIRST_ARCH_SPECIFIC = 90


def device_info(device: torch.device) -> DeviceInfo:
    """Kind, architecture and name of a torch device."""
    if device.type != "cuda":
        return DeviceInfo(kind=device.type)
    major, minor = torch.cuda.get_device_capability(device)
    version = 10 * major + minor
    suffix = "a" if version >= _FIRST_ARCH_SPECIFIC else ""
    return DeviceInfo(kind="cuda", arch=f"sm_{version}{suffix}", name=torch.cuda.get_device_name(device))
