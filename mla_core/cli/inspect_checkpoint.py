"""What `mla inspect` finds out: the attention of a checkpoint, its weights, and who could serve it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from mla_core.cache import layout_for, layout_ids
from mla_core.candidates import Candidate, ranked
from mla_core.capabilities import Kernel
from mla_core.checkpoint import Checkpoint, open_checkpoint
from mla_core.checkpoint_weights import LayerWeights, survey
from mla_core.cli.inspect_options import InspectOptions
from mla_core.config import IndexerConfig, MLAConfig
from mla_core.device import device_info
from mla_core.errors import CacheError, CheckpointError
from mla_core.layer_request import layer_request, layout_id
from mla_core.plan import Rejection
from mla_core.registry import Registry
from mla_core.request import DeviceInfo, LayerRequest, installed_version

__all__ = ["CacheFit", "Inspection", "KernelFit", "inspect"]

_PREFILL: tuple[Kernel, ...] = ("mha_prefill", "mqa_prefill")
_DECODE: Kernel = "mqa_decode"
# Holds an indexer's keys, not latents.
_INDEX_LAYOUT = "idx_fp8"
_DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class CacheFit:
    """One cache layout. nbytes: of a token in one layer, or None when it cannot hold this model's rows, with
    the reason in `refusal`. backends: those that serve prefill and decode over it.
    """

    layout: str
    nbytes: int | None
    refusal: str | None
    backends: tuple[str, ...]


@dataclass(frozen=True)
class KernelFit:
    """One backend and one kernel; no reasons: it would serve."""

    backend: str
    kernel: Kernel
    rejection: Rejection | None


@dataclass(frozen=True)
class Inspection:
    """A checkpoint's attention. unreadable: why its weights could not be looked at."""

    checkpoint: Checkpoint
    weights: tuple[LayerWeights, ...]
    unreadable: str | None
    request: LayerRequest
    caches: tuple[CacheFit, ...]
    kernels: tuple[KernelFit, ...]
    # Bytes of one indexer key, for each layer that runs an indexer.
    index_bytes: int | None

    @property
    def config(self) -> MLAConfig:
        return self.checkpoint.config

    @property
    def problems(self) -> tuple[str, ...]:
        """All that is wrong with the weights."""
        found = [problem for weights in self.weights for problem in weights.problems]
        if not self.checkpoint.layers:
            found.append(f"no tensor of {self.checkpoint.directory} belongs to an MLA attention")
        if self.unreadable is not None:
            found.append(self.unreadable)
        return (*found, *self._absent_layers())

    def _absent_layers(self) -> Iterable[str]:
        missing = sorted(set(self.config.attention_layers) - set(self.checkpoint.layers))
        if missing and self.checkpoint.layers:
            yield f"the config has MLA layers that the checkpoint lacks: {', '.join(map(str, missing))}"


def inspect(options: InspectOptions, registry: Registry) -> Inspection:
    """Look at a checkpoint without reading a tensor. Raises CheckpointError or ConfigError when its attention
    is none that a layer could be built for.
    """
    checkpoint = open_checkpoint(options.checkpoint)
    config = checkpoint.config
    dtype = options.dtype or _stored_dtype(checkpoint.hf_config)
    made = {"device": _device(options.device), "dtype": dtype, "tp_size": options.tp}
    request = layer_request(config, layout=layout_id(options.cache, dtype), **made)
    candidates = ranked(registry)
    try:
        weights, unreadable = survey(checkpoint, checkpoint.layers), None
    except CheckpointError as error:
        weights, unreadable = [], str(error)
    return Inspection(
        checkpoint=checkpoint,
        weights=tuple(weights),
        unreadable=unreadable,
        request=request,
        caches=tuple(_cache(name, config, request, candidates) for name in layout_ids() if _is_latent(name)),
        kernels=tuple(_kernel(candidate, request, kernel) for candidate in candidates for kernel in _KERNELS),
        index_bytes=_index_bytes(config.indexer),
    )


_KERNELS = (*_PREFILL, _DECODE)


def _is_latent(layout: str) -> bool:
    return layout != _INDEX_LAYOUT


def _stored_dtype(hf_config: Mapping[str, object]) -> str:
    """What the checkpoint says that it computes in; bfloat16 where it says nothing that a layer could use."""
    text = hf_config.get("text_config")
    for holder in (hf_config, text if isinstance(text, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            if holder.get(key) in _DTYPES:
                return str(holder[key])
    return "bfloat16"


def _device(named: str | None) -> DeviceInfo:
    if named is not None:
        return DeviceInfo.parse(named)
    return device_info(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _cache(name: str, config: MLAConfig, request: LayerRequest, candidates: list[Candidate]) -> CacheFit:
    dtype = getattr(torch, request.dtype)
    try:
        layout = layout_for(name, dtype, config.kv_lora_rank, config.qk_rope_head_dim)
    except CacheError as refusal:
        return CacheFit(name, None, str(refusal), ())
    own = request.model_copy(update={"layout": name})
    serving = tuple(candidate.name for candidate in candidates if _serves(candidate, own))
    return CacheFit(name, layout.bytes_per_token, None, serving)


def _serves(candidate: Candidate, request: LayerRequest) -> bool:
    def fits(kernel: Kernel) -> bool:
        return not candidate.objections(request, kernel, installed_version)

    return fits(_DECODE) and any(fits(kernel) for kernel in _PREFILL)


def _kernel(candidate: Candidate, request: LayerRequest, kernel: Kernel) -> KernelFit:
    found = candidate.objections(request, kernel, installed_version)
    rejection = Rejection(backend=candidate.name, kernel=kernel, reasons=tuple(found)) if found else None
    return KernelFit(candidate.name, kernel, rejection)


def _index_bytes(indexer: IndexerConfig | None) -> int | None:
    if indexer is None:
        return None
    try:
        return layout_for(_INDEX_LAYOUT, torch.bfloat16, indexer.head_dim, 0).bytes_per_token
    except CacheError:
        # Keys of a width that the layout cannot hold have no size in it.
        return None
