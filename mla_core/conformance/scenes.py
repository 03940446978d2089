"""Inputs of one kernel call in hostile memory, and what the oracle expects of it.

Pages are shuffled; block tables hold nonsense where nothing is needed; bytes that no token owns are NaN.
Legend: T query rows, S keys, B requests, H heads, E = N + R, X = L + R, L latent, R rope, V value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from mla_core.backend import MhaSegments, MqaSegments
from mla_core.cache.latent import LatentCache
from mla_core.cache.layout import layout_for
from mla_core.conformance.oracle import Answer, attend, join
from mla_core.conformance.tolerances import SPREAD
from mla_core.request import LayerRequest

__all__ = ["HOSTILE", "Lengths", "MhaScene", "MqaScene", "mha_scene", "mqa_scene", "new_cache", "poison"]

# What a block table may hold where a request needs no page.
HOSTILE = (-1, 2**31 - 1, -(2**31), 10**6)


@dataclass(frozen=True)
class Lengths:
    """New tokens and keys of each request; causal or not."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = True

    def seen(self, request: int, fewer: int = 0) -> list[int]:
        """Keys that each query row of a request sees; `fewer` is the fault "mask"."""
        queries, keys = self.queries[request], self.keys[request]
        last = [keys - (queries - 1 - t if self.causal else 0) for t in range(queries)]
        return [max(seen - fewer, 0) for seen in last]

    def starts(self, lengths: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@dataclass(frozen=True, eq=False)
class MhaScene:
    """One call of `mha`."""

    lengths: Lengths
    q_THE: Tensor
    k_SHE: Tensor
    v_SHV: Tensor
    scale: float
    rope: int

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"q": self.q_THE, "k": self.k_SHE, "v": self.v_SHV}

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return (*self.q_THE.shape[:2], self.v_SHV.shape[2])

    def segments(self) -> MhaSegments:
        lengths, device = self.lengths, self.q_THE.device
        starts = [lengths.starts(counts, device) for counts in (lengths.queries, lengths.keys)]
        return MhaSegments(*starts, lengths.queries, lengths.keys, lengths.causal)

    def expected(self, control: str | None = None) -> Answer:
        """The oracle's answer, or one with a deliberate fault."""
        q_THE, scale, fewer = _faulty(self.q_THE, self.scale, self.rope, control)
        answers, row, key = [], 0, 0
        for b, (queries, keys) in enumerate(zip(self.lengths.queries, self.lengths.keys, strict=True)):
            rows, columns = slice(row, row + queries), slice(key, key + keys)
            seen = self.lengths.seen(b, fewer)
            answers.append(attend(q_THE[rows], self.k_SHE[columns], self.v_SHV[columns], seen, scale))
            row, key = rows.stop, columns.stop
        return _based(join(answers, self.q_THE.shape[1], self.v_SHV.shape[2]), control)


