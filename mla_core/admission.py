"""What a layer checks before it runs: the call, the step, the cache. All of it raises, nothing computes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_core.cache import CachePool, LatentCache
from mla_core.capabilities import Kernel
from mla_core.errors import CacheError, ContractError, StaleCacheWarning, UnsupportedError, WeightsNotReady
from mla_core.request import LayerRequest, reasons
from mla_core.step import Step

if TYPE_CHECKING:
    from mla_core.layer import MLA
    from mla_core.quant.fp4_hidden import Fp4Hidden

__all__ = ["check_cache", "check_call", "check_graph", "check_lse", "check_page_size", "warn_if_stale"]


def check_call(
    layer: MLA, hidden_TD: Tensor | Fp4Hidden, step: Step, latent_TX: Tensor | None = None
) -> None:
    """Is the layer ready, and do the hidden states, given latents and the step fit it and each other?"""
    if not layer.ready:
        missing = sorted(layer.expected_shapes().keys() - layer.loaded)
        raise WeightsNotReady(
            f"layer {layer.layer_idx} was used before its weights were complete; load_hf has not seen "
            f"{missing}, and after changing parameters by hand prepare_weights() must run"
        )
    if hidden_TD.requires_grad and torch.is_grad_enabled():
        raise ContractError(
            "the layer is for inference only, but hidden states require grad; detach them, or call it "
            "under torch.no_grad()"
        )
    _check_rows(layer, step, "hidden states", hidden_TD, layer.config.hidden_size)
    if latent_TX is not None:
        _check_rows(layer, step, "latent_TX", latent_TX, layer.config.latent_width)
    if step.signature is not layer.signature:
        raise ContractError(
            "the step was prepared by a layer with another plan, config, cache layout or workspace; "
            "call prepare on this layer"
        )
    _mark_written(layer, step)


def _check_rows(layer: MLA, step: Step, name: str, given: Tensor | Fp4Hidden, width: int) -> None:
    rows = step.batch.num_rows
    if given.shape != (rows, width) or given.dtype != layer.dtype:
        raise ContractError(
            f"{name} must be [{rows}, {width}] of {layer.dtype} for this step, "
            f"got {list(given.shape)} of {given.dtype}"
        )


def _mark_written(layer: MLA, step: Step) -> None:
    cache = step.cache_of(layer)
    if cache.layer_idx not in (None, layer.layer_idx):
        raise CacheError(
            f"the step's cache was made for layer {cache.layer_idx}, not layer {layer.layer_idx}; "
            "share a step between layers through a CachePool"
        )
    warn_if_stale(layer, step)
    cache.weights_version = layer.weights_version


def warn_if_stale(layer: MLA, step: Step) -> None:
    """Once for every layer and reload; `prepare` knows one layer of a pool, `forward` the others."""
    cache = step.cache_of(layer)
    if any(step.batch.context_lens) and cache.weights_version not in (None, layer.weights_version):
        cache.weights_version = layer.weights_version
        warnings.warn(
            f"layer {layer.layer_idx} loaded weights after its cache was written; the cached tokens are "
            "stale, prefill them again",
            StaleCacheWarning,
            stacklevel=3,
        )


def check_cache(layer: MLA, cache: LatentCache | CachePool) -> None:
    """Has the cache the layer's layout and device, and a page size its backends declare?"""
    geometry = cache.geometry
    if geometry.layout != layer.layout:
        raise CacheError(
            f"the cache has layout {geometry.layout.id!r} for {geometry.layout.latent} + "
            f"{geometry.layout.rope} values, this layer needs {layer.layout.id!r} "
            f"for {layer.layout.latent} + {layer.layout.rope}"
        )
    if geometry.device != layer.device:
        raise CacheError(f"the cache is on {geometry.device}, the layer on {layer.device}")
    check_page_size(layer, geometry.page_size)


def check_page_size(layer: MLA, page_size: int) -> None:
    """Do all chosen backends declare this page size?"""
    if page_size in layer.page_sizes:
        return
    if page_size < 1:
        raise CacheError(f"page_size must be at least 1, got {page_size}")
    _require(layer, layer.request.at_page_size(page_size), "mqa_decode", "mqa_prefill", "append")
    layer.page_sizes.add(page_size)


def check_graph(layer: MLA) -> None:
    """Was the layer planned for graph capture?"""
    if layer.request.cuda_graph is None:
        raise ContractError(
            "a graph step needs a layer whose backend can be captured; build it with "
            "MLA(..., cuda_graph='decode')"
        )


def check_lse(layer: MLA) -> None:
    """Prefill always returns lse; decode need not."""
    if "lse" not in layer.kernels.offered[layer.plan.choices["mqa"]].returns:
        _require(layer, layer.request.model_copy(update={"lse": True}), "mqa_decode")


def _require(layer: MLA, request: LayerRequest, *kernels: Kernel) -> None:
    """Refuse what a chosen backend did not declare when the layer was built."""
    for name, offered in layer.kernels.offered.items():
        for kernel in sorted(layer.plan.kernels_of(name).intersection(kernels)):
            found = reasons(offered, request.kernel_request(kernel))
            if found:
                raise UnsupportedError(name, found, kernel=kernel)
