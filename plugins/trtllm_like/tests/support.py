"""What the kernel tests share: hostile caches, strided inputs, and attention in float64.

Memory that no live token owns is NaN, pages are shuffled, and unneeded block table entries are nonsense.
Legend: T tokens, B requests, S keys, H heads, L latent, R rope, X = L + R, E, V as in the backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from mla_core import LatentCache, MhaSegments, MqaSegments, Scales
from mla_core.cache import layout_for
from mla_trtllm_like import launch_mqa
from mla_trtllm_like.tuning import MqaShape

# The error of one rounding to the type, about three times over; float32 products are summed in any order.
ROW_TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1e-2}
LSE_TOLERANCE = 2e-5
SCALES = Scales(k_scale=0.03, global_scale=0.004)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Error over size of the worst row that has a size; infinite when anything is not finite."""
    error = (actual.double() - expected).norm(dim=-1)
    size = expected.norm(dim=-1).clamp(min=1e-3)
    return float((error / size).nan_to_num(nan=torch.inf).max()) if error.numel() else 0.0


def lse_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference; infinite unless the same rows are -inf."""
    if not torch.equal(actual.isneginf(), expected.isneginf()):
        return torch.inf
    difference = (actual.double() - expected).masked_fill(expected.isneginf(), 0.0)
    return float(difference.abs().nan_to_num(nan=torch.inf).max()) if difference.numel() else 0.0


def textbook(
    q_TE: Tensor, k_SE: Tensor, v_SV: Tensor, visible_T: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T) v and its lse in float64, row t over its first visible[t] keys."""
    scores_TS = q_TE.double() @ k_SE.double().T * scale
    hidden = torch.arange(k_SE.shape[0], device=k_SE.device) >= visible_T.unsqueeze(1)
    scores_TS = scores_TS.masked_fill(hidden, -torch.inf)
    weights_TS = torch.softmax(scores_TS, dim=-1).nan_to_num(nan=0.0)
    return weights_TS @ v_SV.double(), torch.logsumexp(scores_TS, dim=-1)


def visible(queries: int, keys: int, causal: bool, device: torch.device) -> Tensor:
    last = torch.arange(keys - queries + 1, keys + 1, device=device).clamp(min=0)
    return last if causal else torch.full_like(last, keys)


def starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@dataclass
class PagedCase:
    """Requests over a poisoned cache, and what their queries should see."""

    device: torch.device
    layout: str = "fp32"
    dtype: torch.dtype = torch.float32
    heads: int = 3
    latent: int = 16
    rope: int = 4
    page_size: int = 16
    query_lens: tuple[int, ...] = (1, 2, 0, 1, 3)
    key_lens: tuple[int, ...] = (5, 70, 0, 2, 133)
    causal: bool = True
    seed: int = 0
    pages: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        layout = layout_for(self.layout, self.dtype, self.latent, self.rope)
        needed = [-(-keys // self.page_size) for keys in self.key_lens]
        order = torch.randperm(sum(needed) + 3, generator=self.generator).tolist()
        self.pages = [[order.pop() for _ in range(count)] for count in needed]
        self.cache = LatentCache(self._storage(layout, sum(needed) + 3), layout, SCALES)
        for row, keys in zip(self.pages, self.key_lens, strict=True):
            self._fill(row, keys)
        rows = sum(self.query_lens)
        # Strided: every second head of a larger tensor.
        wide = torch.full((rows, 2 * self.heads, self.latent + self.rope), torch.nan)
        wide[:, ::2] = self.random(rows, self.heads, self.latent + self.rope)
        self.query_THX = wide.to(self.dtype).to(self.device)[:, ::2]
        self.scale = 2.0 * (self.latent + self.rope) ** -0.5

    def _storage(self, layout, num_pages: int) -> Tensor:
        """Pages that are a slice of a larger tensor, every byte of it a NaN."""
        one = layout.allocate(num_pages, self.page_size, self.device)
        wide = torch.empty(num_pages, 3, *one.shape[1:], dtype=one.dtype, device=self.device)
        if one.dtype.itemsize == 1:
            wide.view(torch.uint8).fill_(0x7F)
        else:
            wide.fill_(torch.nan)
        return wide[:, 1]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _fill(self, pages: list[int], keys: int) -> None:
        at = torch.arange(keys)
        slots = torch.tensor(pages, dtype=torch.int64)[at // self.page_size] * self.page_size
        rows = self.random(keys, self.latent + self.rope).to(self.dtype).to(self.device)
        self.cache.write(
            (slots + at % self.page_size).to(self.device), rows[:, : self.latent], rows[:, self.latent :]
        )

    def segments(self) -> MqaSegments:
        width = max(map(len, self.pages), default=0) + 1
        table = [[*row, *[2**31 - 1, -(2**31)] * width][:width] for row in self.pages]
        return MqaSegments(
            starts(self.query_lens, self.device),
            torch.tensor(self.key_lens, dtype=torch.int32, device=self.device),
            torch.tensor(table, dtype=torch.int32, device=self.device).reshape(len(self.pages), width),
            self.query_lens,
            self.key_lens,
            self.causal,
        )

    def run(self, shape: MqaShape, parts: int, **changes) -> tuple[Tensor, Tensor]:
        """(out, lse) of the kernel. Changes: scale, segments."""
        segments = changes.get("segments") or self.segments()
        segments.meta = segments.meta or launch_mqa.plan(segments, self.heads, shape, parts)
        out = torch.full((len(self.query_THX), 2, self.heads, self.latent), torch.nan, dtype=self.dtype)
        out = out.to(self.device)[:, 1]
        lse = torch.full(out.shape[:2], torch.nan, device=self.device)
        launch_mqa.mqa(self.query_THX, self.cache, segments, changes.get("scale", self.scale), out, lse)
        return out, lse

    def expected(self) -> tuple[Tensor, Tensor]:
        found = [self._expected(b) for b in range(len(self.query_lens))]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def _expected(self, b: int) -> tuple[Tensor, Tensor]:
        first, queries, keys = sum(self.query_lens[:b]), self.query_lens[b], self.key_lens[b]
        # Rows with scales of their own are rounded to the query's type as they are decoded.
        decoded = self.dtype if self.layout == "fp8_ds_mla" else torch.float32
        latent, rope = self.cache.read(torch.tensor(self.pages[b]), keys, decoded)
        row_SX = torch.cat([latent, rope], dim=1)
        sees = visible(queries, keys, self.causal, self.device)
        found = [
            textbook(self.query_THX[first : first + queries, h], row_SX, latent, sees, self.scale)
            for h in range(self.heads)
        ]
        return torch.stack([out for out, _ in found], dim=1), torch.stack([lse for _, lse in found], dim=1)


def mha_segments(
    query_lens: Sequence[int], key_lens: Sequence[int], causal: bool, device: torch.device
) -> MhaSegments:
    return MhaSegments(
        starts(query_lens, device), starts(key_lens, device), tuple(query_lens), tuple(key_lens), causal
    )
