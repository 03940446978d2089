"""The contract between the core and a kernel package.

A backend is a class. The core builds one instance a layer, asks it to prepare each engine step once, and
calls the kernels it declared. Legend: T new tokens, S keys, B requests, H heads, L latent, N nope, R rope,
V value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from mla_core.cache.latent import CacheGeometry, LatentCache, SlotTargets
from mla_core.capabilities import Kernel
from mla_core.errors import UnsupportedError
from mla_core.manifest import BackendInfo
from mla_core.request import LayerRequest, reasons

__all__ = ["Backend", "LayerContext", "MhaSegments", "MqaSegments"]


@dataclass(frozen=True)
class LayerContext:
    """What a backend learns when a layer is built: the request, the kernels it was chosen for, its options,
    and the numbers.
    """

    request: LayerRequest
    kernels: frozenset[Kernel]
    options: Mapping[str, Any]
    softmax_scale: float
    device: torch.device
    dtype: torch.dtype
    # Page sizes that `require` has already allowed: `prepare` runs at every step.
    _page_sizes: set[int] = field(default_factory=set, compare=False, repr=False)

    def require(self, info: BackendInfo, *, page_size: int | None = None) -> None:
        """Refuse what the manifest does not offer: UnsupportedError, with every field that does not fit.

        A backend calls `context.require(INFO)` first in its constructor, and
        `context.require(INFO, page_size=geometry.page_size)` in `prepare` when it does not take every page
        size. Selection has asked the same question before; this is for those who build a backend without it.
        """
        if page_size in self._page_sizes:
            return
        request = self.request if page_size is None else self.request.at_page_size(page_size)
        for kernel in sorted(self.kernels):
            found = reasons(info.capabilities, request.kernel_request(kernel))
            if found:
                raise UnsupportedError(info.name, found, kernel=kernel)
        if page_size is not None:
            self._page_sizes.add(page_size)


@dataclass(eq=False)
class MhaSegments:
    """Expanded attention over packed requests: request b's queries are rows query_start_loc[b] to [b+1],
    its keys rows key_start_loc[b] to [b+1].

    causal: its last query sees all its keys, each earlier query one key less. `query_lens` and `key_lens`
    are host mirrors. `meta` is what the backend's `prepare` returned for this object.
    """

    query_start_loc: Tensor
    key_start_loc: Tensor
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    causal: bool
    meta: Any = None


@dataclass(eq=False)
class MqaSegments:
    """Absorbed attention over the paged cache: request b's queries are rows query_start_loc[b] to [b+1],
    its keys the first seq_lens[b] tokens of the pages in block_table[b].

    Causal as in MhaSegments. Page ids a request does not need may be anything, and so may unused bytes of
    its pages.

    graph_rows: only of a step to be captured in a CUDA graph: how many rows the queries have, padding
    included. Such segments are refreshed in place; rows, requests and table width stay as many as they were.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    causal: bool = True
    meta: Any = None
    graph_rows: int | None = None


class Backend(Protocol):
    """What a kernel package implements. Only `prepare` and the kernels it declares are needed.

    Every kernel fills `out` completely, and `lse` when one is given: float32, natural log of the sum of
    exp(scale * score), shape [T, H]. A row that sees no key gets output 0 and lse -inf. Refusals belong in
    `__init__`, for page sizes in `prepare` (see `LayerContext.require`), never in a kernel.
    """

    def __init__(self, context: LayerContext) -> None: ...

    def prepare(self, kernel: str, segments: MhaSegments | MqaSegments, geometry: CacheGeometry) -> Any:
        """Host work for one engine step, shared by all layers; what it returns becomes `segments.meta`.

        kernel: the declared name, "mha_prefill", "mqa_decode" or "mqa_prefill".
        When `segments.meta` is already there, a captured graph may hold its tensors: refresh it in place and
        return it. The segments of a graph step cover a fixed capacity; requests that are padding have query
        length 0, and rows beyond query_start_loc[-1] belong to nobody.
        """

    def mha(
        self,
        q_THE: Tensor,
        k_SHE: Tensor,
        v_SHV: Tensor,
        segments: MhaSegments,
        scale: float,
        out_THV: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        """Kernel mha_prefill: attention in the expanded form, E = N + R. Tensors may be strided."""

    def mqa(
        self,
        q_THL: Tensor,
        cache: LatentCache,
        segments: MqaSegments,
        scale: float,
        out_THL: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        """Kernels mqa_decode and mqa_prefill: q_THL is [T, H, L + R]; all heads share the cached row as
        key, and its first L values as value; out_THL is [T, H, L], or [T, H, V] when the backend owns
        v_up."""

    def append(self, cache: LatentCache, targets: SlotTargets, latent_TL: Tensor, k_rope_TR: Tensor) -> None:
        """Owned stage append: store the rotated rows of the new tokens."""

    def rope_append(
        self,
        cache: LatentCache,
        targets: SlotTargets,
        q_rope_THR: Tensor,
        latent_TL: Tensor,
        k_rope_TR: Tensor,
        rope: RopeInputs,
    ) -> None:
        """Owned stages rope and append: rotate q_rope_THR and k_rope_TR in place, then store the rows."""


@dataclass(frozen=True)
class RopeInputs:
    """Rotation of one step's tokens: cosine and sine [T, R/2] in float32, amplitude included, and the
    pairing style.
    """

    style: str
    cos_TF: Tensor
    sin_TF: Tensor
    positions_T: Tensor = field(repr=False)
