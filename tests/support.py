"""What tests of the layer share: small models, requests over a hostile cache, and comparison with the oracle.

Memory that no live token owns is NaN, pages are shuffled, and unneeded block table entries are nonsense.
Legend: S tokens of one request, T tokens of one step, D model, H heads, V value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mla_core import MLA, Batch, LatentCache, MLAConfig
from mla_core.reference import Output, attention_layer
from mla_core.weights import expected_shapes

# Bounds of `relative_error`. In float32 the errors are about a tenth of it, in 16 bits half.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}

# What a block table may hold where a request needs no page.
HOSTILE = (-1, 2**31 - 1, -(2**31), 10**6, 0)

# New tokens of each request in one step, in the order of the batch: (request, tokens).
Counts = Sequence[tuple[int, int]]


def tiny_config(**changes: Any) -> MLAConfig:
    """A small model whose dims all differ, so that mixing two up cannot go unnoticed."""
    dims = {
        "hidden_size": 40,
        "num_heads": 3,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    }
    return MLAConfig(**{**dims, **changes})


def random_weights(config: MLAConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Weights under Hugging Face names, of a size that makes attention neither flat nor a single spike."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(MLA(config, backend="vanilla", dtype=dtype))
    return {name: _random(name, shape, generator).to(dtype) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    if name.endswith("bias"):
        return 0.3 * noise
    # Queries twice as large: scores then spread over a few units.
    return noise * (2 if name.startswith("q_") else 1) * shape[-1] ** -0.5


def random_hidden(tokens: int, config: MLAConfig, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(tokens, config.hidden_size, generator=generator).to(dtype)


def build(config: MLAConfig, weights: dict[str, Tensor] | None = None, **options: Any) -> MLA:
    """A loaded layer; float32 and the vanilla backend unless the options say otherwise."""
    layer = MLA(config, **{"backend": "vanilla", "dtype": torch.float32, **options})
    layer.load_hf(random_weights(config, dtype=layer.dtype) if weights is None else weights)
    return layer


def poisoned_cache(layer: MLA, num_pages: int, page_size: int) -> LatentCache:
    cache = layer.new_cache(num_pages, page_size)
    cache.data.fill_(torch.nan)
    return cache


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Error over size of the worst row; in 16 bits, where single rows of a tiny model scatter, of all rows.

    Infinite when anything is not finite.
    """
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} against {tuple(expected.shape)}"
    if actual.numel() == 0:
        return 0.0
    dim = 1 if actual.dtype.itemsize > 2 else (0, 1)
    actual, expected = actual.double().flatten(1), expected.double().flatten(1)
    error = (actual - expected).norm(dim=dim) / expected.norm(dim=dim)
    return float(error.nan_to_num(nan=torch.inf).max())


@dataclass
class Request:
    """One request's whole sequence, its pages in order of position, and how much of it has been computed."""

    hidden_SD: Tensor
    pages: list[int]
    done: int = 0


