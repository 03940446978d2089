"""Checks and times the flashinfer backend on a Hopper GPU: `python plugins/flashinfer/tests/gpu_check.py`.

Prints one PASS or FAIL line a check, one GAP line a check that is known to fail, and one TIME line a
measurement; exits with 1 when anything failed. Kernels are compiled in the background in the order of the
checks that need them; a check whose kernels are not there in time is skipped. CHECK_SECONDS says how long
all may take, 190 unless given: enough when the kernels are compiled already. With OUT set, the lines are
also written there, as text and as the JSON of `evidence/`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from gpu_run import Compiled, register, run_parts, write_evidence
from gpu_scenes import (
    DEVICE,
    LINES,
    SCALE,
    STARTED,
    Packed,
    Paged,
    backend,
    check,
    gap,
    judge,
    say,
)

from mla_core import LatentCache, registry
from mla_flashinfer.manifest import INFO

# Query lengths 0 to 4, keys from none to several splits, pages partly filled.
MIXED = {"queries": (1, 3, 0, 2, 4, 1, 1, 2), "keys": (300, 3, 7, 65, 1000, 0, 1, 5000)}
DECODE = {"queries": (1,) * 40, "keys": tuple(range(17, 40 * 97, 97))}
# (new tokens, keys, seed) of each replay of one graph, with room for 6 tokens of 4 requests.
REPLAYS = (
    ((1, 2, 1, 1), (4000, 900, 70, 2500), 1),
    ((1, 2, 1, 1), (3990, 2, 1, 2600), 2),
    ((1, 0, 0, 3), (64, 0, 0, 31), 3),
    ((0, 1, 0, 0), (0, 890, 0, 0), 4),
    ((2, 2, 1, 1), (2, 3, 900, 1), 5),
)


def paged_kernels() -> None:
    """fa2 and fa3 over mixed lengths, heads, page sizes, masks and long splits."""
    for impl, heads in product(("fa3", "fa2"), (16, 64, 128)):
        kernels, context = backend(impl, heads)
        check(f"mqa {impl} h{heads} mixed", lambda k=kernels, c=context: Paged(c, **MIXED).error(k))
        check(f"mqa {impl} h{heads} decode", lambda k=kernels, c=context: Paged(c, **DECODE).error(k))
    for impl, heads in product(("fa3", "fa2"), (1, 3, 20, 40, 96)):
        kernels, context = backend(impl, heads)
        check(f"mqa {impl} h{heads} mixed", lambda k=kernels, c=context: Paged(c, **MIXED).error(k))
    for impl, size in product(("fa3", "fa2"), (1, 16, 7)):
        kernels, context = backend(impl, 16)
        check(
            f"mqa {impl} page {size}",
            lambda k=kernels, c=context, p=size: Paged(c, **MIXED, page_size=p, seed=2).error(k),
        )
    for impl in ("fa3", "fa2"):
        kernels, context = backend(impl, 64)
        cases = {
            "uncausal": {**MIXED, "causal": False},
            "more queries than keys": {"queries": (5, 2, 1), "keys": (2, 9, 0)},
            "one long request": {"queries": (2,), "keys": (60_001,)},
            "nothing to do": {"queries": (0, 0), "keys": (0, 5)},
        }
        for name, case in cases.items():
            check(f"mqa {impl} {name}", lambda k=kernels, c=context, a=case: Paged(c, **a).error(k))
        check(
            f"mqa {impl} without lse",
            lambda k=kernels, c=context: Paged(c, **MIXED).error(k, lse=False),
        )


def paged_memory() -> None:
    """Strides, large caches, repeated calls."""
    for impl in ("fa3", "fa2"):
        kernels, context = backend(impl, 16)
        check(f"mqa {impl} strided query, out and lse", lambda k=kernels, c=context: _strided(k, c))
        check(f"mqa {impl} every second page of a larger cache", lambda k=kernels, c=context: _sliced(k, c))
        check(f"mqa {impl} beyond 2^31 elements", lambda k=kernels, c=context: _large(k, c))
        check(f"mqa {impl} same bits in 20 calls", lambda k=kernels, c=context: _same_bits(k, c))
        check(f"mqa {impl} unowned bytes do not matter", lambda k=kernels, c=context: _garbage(k, c))


def _strided(kernels: Any, context: Any) -> str:
    call = Paged(context, **MIXED)
    segments = call.segments()
    segments.meta = kernels.prepare("mqa_decode", segments, call.cache.geometry)
    rows, heads, width = call.q_THX.shape
    query = call.q_THX.new_full((2 * rows, heads + 2, width + 5), torch.nan)[1::2, 1:-1, 3:-2]
    query.copy_(call.q_THX)
    out = call.q_THX.new_full((rows, heads, 519), torch.nan)[..., 3:-4]
    lse = torch.full((rows, 2 * heads), torch.nan, device=DEVICE)[:, ::2]
    kernels.mqa(query, call.cache, segments, SCALE, out, lse)
    return judge((out, lse), call.expected())


def _sliced(kernels: Any, context: Any) -> str:
    call = Paged(context, **MIXED)
    data = call.cache.data
    view = data.new_full((2 * data.shape[0], *data.shape[1:]), torch.nan)[1::2]
    view.copy_(data)
    call.cache = replace(call.cache, data=view)
    return call.error(kernels)


def _large(kernels: Any, context: Any) -> str:
    call = Paged(context, **MIXED)
    small = call.cache.data
    pages = 2**31 // small[0].numel() + small.shape[0] + 1
    data = torch.empty(pages, *small.shape[1:], dtype=small.dtype, device=DEVICE)
    first = pages - small.shape[0]
    data[first:].copy_(small)
    owned = (call.table >= 0) & (call.table < small.shape[0])
    call.table = torch.where(owned, call.table + first, call.table)
    call.cache = LatentCache.from_tensor(data, call.layout, call.cache.page_size)
    return call.error(kernels)


def _same_bits(kernels: Any, context: Any) -> str:
    call = Paged(context, **MIXED)
    answers = [call.run(kernels) for _ in range(20)]
    assert all(torch.equal(x, y) for other in answers for x, y in zip(answers[0], other, strict=True))
    return "out and lse"


def _garbage(kernels: Any, context: Any) -> str:
    call = Paged(context, **MIXED)
    before = call.run(kernels)
    data = call.cache.data
    owned = torch.zeros(data.shape[:2], dtype=torch.bool, device=DEVICE)
    for b, length in enumerate(call.keys):
        where = torch.arange(length, device=DEVICE)
        owned[call.table[b].long()[where // 64], where % 64] = True
    data[~owned] = 3.0
    after = call.run(kernels)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    return "NaN against 3"


def fp8_caches() -> None:
    """fp8 caches with scales that bfloat16 holds and does not hold; held to what unquantised caches are."""
    for impl, scale in product(("fa3", "fa2"), (1.0, 0.25, 0.03)):
        kernels, context = backend(impl, 64, layout="fp8_e4m3")
        check(
            f"mqa {impl} fp8 scale {scale}",
            lambda k=kernels, c=context, s=scale: Paged(c, **MIXED, k_scale=s).error(k),
        )


def other_types() -> None:
    """fp16 caches, other latent widths."""
    for changes in ({"dtype": "float16", "layout": "fp16"}, {"latent": 256}, {"latent": 128}):
        kernels, context = backend("fa3", 16, **changes)
        check(f"mqa fa3 {changes}", lambda k=kernels, c=context: Paged(c, **MIXED).error(k))


def graphs() -> None:
    """A captured decode, replayed over other pages and lengths."""
    for impl, heads in product(("fa3", "fa2"), (16, 128)):
        check(f"mqa {impl} h{heads} graph replay", lambda i=impl, h=heads: _replay(i, h))


def _replay(impl: str, heads: int) -> str:
    kernels, context = backend(impl, heads)
    first = Paged(context, (1, 2, 1, 1), (4000, 900, 70, 2500), seed=1, rows=6)
    segments, (out, lse) = first.segments(), first.buffers()
    query, cache = first.q_THX.clone(), LatentCache.from_tensor(first.cache.data.clone(), first.layout, 64)
    segments.meta = kernels.prepare("mqa_decode", segments, cache.geometry)
    arguments = (query, cache, segments, SCALE, out, lse)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernels.mqa(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Thread-local: another thread may load a kernel meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kernels.mqa(*arguments)
    shown = []
    for queries, keys, seed in REPLAYS:
        other = Paged(context, queries, keys, seed=seed, rows=6)
        _describe(segments, other.segments())
        segments.meta = kernels.prepare("mqa_decode", segments, cache.geometry)
        query.copy_(other.q_THX)
        cache.data[: other.cache.num_pages].copy_(other.cache.data)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        shown.append(judge((out, lse), other.expected()))
    return "; ".join(shown)


def _describe(segments: Any, other: Any) -> None:
    """Let the captured segments describe another step, as the core's refresh does."""
    segments.query_start_loc.copy_(other.query_start_loc)
    segments.seq_lens.copy_(other.seq_lens)
    width = segments.block_table.shape[1]
    room = max(width - other.block_table.shape[1], 0)
    segments.block_table.copy_(torch.nn.functional.pad(other.block_table, (0, room), value=-1)[:, :width])
    segments.query_lens, segments.key_lens = other.query_lens, other.key_lens


