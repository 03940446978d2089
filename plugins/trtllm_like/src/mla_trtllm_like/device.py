"""What launches need to know about devices and cache tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mla_core import LatentCache

__all__ = ["CacheBytes", "Limits", "cached_bytes", "limits", "on_device"]

_PLAIN = frozenset({"fp32", "fp16", "bf16"})


@dataclass(frozen=True)
class Limits:
    """Multiprocessors, and bytes of shared memory a program may use."""

    multiprocessors: int
    shared_memory: int


@lru_cache
def limits(device: torch.device) -> Limits:
    """Of a CUDA device; a CPU stands in as a small one, for the interpreter."""
    if device.type != "cuda":
        return Limits(multiprocessors=4, shared_memory=1 << 30)
    properties = torch.cuda.get_device_properties(device)
    return Limits(properties.multi_processor_count, properties.shared_memory_per_block_optin)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the tensors' device, whatever the current one is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class CacheBytes:
    """A cache as the kernels read it.

    name: its layout, "plain" for the unquantised ones. strides: of a page, a token (0 in planes) and an
    element. typed: fields of several bytes start where loads of that size can reach them. latent_scale and
    rope_scale: factors that all decoded values share.
    """

    tensor: Tensor
    name: str
    strides: tuple[int, int, int]
    typed: bool
    latent_scale: float
    rope_scale: float


def cached_bytes(cache: LatentCache) -> CacheBytes:
    """The cache's tensor and what is needed to address and decode it."""
    data, name, scales = cache.data, cache.layout.id, cache.scales
    if data.dtype.itemsize == 1:
        data = data.view(torch.uint8)
    page, token, unit = data.stride() if data.dim() == 3 else (data.stride(0), 0, data.stride(1))
    typed = unit == 1 and all(at % 4 == 0 for at in (data.data_ptr(), page, token))
    factors = {
        "fp8_e4m3": (scales.k_scale, scales.k_scale),
        "nvfp4": (scales.global_scale, scales.global_scale),
        "nvfp4_rope_bf16": (scales.global_scale, 1.0),
    }
    return CacheBytes(
        data, "plain" if name in _PLAIN else name, (page, token, unit), typed, *factors.get(name, (1.0, 1.0))
    )
