"""Strided views of every tensor a kernel is given: handled or copied, never misread."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mla_core.cache.latent import LatentCache
from mla_core.conformance.bench import Bench, Unavailable, Wrong
from mla_core.conformance.checks.basic import lengths
from mla_core.conformance.checks.batch import scene_of
from mla_core.conformance.scenes import MhaScene, MqaScene, poison
from mla_core.errors import CacheError

__all__ = ["cache", "inputs", "metadata"]


def inputs(bench: Bench) -> None:
    """Queries (and keys and values) as slices of wider tensors, with heads and rows apart."""
    scene = scene_of(bench)
    if isinstance(scene, MhaScene):
        tensors = {name: _spread(getattr(scene, name)) for name in ("q_THE", "k_SHE", "v_SHV")}
        bench.check(replace(scene, **tensors))
    else:
        bench.check(replace(scene, q_THX=_spread(scene.q_THX), _answers={}))


def metadata(bench: Bench) -> None:
    """Block table, lengths and starts as views with gaps."""
    scene = bench.mqa(lengths(bench))
    segments = scene.segments()
    views = {name: _gapped(getattr(segments, name)) for name in ("seq_lens", "query_start_loc")}
    bench.check(replace(scene, block_table=_gapped(scene.block_table), **views, _answers={}))


def cache(bench: Bench) -> None:
    """The cache as every second page of a larger tensor, whose other pages stay as they are."""
    scene = bench.mqa(lengths(bench))
    data = scene.cache.data
    larger = data.new_empty(2 * data.shape[0] + 1, *data.shape[1:])
    poison(larger)
    view = larger[1::2]
    view.copy_(data)
    before = larger.clone().view(torch.uint8)
    bench.check(replace(scene, cache=_over(view, scene), _answers={}))
    if not torch.equal(larger.view(torch.uint8), before):
        raise Wrong("wrote into the tensor that the cache is a slice of")


def _over(view: Tensor, scene: MqaScene) -> LatentCache:
    old = scene.cache
    try:
        return LatentCache.from_tensor(view, old.layout, old.page_size, scales=old.scales)
    except CacheError as error:
        raise Unavailable(f"layout {old.layout.id} takes no strided cache: {error}") from error


def _spread(x: Tensor) -> Tensor:
    """The same values with NaN between rows, heads and elements' ends."""
    wide = x.new_full((2 * x.shape[0] + 1, x.shape[1] + 2, x.shape[2] + 5), torch.nan)
    view = wide[1::2, 1:-1, 3:-2]
    return view.copy_(x)


def _gapped(x: Tensor) -> Tensor:
    """The same integers, every second element of a wider tensor of nonsense."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), -7)
    view = wide[..., 1::2]
    return view.copy_(x)