def against_trtllm_like() -> None:
    """Decode of both backends over the same pages."""
    try:
        from mla_trtllm_like.manifest import INFO as OTHER
    except ImportError as error:
        say(f"SKIP against trtllm_like: {error}")
        return
    if OTHER.name not in registry.names():
        registry.add(OTHER)
    for heads, layout in product((16, 128), ("bf16", "fp8_e4m3")):
        check(f"mqa fa3 against trtllm_like h{heads} {layout}", lambda h=heads, o=layout: _against(h, o))


def _against(heads: int, layout: str) -> str:
    """Each within the tolerance of the oracle, so within twice that of each other; shows the distance."""
    shown, rows = [], []
    for name in ("flashinfer", "trtllm_like"):
        kernels, context = backend("fa3", heads, name=name, layout=layout)
        call = Paged(context, **MIXED)
        out, lse = call.run(kernels)
        shown.append(f"{name} {judge((out, lse), call.expected())}")
        rows.append(out.double())
    return f"{'; '.join(shown)}; apart {float((rows[0] - rows[1]).norm() / rows[1].norm()):.1e}"


def packed_kernels() -> None:
    """fa2 and fa3 prefill: own tokens, a prefix, chunks with and without keys."""
    cases = {
        "own tokens": {"queries": (5, 1, 400, 0, 130), "keys": (5, 1, 400, 0, 130)},
        "behind a prefix": {"queries": (5, 1, 200), "keys": (700, 9, 200)},
        "chunk": {"queries": (5, 129, 3), "keys": (1000, 2, 64), "causal": False},
        "chunk, some without keys": {"queries": (3, 200, 4, 1), "keys": (40, 0, 5, 0), "causal": False},
        "more queries than keys": {"queries": (300, 2), "keys": (10, 3)},
        "keys without queries": {"queries": (0, 3, 0), "keys": (4, 3, 60)},
        "no keys at all": {"queries": (2, 3), "keys": (0, 0), "causal": False},
    }
    for impl, heads in product(("fa3", "fa2"), (16, 128)):
        kernels, context = backend(impl, heads, "mha_prefill")
        for name, case in cases.items():
            check(f"mha {impl} h{heads} {name}", lambda k=kernels, c=context, a=case: Packed(c, **a).error(k))
    for impl in ("fa3", "fa2"):
        kernels, context = backend(impl, 16, "mha_prefill")
        known = gap if impl == "fa3" else check
        known(f"mha {impl} NaN stays in its request", lambda k=kernels, c=context: _isolated(k, c))
        check(
            f"mha {impl} plans in a row keep their own lengths", lambda k=kernels, c=context: _in_a_row(k, c)
        )


