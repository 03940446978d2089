"""What the GPU checks share: calls over hostile memory, answers in float64, and one line a result.

Legend: T query rows, S keys, B requests, H heads, L latent, X = L + R, E = N + R, V value.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[3]
PLUGINS = ("flashinfer", "vanilla", "trtllm_like")
sys.path[:0] = [str(ROOT), *(str(ROOT / "plugins" / name / "src") for name in PLUGINS)]

# Behind the path that finds them.
from mla_core import (  # noqa: E402
    LatentCache,
    LayerContext,
    LayerRequest,
    MhaSegments,
    MqaSegments,
    Scales,
    registry,
)
from mla_core.cache import layout_for  # noqa: E402

DEVICE = torch.device("cuda:0")
ARCH = "cuda:sm_90a"
SCALE = 192**-0.5
# Unit roundoff: of the weights, of the result, of a merge; lse sums rounded weights.
ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SCORES = 24 * 16 * 2.0**-24
HOSTILE = (-1, 2**31 - 1, -(2**31), 10**6)
# No check starts, and no kernel is compiled, that would end later.
SECONDS = float(os.environ.get("CHECK_SECONDS", "190"))
LINES: list[str] = []
STARTED = time.perf_counter()


def say(line: str) -> None:
    LINES.append(line)
    print(line, flush=True)


def left() -> float:
    """Seconds that remain."""
    return SECONDS - (time.perf_counter() - STARTED)


def gap(name: str, run: Callable[[], str | None]) -> None:
    """A check that is known to fail, as the README says: it is a failure when it passes."""
    try:
        run()
    except AssertionError as error:
        say(f"GAP {name}: {error}")
    else:
        say(f"FAIL {name}: passes, so it is no gap any more; say so in the README")


def check(name: str, run: Callable[[], str | None]) -> None:
    """Run a check; what it returns is shown, what it raises is a failure."""
    if left() < 0:
        say(f"SKIP {name}: out of time")
        return
    try:
        detail = run()
        torch.cuda.synchronize()
        say(f"PASS {name}" + (f": {detail}" if detail else ""))
    # Whatever goes wrong is this check's result; the others still run.
    except Exception as error:  # noqa: BLE001
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        say(f"FAIL {name}: {type(error).__name__} at {where}: {str(error)[:300]}")


def noise(*shape: int, seed: int, dtype: torch.dtype, size: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (size * torch.randn(*shape, generator=generator, device=DEVICE)).to(dtype)


def backend(
    impl: str, heads: int, kernel: str = "mqa_decode", name: str = "flashinfer", **changes: Any
) -> tuple[Any, LayerContext]:
    base = {"device": ARCH, "dtype": "bfloat16", "layout": "bf16", "max_query_len": 8}
    dims = {"heads": heads, "latent": 512, "nope": 128, "rope": 64, "value": 128}
    request = LayerRequest(**{**base, **dims, **changes})
    context = LayerContext(
        request=request,
        kernels=frozenset({kernel}),
        options={"impl": impl} if name == "flashinfer" else {},
        softmax_scale=SCALE,
        device=DEVICE,
        dtype=getattr(torch, request.dtype),
    )
    return registry.load(name)(context), context


class Paged:
    """One `mqa` call: shuffled pages, NaN where no token lives, nonsense in unneeded table entries."""

    def __init__(
        self,
        context: LayerContext,
        queries: Sequence[int],
        keys: Sequence[int],
        *,
        page_size: int = 64,
        causal: bool = True,
        seed: int = 0,
        k_scale: float = 1.0,
        rows: int | None = None,
    ) -> None:
        request, dtype, self.rows = context.request, context.dtype, rows
        self.queries, self.keys, self.causal, self.heads = queries, keys, causal, request.heads
        self.layout = layout_for(request.layout, dtype, request.latent, request.rope)
        needed = [-(-length // page_size) for length in keys]
        order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
        width = max(needed, default=0) + 2
        rows = [[*(order.pop() for _ in range(n)), *HOSTILE * width][:width] for n in needed]
        table = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), width)
        self.table = table.to(DEVICE, torch.int32)
        scales = Scales(k_scale=k_scale)
        self.cache = LatentCache.allocate(self.layout, sum(needed) + 3, page_size, DEVICE, scales=scales)
        self.cache.data.view(torch.uint8).fill_(255)
        for b, length in enumerate(keys):
            where = torch.arange(length, device=DEVICE)
            slots = self.table[b].long()[where // page_size] * page_size + where % page_size
            stored = noise(length, self.layout.width, seed=97 * seed + b, dtype=dtype)
            self.cache.write(slots, stored[:, : request.latent], stored[:, request.latent :])
        size = 3 / (SCALE * self.layout.width**0.5)
        self.q_THX = noise(
            self.rows or sum(queries), self.heads, self.layout.width, seed=seed + 5, dtype=dtype, size=size
        )

    def segments(self) -> MqaSegments:
        starts = torch.tensor([0, *accumulate(self.queries)], dtype=torch.int32, device=DEVICE)
        lengths = torch.tensor(self.keys, dtype=torch.int32, device=DEVICE)
        made = (starts, lengths, self.table, tuple(self.queries), tuple(self.keys))
        return MqaSegments(*made, causal=self.causal, graph_rows=self.rows)

    def buffers(self) -> tuple[Tensor, Tensor]:
        shape = (len(self.q_THX), self.heads)
        out = torch.full((*shape, self.layout.latent), torch.nan, dtype=self.q_THX.dtype, device=DEVICE)
        return out, torch.full(shape, torch.nan, device=DEVICE)

    def run(self, kernels: Any, kernel: str = "mqa_decode", lse: bool = True) -> tuple[Tensor, Tensor]:
        segments, (out, got) = self.segments(), self.buffers()
        segments.meta = kernels.prepare(kernel, segments, self.cache.geometry)
        kernels.mqa(self.q_THX, self.cache, segments, SCALE, out, got if lse else None)
        return out, got

    def expected(self) -> tuple[Tensor, Tensor]:
        found, start = [], 0
        for b, (queries, keys) in enumerate(zip(self.queries, self.keys, strict=True)):
            rows = torch.cat(self.cache.read(self.table[b], keys, torch.float32), dim=-1).double()
            query = self.q_THX[start : start + queries].double()
            found.append(answer(query, rows.unsqueeze(1), rows.unsqueeze(1), self.causal))
            start += queries
        padding = (len(self.q_THX) - start, self.heads)
        nothing = self.q_THX.new_zeros(*padding, self.layout.width, dtype=torch.float64)
        found.append((nothing, torch.full(padding, -torch.inf, dtype=torch.float64, device=DEVICE)))
        out, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
        return out[..., : self.layout.latent], lse

    def error(self, kernels: Any, **options: Any) -> str:
        return judge(self.run(kernels, **options), self.expected(), lse=options.get("lse", True))


def answer(q_THE: Tensor, k_SHE: Tensor, v_SHV: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, the last query aligned with the last key; one key head may serve all."""
    rows, keys = len(q_THE), len(k_SHE)
    shared = k_SHE.shape[1] == 1
    scores = SCALE * (
        torch.einsum("the,se->ths", q_THE, k_SHE[:, 0])
        if shared
        else torch.einsum("the,she->ths", q_THE, k_SHE)
    )
    if causal:
        seen = torch.arange(rows, device=DEVICE) + (keys - rows + 1)
        hidden = torch.arange(keys, device=DEVICE) >= seen.unsqueeze(1)
        scores.masked_fill_(hidden.unsqueeze(1), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(nan=0.0)
    if shared:
        return torch.einsum("ths,sv->thv", weights, v_SHV[:, 0]), lse
    return torch.einsum("ths,shv->thv", weights, v_SHV), lse


def judge(
    actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], *, lse: bool = True, units: float = 3.0
) -> str:
    """The worst errors; raises AssertionError when they are larger than rounding explains, or not finite.

    units: roundings of a row, the core's two and a merge; a third and more of them reach lse as well.
    """
    roundoff = ROUNDOFF[actual[0].dtype]
    got, want = actual[0].double().flatten(1), expected[0].flatten(1)
    norms = want.norm(dim=1)
    floor = max(float(norms.mean()), 1e-30) if norms.numel() else 1.0
    errors = ((got - want).norm(dim=1) / norms.clamp(min=floor)).nan_to_num(nan=torch.inf)
    row = float(errors.max()) if errors.numel() else 0.0
    assert row <= units * roundoff, f"row error {row:.2e}, allowed {units * roundoff:.2e}"
    if not lse:
        return f"row {row:.1e}"
    same = (actual[1] == expected[1]) & expected[1].isinf()
    off = (actual[1].double() - expected[1]).abs().masked_fill(same, 0.0).nan_to_num(nan=torch.inf)
    worst = float(off.max()) if off.numel() else 0.0
    allowed = (units - 2) * roundoff + SCORES
    assert worst <= allowed, f"lse error {worst:.2e}, allowed {allowed:.2e}"
    return f"row {row:.1e} lse {worst:.1e}"


