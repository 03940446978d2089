"""Kernel calls of the backend over hostile memory, and the answers in float64.

Legend: T query rows, S keys, H heads, X = L + R, E query width, V value width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mla_core import LatentCache, LayerContext, LayerRequest, MhaSegments, MqaSegments, Scales
from mla_core.cache import layout_for

DIMS = {"latent": 128, "nope": 64, "rope": 64, "value": 128}
HOSTILE = 2**31 - 1
SCALE = 128**-0.5
# bfloat16 results of float32 sums: half a unit in the last place, with room for the rounding of inputs.
TOLERANCE = 1e-2


def context(
    *, heads: int = 4, options: dict[str, Any] | None = None, kernels: set[str] | None = None, **changes: Any
) -> LayerContext:
    """What the core would hand a layer on a Hopper GPU; tensors are on the CPU."""
    base = {"device": "cuda:sm_90a", "dtype": "bfloat16", "layout": "bf16", "max_query_len": 8}
    request = LayerRequest(**{**base, **DIMS, "heads": heads, **changes})
    return LayerContext(
        request=request,
        kernels=frozenset(kernels or {"mqa_decode"}),
        options=options or {},
        softmax_scale=SCALE,
        device=torch.device("cpu"),
        dtype=getattr(torch, request.dtype),
    )


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def answer(q_THE: Tensor, k_SHE: Tensor, v_SHV: Tensor, seen: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(out, lse in base e): row t sees its first seen[t] keys; none gives 0 and -inf."""
    out, lse = [], []
    for q_HE, keys in zip(q_THE.double(), seen, strict=True):
        scores_HS = torch.einsum("he,she->hs", q_HE, k_SHE[:keys].double()) * SCALE
        out.append(torch.einsum("hs,shv->hv", scores_HS.softmax(-1), v_SHV[:keys].double()))
        lse.append(torch.logsumexp(scores_HS, -1))
    return torch.stack(out), torch.stack(lse)


def visible(queries: int, keys: int, causal: bool) -> list[int]:
    return [max(keys - queries + 1 + t, 0) if causal else keys for t in range(queries)]