def packed_widths() -> None:
    """The other query and value widths that prefill kernels exist for."""
    for changes in ({"nope": 64}, {"nope": 192, "value": 256}):
        kernels, context = backend("fa3", 20, "mha_prefill", **changes)
        check(
            f"mha fa3 {changes}",
            lambda k=kernels, c=context: Packed(c, (5, 300), (5, 400)).error(k),
        )


def _isolated(kernels: Any, context: Any) -> str:
    call = Packed(context, (70, 5, 60), (70, 5, 60))
    expected = call.expected()
    call.k[70:75] = torch.nan
    call.v[70:75] = torch.nan
    out, lse = call.run(kernels)
    others = [*range(70), *range(75, 135)]
    return judge((out[others], lse[others]), tuple(x[others] for x in expected))


def _in_a_row(kernels: Any, context: Any) -> str:
    """Many plans while the GPU is busy: a plan's host memory must not be reused before it was copied."""
    calls = [Packed(context, (n, 200 - n), (n, 200 - n)) for n in range(1, 200, 11)]
    expected = [call.expected() for call in calls]
    torch.cuda.synchronize()
    busy = torch.randn(8192, 8192, device=DEVICE)
    for _ in range(20):
        busy = busy @ busy * 1e-4
    answers = [call.run(kernels) for call in calls]
    return [judge(answer, wanted) for answer, wanted in zip(answers, expected, strict=True)][-1]