class Packed:
    """One `mha` call; values lie behind their keys' nope part, as the core hands them over."""

    def __init__(
        self, context: LayerContext, queries: Sequence[int], keys: Sequence[int], *, causal: bool = True
    ) -> None:
        request, dtype = context.request, context.dtype
        self.queries, self.keys, self.causal = queries, keys, causal
        width = request.nope + request.rope
        made = {"dtype": dtype}
        self.q = noise(sum(queries), request.heads, width, seed=1, size=3 / (SCALE * width**0.5), **made)
        self.k = noise(sum(keys), request.heads, width, seed=2, **made)
        both = noise(sum(keys), request.heads, request.nope + request.value, seed=3, **made)
        self.v = both[..., request.nope :]

    def segments(self) -> MhaSegments:
        starts = [
            torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=DEVICE)
            for counts in (self.queries, self.keys)
        ]
        return MhaSegments(*starts, tuple(self.queries), tuple(self.keys), self.causal)

    def run(self, kernels: Any) -> tuple[Tensor, Tensor]:
        segments = self.segments()
        segments.meta = kernels.prepare("mha_prefill", segments, None)
        shape = self.q.shape[:2]
        out = torch.full((*shape, self.v.shape[2]), torch.nan, dtype=self.q.dtype, device=DEVICE)
        lse = torch.full(shape, torch.nan, device=DEVICE)
        kernels.mha(self.q, self.k, self.v, segments, SCALE, out, lse)
        return out, lse

    def expected(self) -> tuple[Tensor, Tensor]:
        spans = zip(self.q.split(list(self.queries)), self.k.split(list(self.keys)), strict=True)
        values = self.v.split(list(self.keys))
        found = [
            answer(q.double(), k.double(), v.double(), self.causal)
            for (q, k), v in zip(spans, values, strict=True)
        ]
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))

    def error(self, kernels: Any) -> str:
        return judge(self.run(kernels), self.expected())


def timed(
    calls: dict[str, Callable[[], Any]], *, rounds: int, repeats: int
) -> dict[str, tuple[float, float]]:
    """(GPU microseconds, host microseconds) of a call, medians over rounds in which the calls take turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            host = time.perf_counter() - started
            end.record()
            end.synchronize()
            if turn >= 2:
                found[name].append((1e3 * begin.elapsed_time(end) / repeats, 1e6 * host / repeats))
    return {
        name: (median(gpu for gpu, _ in taken), median(host for _, host in taken))
        for name, taken in found.items()
    }
