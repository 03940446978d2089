"""Layouts write and read the same bytes on CUDA as on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_core.cache import LatentCache, Scales, layout_for, layout_ids

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS = 1000
# Not powers of two, so that a division that rounds twice shows.
SCALES = Scales(k_scale=0.0371, global_scale=0.00213)


def rows(latent: int, rope: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Random rows of many sizes, with what is special sprinkled in."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, latent + rope, generator=generator) * torch.logspace(-6, 6, TOKENS).unsqueeze(1)
    for token, special in enumerate((0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40)):
        x[token, 3] = special
    x[10] = 0.0
    return x[:, :latent].to(dtype), x[:, latent:].to(dtype)


def filled(layout_id: str, dtype: torch.dtype, device: str, *, power_of_two: bool = False) -> LatentCache:
    widths = (128, 0) if layout_id == "idx_fp8" else (512, 64)
    scales = Scales(SCALES.k_scale, SCALES.global_scale, power_of_two)
    cache = LatentCache.allocate(layout_for(layout_id, dtype, *widths), 16, 64, device, scales=scales)
    latent, rope = rows(*widths, dtype)
    cache.write(torch.arange(TOKENS, device=device), latent.to(device), rope.to(device))
    return cache


def different_values(left: LatentCache, right: LatentCache) -> int:
    """Values that decode differently; the sign of a NaN is not specified, so NaNs count as equal."""
    tables = [torch.arange(16, device=cache.data.device) for cache in (left, right)]
    pairs = (cache.read(table, TOKENS) for cache, table in zip((left, right), tables, strict=True))
    a, b = (torch.cat(pair, dim=1).float().cpu() for pair in pairs)
    return int((~((a == b) | (a.isnan() & b.isnan()))).sum())


def _bytes_of_a_nan(layout_id: str) -> int:
    return {"fp32": 4, "fp16": 2, "bf16": 2}.get(layout_id, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("layout_id", layout_ids())
def test_a_cuda_cache_holds_the_bytes_of_a_cpu_cache(layout_id, power_of_two, dtype):
    on_cpu = filled(layout_id, dtype, "cpu", power_of_two=power_of_two).data.view(torch.uint8)
    on_cuda = filled(layout_id, dtype, "cuda", power_of_two=power_of_two).data.view(torch.uint8).cpu()
    # Only one value may differ: which NaN a conversion makes, sign and payload, is not specified.
    assert int((on_cpu != on_cuda).sum()) <= _bytes_of_a_nan(layout_id)


@pytest.mark.parametrize("layout_id", layout_ids())
def test_a_cuda_cache_reads_as_a_cpu_cache(layout_id):
    on_cpu = filled(layout_id, torch.bfloat16, "cpu")
    on_cuda = LatentCache.from_tensor(on_cpu.data.cuda(), on_cpu.layout, 64, scales=on_cpu.scales)
    assert different_values(on_cpu, on_cuda) == 0


def test_a_division_that_rounds_twice_would_be_noticed():
    x = torch.randn(100000, generator=torch.Generator().manual_seed(0)).cuda()
    assert (x / x.new_full((), 448.0) != x * (1.0 / x.new_full((), 448.0))).any()