@dataclass(frozen=True, eq=False)
class MqaScene:
    """One call of `mqa`: queries, the paged cache, and each request's row of pages."""

    lengths: Lengths
    q_THX: Tensor
    cache: LatentCache
    block_table: Tensor
    scale: float
    # Multiplied into the latent result by a backend that owns v_up, [H, L, V].
    w_uv_HLV: Tensor | None = None
    seq_lens: Tensor | None = None
    query_start_loc: Tensor | None = None
    # Expected answers are not needed twice.
    _answers: dict[str | None, Answer] = field(default_factory=dict, repr=False)

    @property
    def inputs(self) -> dict[str, Tensor]:
        found = {"q": self.q_THX, "block_table": self.block_table}
        optional = {"seq_lens": self.seq_lens, "query_start_loc": self.query_start_loc}
        return {**found, **{name: value for name, value in optional.items() if value is not None}}

    @property
    def out_shape(self) -> tuple[int, int, int]:
        width = self.cache.layout.latent if self.w_uv_HLV is None else self.w_uv_HLV.shape[2]
        return (*self.q_THX.shape[:2], width)

    def segments(self) -> MqaSegments:
        lengths, device = self.lengths, self.q_THX.device
        starts, seq_lens = self.query_start_loc, self.seq_lens
        if starts is None:
            starts = lengths.starts(lengths.queries, device)
        if seq_lens is None:
            seq_lens = torch.tensor(lengths.keys, dtype=torch.int32, device=device)
        made = (starts, seq_lens, self.block_table, lengths.queries, lengths.keys)
        return MqaSegments(*made, causal=lengths.causal)

    def expected(self, control: str | None = None) -> Answer:
        """The oracle's answer over the cache's decoded rows, or one with a deliberate fault."""
        if control not in self._answers:
            self._answers[control] = self._expected(control)
        return self._answers[control]

    def _expected(self, control: str | None) -> Answer:
        rope = self.cache.layout.rope
        q_THX, scale, fewer = _faulty(self.q_THX, self.scale, rope, control)
        answers, row = [], 0
        for b, (queries, keys) in enumerate(zip(self.lengths.queries, self.lengths.keys, strict=True)):
            key_SX = self._rows(b, keys, shifted=control == "page")
            key_SHX = key_SX.unsqueeze(1).expand(-1, q_THX.shape[1], -1)
            value_SHL = key_SHX[..., : self.cache.layout.latent]
            rows = slice(row, row + queries)
            answers.append(attend(q_THX[rows], key_SHX, value_SHL, self.lengths.seen(b, fewer), scale))
            row = rows.stop
        answer = _based(join(answers, q_THX.shape[1], self.cache.layout.latent), control)
        if self.w_uv_HLV is None:
            return answer
        return replace(answer, out_THV=torch.einsum("thl,hlv->thv", answer.out_THV, self.w_uv_HLV.double()))

    def _rows(self, request: int, length: int, *, shifted: bool) -> Tensor:
        """The request's decoded rows [S, X]; shifted: its pages in the wrong places."""
        pages = self.block_table[request]
        needed = -(-length // self.cache.page_size)
        if shifted and needed > 1:
            pages = torch.cat([pages[:needed].roll(1), pages[needed:]])
        rows_SX = torch.cat(self.cache.read(pages, length, torch.float32), dim=-1)
        # The wrong page may lie beyond the tokens that were written.
        return rows_SX.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _faulty(q: Tensor, scale: float, rope: int, control: str | None) -> tuple[Tensor, float, int]:
    """(queries, scale, keys seen too few), with the deliberate fault."""
    if control == "rope":
        turned = q.clone()
        # One more rotation by a right angle of half-split pairs.
        first, second = q[..., q.shape[-1] - rope :].split([rope // 2, rope - rope // 2], dim=-1)
        turned[..., q.shape[-1] - rope :] = torch.cat([-second, first], dim=-1)
        q = turned
    return q, scale * 1.01 if control == "scale" else scale, int(control == "mask")


def _based(answer: Answer, control: str | None) -> Answer:
    return replace(answer, lse_TH=answer.lse_TH * 1.4427) if control == "lse_base" else answer


def new_cache(layer: LayerRequest, num_pages: int, page_size: int, device: torch.device) -> LatentCache:
    """A cache in which every byte is poison."""
    layout = layout_for(layer.layout, getattr(torch, layer.dtype), layer.latent, layer.rope)
    cache = LatentCache.allocate(layout, num_pages, page_size, device)
    poison(cache.data)
    return cache


def poison(data: Tensor) -> None:
    """Set all bits: NaN in every float type, and in every quantised layout's scales."""
    data.view(torch.uint8).fill_(255)


def mha_scene(
    layer: LayerRequest,
    lengths: Lengths,
    device: torch.device,
    scale: float,
    *,
    seed: int = 0,
    spread: float = SPREAD,
) -> MhaScene:
    """Random queries, keys and values of the layer's dtype."""
    noise, dtype = _noise(seed), getattr(torch, layer.dtype)
    width, heads = layer.nope + layer.rope, layer.heads
    rows, keys = sum(lengths.queries), sum(lengths.keys)
    q_THE = noise(rows, heads, width) * spread / (scale * width**0.5)
    k_SHE, v_SHV = noise(keys, heads, width), noise(keys, heads, layer.value)
    tensors = (x.to(dtype).to(device) for x in (q_THE, k_SHE, v_SHV))
    return MhaScene(lengths, *tensors, scale, layer.rope)


def mqa_scene(
    layer: LayerRequest,
    lengths: Lengths,
    device: torch.device,
    scale: float,
    *,
    page_size: int,
    seed: int = 0,
    spread: float = SPREAD,
    extra_columns: int = 2,
) -> MqaScene:
    """Random queries over a paged cache with random rows, written by the core's own writer."""
    noise, dtype = _noise(seed), getattr(torch, layer.dtype)
    needed = [-(-keys // page_size) for keys in lengths.keys]
    table = _table(needed, extra_columns, seed)
    cache = new_cache(layer, sum(needed) + 3, page_size, device)
    width, rows = layer.latent + layer.rope, sum(lengths.keys)
    latent, k_rope = noise(rows, layer.latent).to(dtype), noise(rows, layer.rope).to(dtype)
    slots = [
        int(table[b, token // page_size]) * page_size + token % page_size
        for b, keys in enumerate(lengths.keys)
        for token in range(keys)
    ]
    cache.write(torch.tensor(slots, dtype=torch.int64, device=device), latent.to(device), k_rope.to(device))
    q_THX = noise(sum(lengths.queries), layer.heads, width) * spread / (scale * width**0.5)
    return MqaScene(lengths, q_THX.to(dtype).to(device), cache, table.to(device), scale)


def _table(needed: Sequence[int], extra_columns: int, seed: int) -> Tensor:
    """Shuffled pages, some left unused; hostile entries where a request needs none."""
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    width = max(needed, default=0) + extra_columns
    rows = [[*(order.pop() for _ in range(count)), *HOSTILE * width][:width] for count in needed]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width)


def _noise(seed: int) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return lambda *shape: torch.randn(shape, generator=generator)
