"""Tensors as FlashInfer's kernels can read and write them, and scratch memory on the device.

Kernels move 16 bytes at a time, so rows must start at multiples of 16 bytes; outer strides are free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_core.errors import CacheError, ContractError

__all__ = [
    "check_scale",
    "multiprocessors",
    "readable",
    "readable_cache",
    "scratch",
    "writable",
    "writable_lse",
]

_VECTOR_BYTES = 16
# Kernels keep strides in 32 bits; offsets are computed in 64.
_MAX_STRIDE = 1 << 32


def readable(x: Tensor) -> Tensor:
    """The tensor itself, or a copy when its rows lie where kernels cannot read them."""
    return x if _aligned(x) else x.clone(memory_format=torch.contiguous_format)


def readable_cache(data: Tensor) -> Tensor:
    """A cache's pages. Raises CacheError when kernels cannot read them: a cache is never copied."""
    if not _aligned(data) or data.stride(0) >= _MAX_STRIDE:
        raise CacheError(
            f"FlashInfer reads cache rows that start at multiples of {_VECTOR_BYTES} bytes, in pages less "
            f"than 2^32 elements apart; this cache starts {data.data_ptr() % _VECTOR_BYTES} bytes behind one "
            f"and has strides {data.stride()}; use new_cache, or a slice of whole pages"
        )
    return data


def writable(out: Tensor) -> Tensor:
    """The tensor itself, or a buffer to be copied into it afterwards."""
    return out if _aligned(out) else torch.empty(out.shape, dtype=out.dtype, device=out.device)


def writable_lse(lse_TH: Tensor | None) -> Tensor | None:
    """As `writable`; FlashInfer writes lse without strides."""
    if lse_TH is None or lse_TH.is_contiguous():
        return lse_TH
    return torch.empty(lse_TH.shape, dtype=lse_TH.dtype, device=lse_TH.device)


def check_scale(asked: float, planned: float) -> None:
    """FlashInfer fixes the softmax scale when it plans."""
    if asked != planned:
        raise ContractError(
            f"attention was planned with softmax scale {planned} and called with {asked}; prepare the step "
            "on a layer of the same config"
        )


def scratch(size: int, device: torch.device) -> Tensor:
    """Memory that holds partial results while a kernel runs."""
    return torch.empty(size, dtype=torch.uint8, device=device)


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _aligned(x: Tensor) -> bool:
    width = _VECTOR_BYTES // x.element_size()
    rows, heads, last = x.stride()
    return last == 1 and heads % width == 0 and rows % width == 0 and x.data_ptr() % _VECTOR_BYTES == 0