def warm_start() -> None:
    """A new process with the kernels already compiled: from import to the first decode plan."""
    code = (
        "import time; started = time.perf_counter()\n"
        "import gpu_run; imported = time.perf_counter()\n"
        "gpu_run.register(); gpu_run.first_plan('mqa_decode', 'fa3', {})\n"
        "print(f'imports {imported - started:.1f} s, first plan {time.perf_counter() - imported:.1f} s')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    say(f"TIME warm start: {(done.stdout or done.stderr).strip().splitlines()[-1]}")


FP8 = {"layout": "fp8_e4m3"}
DECODE_3, DECODE_2 = Compiled("mqa_decode", "fa3", 36), Compiled("mqa_decode", "fa2", 29)
FP8_3, FP8_2 = Compiled("mqa_decode", "fa3", 24, FP8), Compiled("mqa_decode", "fa2", 20, FP8)
PREFILL_3, PREFILL_2 = Compiled("mha_prefill", "fa3", 141), Compiled("mha_prefill", "fa2", 56)
OTHERS = tuple(
    Compiled("mqa_decode", "fa3", 17, changes)
    for changes in ({"dtype": "float16", "layout": "fp16"}, {"latent": 256}, {"latent": 128})
)
WIDTHS = tuple(
    Compiled("mha_prefill", "fa3", 144, changes) for changes in ({"nope": 64}, {"nope": 192, "value": 256})
)


def main() -> int:
    requires = INFO.capabilities.requires[0]
    say(f"INFO {torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, {requires}")
    register()
    from gpu_layers import graph_layers, layers, overhead

    run_parts(
        [
            (fp8_caches, (FP8_3, FP8_2)),
            (graphs, (DECODE_3, DECODE_2)),
            (graph_layers, (DECODE_3, DECODE_2)),
            (paged_kernels, (DECODE_3, DECODE_2)),
            (paged_memory, (DECODE_3, DECODE_2)),
            (against_trtllm_like, (DECODE_3, FP8_3)),
            (packed_kernels, (PREFILL_3, PREFILL_2)),
            (layers, (DECODE_3, DECODE_2, PREFILL_3, PREFILL_2)),
            (other_types, OTHERS),
            (packed_widths, WIDTHS),
            # What is timed runs when nothing compiles beside it.
            (overhead, (DECODE_3, DECODE_2, *OTHERS, *WIDTHS)),
            (warm_start, (DECODE_3, *OTHERS, *WIDTHS)),
        ]
    )
    counts = {word: sum(line.startswith(word) for line in LINES) for word in ("PASS", "FAIL", "GAP", "SKIP")}
    failed = counts["FAIL"]
    shown = ", ".join(f"{count} {word}" for word, count in counts.items())
    say(f"{'FAIL' if failed else 'PASS'} all: {shown}, {time.perf_counter() - STARTED:.0f} s")
    if os.environ.get("OUT"):
        write_evidence(Path(os.environ["OUT"]))
    return 1 if failed else 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Not sys.exit: a compiler that still runs in a thread would be waited for.
    os._exit(code)
