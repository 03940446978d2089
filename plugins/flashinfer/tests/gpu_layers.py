"""Whole layers on the GPU, graph replay of a layer, and what the adapter costs over calling FlashInfer.

Legend: T new tokens, S tokens of a request, D model.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from gpu_scenes import DEVICE, ROUNDOFF, SCALE, Paged, backend, check, say, timed
from torch import Tensor

from mla_core import MLA, Batch, LatentCache, MLAConfig
from mla_core.reference import attention_layer
from mla_core.weights import expected_shapes

CONFIG = MLAConfig(
    hidden_size=256,
    num_heads=16,
    q_lora_rank=192,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
DTYPE = torch.bfloat16
PAGE = 64
CAPACITY = {"max_tokens": 6, "max_requests": 3}
# (request, new tokens) in the order of the batch: prefill, a cached prefix, decode, verification, all mixed.
STEPS = (
    [(0, 90), (1, 5)],
    [(2, 150), (0, 70)],
    [(1, 1), (0, 1), (2, 1)],
    [(0, 3), (2, 2)],
    [(1, 1), (3, 100), (0, 2), (2, 80)],
)
SPECS = (
    "flashinfer",
    "flashinfer[impl=fa2]",
    "prefill=flashinfer;decode=vanilla",
    "prefill=vanilla;decode=flashinfer",
)


def random_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = expected_shapes(MLA(CONFIG, backend="vanilla", dtype=DTYPE))
    made = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        sized = (
            1 + 0.2 * noise
            if "norm" in name
            else noise * (2 if name.startswith("q_") else 1) * shape[-1] ** -0.5
        )
        made[name] = sized.to(DTYPE)
    return made


@dataclass
class World:
    """Requests that advance through one layer over shuffled pages of a poisoned cache."""

    layer: MLA
    cache: LatentCache
    done: dict[int, int] = field(default_factory=dict)
    pages: dict[int, list[int]] = field(default_factory=dict)

    @classmethod
    def build(cls, spec: str, weights: dict[str, Tensor], **options: Any) -> World:
        made = {"device": DEVICE, "dtype": DTYPE, "workspace_tokens": 64, "max_decode_query_len": 4}
        layer = MLA(CONFIG, backend=spec, **{**made, **options})
        layer.load_hf({name: value.to(DEVICE) for name, value in weights.items()})
        cache = layer.new_cache(40, PAGE)
        cache.data.fill_(torch.nan)
        return cls(layer, cache)

    def batch(self, counts: Sequence[tuple[int, int]], **capacity: int) -> Batch:
        taken = {page for pages in self.pages.values() for page in pages}
        order = torch.randperm(40, generator=torch.Generator().manual_seed(3)).tolist()
        free = [page for page in order if page not in taken]
        for request, count in counts:
            pages = self.pages.setdefault(request, [])
            while len(pages) * PAGE < self.done.get(request, 0) + count:
                pages.append(free.pop())
        rows = [(self.pages[request] + [-1] * 10)[:10] for request, _ in counts]
        contexts = [self.done.get(request, 0) for request, _ in counts]
        return Batch.build([count for _, count in counts], contexts, rows, PAGE, device=DEVICE, **capacity)

    def advance(self, counts: Sequence[tuple[int, int]]) -> None:
        for request, count in counts:
            self.done[request] = self.done.get(request, 0) + count

    def hidden(self, counts: Sequence[tuple[int, int]]) -> Tensor:
        parts = [sequence(r)[self.done.get(r, 0) : self.done.get(r, 0) + n] for r, n in counts]
        return torch.cat(parts).to(DEVICE)

    def step(self, counts: Sequence[tuple[int, int]]) -> Tensor:
        with torch.no_grad():
            out = self.layer(self.hidden(counts), self.layer.prepare(self.batch(counts), self.cache))
        self.advance(counts)
        return out


def sequence(request: int) -> Tensor:
    generator = torch.Generator().manual_seed(40 + request)
    return torch.randn(300, CONFIG.hidden_size, generator=generator).to(DTYPE)


def layers() -> None:
    """Each choice of backends against the oracle and against vanilla on the same cache pages."""
    weights = random_weights()
    for spec in SPECS:
        check(f"layer {spec!r}", lambda s=spec: _layer(s, weights))
    check("layer with absorbed prefill", lambda: _layer("flashinfer", weights, prefill_form="absorb"))


def _layer(spec: str, weights: dict[str, Tensor], **options: Any) -> str:
    ours, plain = World.build(spec, weights, **options), World.build("vanilla", weights)
    rows: dict[int, list[Tensor]] = {}
    differ = 0.0
    for counts in STEPS:
        out, other = ours.step(counts), plain.step(counts)
        differ = max(differ, _relative(out, other))
        for (request, _), part in zip(counts, out.split([n for _, n in counts]), strict=True):
            rows.setdefault(request, []).append(part)
    assert torch.equal(ours.cache.data.view(torch.uint8), plain.cache.data.view(torch.uint8)), (
        "cached rows differ"
    )
    errors = []
    for request, parts in rows.items():
        got = torch.cat(parts)
        hidden = sequence(request)[: len(got)].double()
        wanted = attention_layer(CONFIG, {n: w.double() for n, w in weights.items()}, hidden).hidden_SD
        errors.append(_relative(got, wanted.to(DEVICE)))
    allowed = 3 * ROUNDOFF[DTYPE]
    assert max(errors) <= allowed, f"error {max(errors):.2e}, allowed {allowed:.2e}"
    assert differ <= 2 * allowed, f"vanilla differs by {differ:.2e}, allowed {2 * allowed:.2e}"
    return f"oracle {max(errors):.1e}, vanilla {differ:.1e}, plan {ours.layer.plan.choices}"


def _relative(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return float(((actual - expected).norm() / expected.norm()).nan_to_num(nan=torch.inf))


# (request, new tokens) of each replay of one graph, with room for 6 tokens of 3 requests.
REPLAYS = (
    [(0, 1), (1, 1), (2, 1)],
    [(0, 2), (2, 4)],
    [(1, 1)],
    [(2, 1), (1, 3), (0, 1)],
)


def graph_layers() -> None:
    """Decode steps of a whole layer, captured once and refreshed, over a varying number of live requests."""
    weights = random_weights()
    for impl in ("fa3", "fa2"):
        spec = f"prefill=vanilla;decode=flashinfer[impl={impl}]"
        check(f"layer {impl} graph replay", lambda s=spec: _layer_replay(s, weights))


def _layer_replay(spec: str, weights: dict[str, Tensor]) -> str:
    ours, plain = World.build(spec, weights, cuda_graph="decode"), World.build("vanilla", weights)
    for world in (ours, plain):
        world.step([(0, 63), (1, 5), (2, 126)])
    hidden = torch.full((6, CONFIG.hidden_size), torch.nan, device=DEVICE, dtype=DTYPE)
    step = ours.layer.prepare(ours.batch(REPLAYS[0], **CAPACITY), ours.cache, graph=True)
    hidden[:3] = ours.hidden(REPLAYS[0])
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ours.layer(hidden, step)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Thread-local: another thread may load a kernel meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = ours.layer(hidden, step)
    worst = 0.0
    for counts in REPLAYS:
        live = sum(count for _, count in counts)
        ours.layer.refresh(step, ours.batch(counts, **CAPACITY))
        hidden.fill_(torch.nan)
        hidden[:live] = ours.hidden(counts)
        graph.replay()
        worst = max(worst, _relative(out[:live], plain.step(counts)))
        assert not int(out[live:].count_nonzero()), "padded rows are not 0"
        ours.advance(counts)
    assert worst <= 6 * ROUNDOFF[DTYPE], f"vanilla differs by {worst:.2e}"
    return f"vanilla {worst:.1e} over {len(REPLAYS)} replays"


def overhead() -> None:
    """The backend against the same planned wrapper called directly, in turns, in this process."""
    for impl in ("fa3", "fa2"):
        check(f"adapter overhead {impl} b128 h128 kv4096", lambda i=impl: _overhead(i, 128, 4096, 5, 10))
        check(f"adapter overhead {impl} b1 h128 kv1024", lambda i=impl: _overhead(i, 1, 1024, 15, 200))
    check("time append", _append)


def _overhead(impl: str, requests: int, keys: int, rounds: int, repeats: int) -> str:
    kernels, context = backend(impl, 128)
    call = Paged(context, (1,) * requests, (keys,) * requests)
    segments, (out, lse) = call.segments(), call.buffers()
    prepared = []
    for _ in range(6):
        torch.cuda.synchronize()
        started = time.perf_counter()
        segments.meta = kernels.prepare("mqa_decode", segments, call.cache.geometry)
        torch.cuda.synchronize()
        prepared.append(1e6 * (time.perf_counter() - started))
    ((_, wrapper),) = segments.meta.launches
    query, pages = call.q_THX, call.cache.data

    def direct() -> None:
        wrapper.run(query=query, kv_cache=pages, out=out, lse=lse, return_lse=True, return_lse_base_on_e=True)

    def adapted() -> None:
        kernels.mqa(query, call.cache, segments, SCALE, out, lse)

    found = timed({"direct": direct, "adapted": adapted}, rounds=rounds, repeats=repeats)
    (gpu, host), (our_gpu, our_host) = found["direct"], found["adapted"]
    name = f"{impl} b{requests} h128 kv{keys}"
    say(
        f"TIME {name}: direct {gpu:.1f} us (host {host:.1f}), backend {our_gpu:.1f} us "
        f"(host {our_host:.1f}), prepare {median(prepared[1:]):.0f} us"
    )
    if requests > 1:
        assert our_gpu <= 1.05 * gpu, f"{100 * (our_gpu / gpu - 1):.1f} % over direct"
    else:
        assert our_host - host <= 10, f"{our_host - host:.1f} us over direct"
    return f"{100 * (our_gpu / gpu - 1):+.2f} % of GPU time, {our_host - host:+.1f} us of host time"


def _append() -> str:
    """The core's append against FlashInfer's, for 128 decoded tokens and for a prefill of 4096."""
    from flashinfer.page import append_paged_mla_kv_cache

    from mla_core import SlotTargets

    _, context = backend("fa3", 16)
    call = Paged(context, (1,), (1,))
    shown = []
    for tokens in (128, 4096):
        cache = LatentCache.allocate(call.layout, 128, PAGE, DEVICE)
        slots = torch.randperm(128 * PAGE, device=DEVICE)[:tokens]
        latent = torch.randn(tokens, 512, device=DEVICE).to(DTYPE)
        rope = torch.randn(tokens, 64, device=DEVICE).to(DTYPE)
        targets = SlotTargets.split(slots, cache.geometry)
        # One request that owns all pages: its positions are the slots.
        zeros = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
        owned = (
            torch.arange(128, dtype=torch.int32, device=DEVICE),
            torch.tensor([0, 128], dtype=torch.int32, device=DEVICE),
            torch.tensor([PAGE], dtype=torch.int32, device=DEVICE),
        )
        where = (zeros, slots.int(), cache.data[..., :512], cache.data[..., 512:], *owned)
        found = timed(
            {
                "core": lambda c=cache, t=targets, x=latent, r=rope: c.write_targets(t, x, r),
                "flashinfer": lambda x=latent, r=rope, w=where: append_paged_mla_kv_cache(x, r, *w),
            },
            rounds=7,
            repeats=50,
        )
        for name, (gpu, host) in found.items():
            shown.append(f"{tokens} tokens {name} {gpu:.1f} us (host {host:.1f})")
    return "; ".join(shown)