@dataclass
class Paged:
    """One `mqa` call: requests over shuffled pages, NaN in every byte that no token owns."""

    queries: Sequence[int]
    keys: Sequence[int]
    heads: int = 4
    causal: bool = True
    page_size: int = 4
    layout: str = "bf16"
    k_scale: float = 1.0
    seed: int = 0
    # Of a graph step: rows of the queries, those behind the last request included.
    rows: int | None = None

    def __post_init__(self) -> None:
        layout = layout_for(self.layout, torch.bfloat16, DIMS["latent"], DIMS["rope"])
        needed = [-(-keys // self.page_size) for keys in self.keys]
        order = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(self.seed)).tolist()
        width = max(needed, default=0) + 2
        rows = [[*(order.pop() for _ in range(count)), *[HOSTILE] * width][:width] for count in needed]
        self.table = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width)
        self.cache = LatentCache.allocate(
            layout, sum(needed) + 2, self.page_size, "cpu", scales=Scales(k_scale=self.k_scale)
        )
        self.cache.data.view(torch.uint8).fill_(255)
        self.q_THX = noise(self.rows or sum(self.queries), self.heads, layout.width, seed=self.seed + 1)
        for b, keys in enumerate(self.keys):
            where = torch.arange(keys)
            slots = self.table[b].long()[where // self.page_size] * self.page_size + where % self.page_size
            stored = noise(keys, layout.width, seed=100 * self.seed + 10 + b)
            self.cache.write(slots, stored[:, : layout.latent], stored[:, layout.latent :])

    def segments(self) -> MqaSegments:
        return MqaSegments(
            torch.tensor([0, *accumulate(self.queries)], dtype=torch.int32),
            torch.tensor(self.keys, dtype=torch.int32),
            self.table,
            tuple(self.queries),
            tuple(self.keys),
            causal=self.causal,
            graph_rows=self.rows,
        )

    def outputs(self) -> tuple[Tensor, Tensor]:
        """Buffers in which what stays unwritten is NaN."""
        rows = (len(self.q_THX), self.heads)
        return torch.full((*rows, DIMS["latent"]), torch.nan).bfloat16(), torch.full(rows, torch.nan)

    def run(self, backend: Any, kernel: str = "mqa_decode") -> tuple[Tensor, Tensor]:
        segments, (out, lse) = self.segments(), self.outputs()
        segments.meta = backend.prepare(kernel, segments, self.cache.geometry)
        backend.mqa(self.q_THX, self.cache, segments, SCALE, out, lse)
        return out, lse

    def expected(self) -> tuple[Tensor, Tensor]:
        found, start = [], 0
        for b, (queries, keys) in enumerate(zip(self.queries, self.keys, strict=True)):
            rows_SX = torch.cat(self.cache.read(self.table[b], keys, torch.float32), dim=-1)
            key_SHX = rows_SX.unsqueeze(1).expand(-1, self.heads, -1)
            if queries:
                query = self.q_THX[start : start + queries]
                seen = visible(queries, keys, self.causal)
                found.append(answer(query, key_SHX, key_SHX[..., : DIMS["latent"]], seen))
            start += queries
        padding = (len(self.q_THX) - start, self.heads)
        found.append(
            (torch.zeros(*padding, DIMS["latent"]).double(), torch.full(padding, -torch.inf).double())
        )
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


@dataclass
class Ragged:
    """One `mha` call over packed requests."""

    queries: Sequence[int]
    keys: Sequence[int]
    heads: int = 4
    causal: bool = True

    def __post_init__(self) -> None:
        width, value = DIMS["nope"] + DIMS["rope"], DIMS["value"]
        self.q_THE = noise(sum(self.queries), self.heads, width, seed=1)
        self.k_SHE = noise(sum(self.keys), self.heads, width, seed=2)
        self.v_SHV = noise(sum(self.keys), self.heads, value, seed=3)

    def segments(self) -> MhaSegments:
        starts = [
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32) for counts in (self.queries, self.keys)
        ]
        return MhaSegments(*starts, tuple(self.queries), tuple(self.keys), self.causal)

    def outputs(self) -> tuple[Tensor, Tensor]:
        rows = (len(self.q_THE), self.heads)
        return torch.full((*rows, DIMS["value"]), torch.nan).bfloat16(), torch.full(rows, torch.nan)

    def run(self, backend: Any) -> tuple[Tensor, Tensor]:
        segments, (out, lse) = self.segments(), self.outputs()
        segments.meta = backend.prepare("mha_prefill", segments, None)
        backend.mha(self.q_THE, self.k_SHE, self.v_SHV, segments, SCALE, out, lse)
        return out, lse

    def expected(self) -> tuple[Tensor, Tensor]:
        found, row, key = [], 0, 0
        for queries, keys in zip(self.queries, self.keys, strict=True):
            rows, columns = slice(row, row + queries), slice(key, key + keys)
            if queries:
                seen = visible(queries, keys, self.causal)
                found.append(answer(self.q_THE[rows], self.k_SHE[columns], self.v_SHV[columns], seen))
            row, key = rows.stop, columns.stop
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def error(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """The larger error of output (relative) and lse (absolute); infinite where either should be finite."""
    out, lse = actual
    size = expected[0].norm().clamp(min=1e-9)
    of_out = float(((out.double() - expected[0]).norm() / size).nan_to_num(nan=torch.inf))
    same = (lse == expected[1]) & expected[1].isinf()
    of_lse = (lse.double() - expected[1]).abs().masked_fill(same, 0.0)
    return max(of_out, float(of_lse.nan_to_num(nan=torch.inf).max()) if of_lse.numel() else 0.0)
