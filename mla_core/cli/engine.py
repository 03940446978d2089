"""A small engine: layers over one cache pool, requests on shuffled pages, one `prepare` a step.

Legend: T tokens, D model, L latent, R rope.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_core.batch import Batch
from mla_core.cache import BlockAllocator, CachePool, LatentCache
from mla_core.cli.scenario import Request, Scenario, Step
from mla_core.cli.seeds import stream
from mla_core.layer import MLA

__all__ = ["Engine", "Outcome"]

# Pages that no request gets; they stay NaN.
_SPARE_PAGES = 3
# Rows written straight into the cache at once.
_FILL_ROWS = 4096


@dataclass(frozen=True)
class Outcome:
    """What one step gave: hidden states [T, D] by layer, and how long it took."""

    step: Step
    outputs: dict[int, Tensor]
    prepare_seconds: float
    # All layers together.
    layer_seconds: float


class Engine:
    """Runs a scenario step by step. Memory that no token was written to is NaN."""

    def __init__(self, layers: Sequence[MLA], scenario: Scenario, page_size: int, seed: int) -> None:
        self.layers = layers
        self.page_size = page_size
        self._requests = {request.name: request for request in scenario.requests}
        pages = sum(-(-length // page_size) for length in scenario.lengths.values()) + _SPARE_PAGES
        first = layers[0]
        first.new_cache(0, page_size)
        self.pool = CachePool(
            first.layout,
            layers=[layer.layer_idx for layer in layers],
            num_pages=pages,
            page_size=page_size,
            device=first.device,
        )
        for layer in layers:
            _poison(self.pool.layer(layer.layer_idx))
        self._allocator = BlockAllocator(pages, page_size)
        self._random = stream(seed, "cache")
        # The allocator's page ids to the cache's: nothing lies in order.
        self._place = torch.randperm(pages, generator=self._random)
        self._started: set[str] = set()
        # By layer and request: what was written straight into the cache, as it is read back.
        self.filled: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}

    @property
    def cache_bytes(self) -> int:
        return sum(self.pool.layer(layer.layer_idx).data.nbytes for layer in self.layers)

    @torch.inference_mode()
    def run(self, step: Step, hidden: Mapping[int, Tensor]) -> Outcome:
        """One step over hidden states [T, D] by layer.

        It runs twice, storing the same rows again: the first output counts, the second time does.
        """
        # All of them before any grows: a copy takes its parent as it is before the step.
        for work in step.work:
            self._start(self._requests[work.request])
        for work in step.work:
            self._allocator.extend(work.request, work.tokens)
        batch = Batch.build(
            [work.tokens for work in step.work],
            [work.context for work in step.work],
            self._table([work.request for work in step.work]),
            self.page_size,
            device=self.layers[0].device,
        )
        outputs, _, _ = self._once(batch, hidden)
        _, prepare_seconds, layer_seconds = self._once(batch, hidden)
        return Outcome(step, outputs, prepare_seconds, layer_seconds)

    def _once(self, batch: Batch, hidden: Mapping[int, Tensor]) -> tuple[dict[int, Tensor], float, float]:
        started = self._clock()
        prepared = self.layers[0].prepare(batch, self.pool)
        planned = self._clock()
        outputs = {layer.layer_idx: layer(hidden[layer.layer_idx], prepared) for layer in self.layers}
        return outputs, planned - started, self._clock() - planned

    def _clock(self) -> float:
        device = self.layers[0].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def _start(self, request: Request) -> None:
        """Give a new request its first pages: none, its parent's, or ones with random rows in them."""
        if request.name in self._started:
            return
        self._started.add(request.name)
        if request.parent is None:
            self._allocator.allocate(request.name, request.cached)
            self._fill(request)
            return
        _, copied = self._allocator.fork(request.parent, request.name)
        if copied is not None:
            source, target = (self._place[page] for page in copied)
            for layer in self.layers:
                data = self.pool.layer(layer.layer_idx).data
                data[target] = data[source]

    def _fill(self, request: Request) -> None:
        if not request.cached:
            return
        table = self._table([request.name])[0]
        where = torch.arange(request.cached)
        slots = table[where // self.page_size] * self.page_size + where % self.page_size
        for layer in self.layers:
            cache = self.pool.layer(layer.layer_idx)
            for part in slots.split(_FILL_ROWS):
                cache.write(part.to(layer.device), *self._random_rows(layer, part.shape[0]))
            self.filled[layer.layer_idx, request.name] = self.rows(layer, request.name, request.cached)

    def _random_rows(self, layer: MLA, count: int) -> tuple[Tensor, Tensor]:
        """Rows as large as normed latents and rope keys are."""
        config = layer.config
        latent_TL = torch.randn(count, config.kv_lora_rank, generator=self._random) * config.latent_scale
        k_rope_TR = torch.randn(count, config.qk_rope_head_dim, generator=self._random)
        return latent_TL.to(layer.device, layer.dtype), k_rope_TR.to(layer.device, layer.dtype)

    def rows(self, layer: MLA, request: str, length: int) -> tuple[Tensor, Tensor]:
        """A request's first cached rows, decoded."""
        return self.pool.layer(layer.layer_idx).read(self._table([request])[0], length, torch.float32)

    def _table(self, requests: Sequence[str]) -> Tensor:
        """The block table of these requests; entries beyond a request's need name no page."""
        table = self._allocator.table(requests).long()
        return torch.where(table < 0, -1, self._place[table.clamp(min=0)])


def _poison(cache: LatentCache) -> None:
    """All bits set is NaN in every float format that a layout stores."""
    cache.data.view(torch.uint8).fill_(0xFF)