class World:
    """A layer, a poisoned cache with shuffled pages, and requests that advance through it step by step.

    The oracle keeps to the first layer's config. For negative controls, `layer` may be replaced, and
    `distort` changes the block table that it reads through.
    """

    def __init__(
        self,
        layer: MLA,
        lengths: Sequence[int],
        *,
        weights: dict[str, Tensor] | None = None,
        page_size: int = 4,
        seed: int = 0,
        table_dtype: torch.dtype = torch.int32,
        make_cache: Callable[[MLA, int, int], LatentCache] = poisoned_cache,
    ) -> None:
        self.layer, self.page_size, self.table_dtype = layer, page_size, table_dtype
        self.config = layer.config
        self.weights = random_weights(layer.config, dtype=layer.dtype) if weights is None else weights
        needed = [-(-length // page_size) for length in lengths]
        num_pages = sum(needed) + 3
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()
        self.requests = [
            Request(
                random_hidden(length, layer.config, seed + index, layer.dtype),
                [order.pop() for _ in range(pages)],
            )
            for index, (length, pages) in enumerate(zip(lengths, needed, strict=True))
        ]
        self.cache = make_cache(layer, num_pages, page_size)
        self.distort: Callable[[Tensor], Tensor] = lambda table: table
        self._oracle: dict[int, Output] = {}

    def expected(self, request: int) -> Output:
        """The oracle over the request's whole sequence."""
        if request not in self._oracle:
            hidden_SD = self.requests[request].hidden_SD
            self._oracle[request] = attention_layer(self.config, self.weights, hidden_SD)
        return self._oracle[request]

    def batch(self, counts: Counts, **capacity: int) -> Batch:
        """The next step's batch; `capacity` is max_tokens and max_requests."""
        queries = [count for _, count in counts]
        contexts = [self.requests[request].done for request, _ in counts]
        table = self._table([request for request, _ in counts])
        batch = Batch.build(queries, contexts, table, self.page_size, **capacity)
        return Batch(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=self.distort(batch.block_table),
            slot_mapping=batch.slot_mapping,
            positions=batch.positions,
        )

    def _table(self, requests: Sequence[int]) -> Tensor:
        width = max((len(self.requests[request].pages) for request in requests), default=0) + 2
        rows = [[*self.requests[r].pages, *HOSTILE, *HOSTILE, *[-1] * width][:width] for r in requests]
        return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width).to(self.table_dtype)

    def hidden(self, counts: Counts, rows: int | None = None) -> Tensor:
        """Hidden states of the step's tokens; rows of padding are NaN."""
        new = [self._new(request, count) for request, count in counts]
        live = torch.cat([self.requests[0].hidden_SD[:0], *new])
        padding = live.new_full(((rows or len(live)) - len(live), live.shape[1]), torch.nan)
        return torch.cat([live, padding])

    def _new(self, request: int, count: int) -> Tensor:
        done, hidden_SD = self.requests[request].done, self.requests[request].hidden_SD
        assert done + count <= len(hidden_SD), "the request has no more tokens"
        return hidden_SD[done : done + count]

    def outputs(self, counts: Counts, **capacity: int) -> list[Tensor]:
        """Advance the requests in one step; each one's new hidden states."""
        batch = self.batch(counts, **capacity)
        out_TD = self.layer(self.hidden(counts, batch.num_rows), self.layer.prepare(batch, self.cache))
        padding = out_TD[batch.num_tokens :]
        assert torch.equal(padding, torch.zeros_like(padding)), "padded rows must come back as zeros"
        return self._advance(counts, out_TD)

    def attention(self, counts: Counts) -> list[tuple[Tensor, Tensor]]:
        """Advance the requests in one step; each one's attention values and lse, before gate and o_proj."""
        batch = self.batch(counts)
        step = self.layer.prepare(batch, self.cache)
        values_THV, lse_TH = self.layer.attention(self.hidden(counts), step, return_lse=True)
        queries = [count for _, count in counts]
        self._advance(counts, values_THV)
        return list(zip(values_THV.split(queries), lse_TH.split(queries), strict=True))

    def _advance(self, counts: Counts, rows: Tensor) -> list[Tensor]:
        queries = [count for _, count in counts]
        for request, count in counts:
            self.requests[request].done += count
        return list(rows[: sum(queries)].split(queries))

    def error(self, counts: Counts, **capacity: int) -> float:
        """Advance the requests in one step; the worst request's error against the oracle."""
        return self.errors([counts], **capacity)

    def errors(self, steps: Sequence[Counts], **capacity: int) -> float:
        """Run steps one after the other; the worst request's error over all its new rows."""
        starts = [request.done for request in self.requests]
        rows: dict[int, list[Tensor]] = {}
        for counts in steps:
            for (request, _), out in zip(counts, self.outputs(counts, **capacity), strict=True):
                rows.setdefault(request, []).append(out)
        return max(
            (self._error(request, starts[request], torch.cat(outs)) for request, outs in rows.items()),
            default=0.0,
        )

    def _error(self, request: int, start: int, out_TD: Tensor) -> float:
        return relative_error(out_TD, self.expected(request).hidden_SD[start : start + len(out_TD)])


@dataclass(frozen=True)
class Scenario:
    """How requests of given lengths go through a layer built with given options."""

    lengths: tuple[int, ...]
    steps: tuple[Counts, ...]
    options: dict[str, Any]

    def world(self, config: MLAConfig, *, weights: dict[str, Tensor] | None = None, **options: Any) -> World:
        """`page_size`, `seed`, `table_dtype` and `make_cache` go to the world, the rest to the layer."""
        own = {name: options.pop(name) for name in _WORLD_OPTIONS & options.keys()}
        return World(build(config, weights, **self.options, **options), self.lengths, weights=weights, **own)

    def error(self, config: MLAConfig, **options: Any) -> float:
        return self.world(config, **options).errors(self.steps)


_WORLD_OPTIONS = frozenset({"page_size", "seed", "table_dtype", "make_cache"})

SCENARIOS = {
    "context": Scenario((13,), (((0, 13),),), {}),
    "cached_prefix": Scenario((17,), (((0, 9),), ((0, 8),)), {}),
    # The last chunk spans three requests, and the one in the middle has nothing cached.
    "chunked_prefill": Scenario(
        (17, 6, 8), (((0, 9), (2, 3)), ((0, 8), (1, 6), (2, 5))), {"workspace_tokens": 4}
    ),
    "absorbed_context": Scenario((17,), (((0, 9),), ((0, 8),)), {"prefill_form": "absorb"}),
    "decode": Scenario((12, 7), (((0, 9), (1, 5)), ((1, 1), (0, 1)), ((0, 1), (1, 1)), ((0, 1),)), {}),
    "verify": Scenario(
        (16, 11), (((0, 7), (1, 9)), ((1, 2), (0, 4)), ((0, 4),), ((0, 1),)), {"max_decode_query_len": 4}
    ),
    "mixed": Scenario(
        (14, 12, 15, 9, 6),
        (((1, 6), (2, 7), (4, 4)), ((2, 1), (0, 14), (4, 2), (1, 6), (3, 9)), ((2, 7),)),
        {"max_decode_query_len": 3, "workspace_tokens": 5},
    ),
}


@contextmanager
def fill_uninitialized() -> Iterator[None]:
    """torch.empty gives NaN (the largest value for integers) instead of whatever was there."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
