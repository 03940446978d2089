# ruff: noqa: E402 - sources are put on the path first, so that nothing need be installed
"""Checks and times the kernels on a GPU: `python plugins/trtllm_like/tests/gpu_check.py [check] [time]`.

Prints one PASS or FAIL line a check and one TIME line a measurement; exits with 1 when anything failed. The
first run compiles kernels, some seconds each.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/trtllm_like/src")]

import torch
import triton
from torch.nn.functional import scaled_dot_product_attention as sdpa
from triton.testing import do_bench

from mla_core import LatentCache, MqaSegments, Scales
from mla_core.cache import layout_for
from mla_trtllm_like import launch_mqa
from mla_trtllm_like.device import limits
from mla_trtllm_like.launch_mha import mha
from mla_trtllm_like.launch_rope import rope_append
from mla_trtllm_like.tuning import MqaShape, mqa_shape
from plugins.trtllm_like.tests import test_launch_mha, test_launch_rope
from plugins.trtllm_like.tests.support import (
    LSE_TOLERANCE,
    ROW_TOLERANCE,
    PagedCase,
    lse_error,
    mha_segments,
    relative_error,
    starts,
)

DEVICE = torch.device("cuda:0")
LAYOUTS = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_ds_mla", "nvfp4", "nvfp4_rope_bf16")
RAGGED = {"query_lens": (1, 2, 0, 1, 4, 1, 1), "key_lens": (300, 70, 7, 0, 1000, 1, 3000)}
SCALE = 192**-0.5
failed: list[str] = []


def check(name: str, measure: Callable[[], float], limit: float) -> None:
    """PASS when `measure` stays below the limit; whatever it raises is a failure, shown in full."""
    begun = time.perf_counter()
    try:
        found = measure()
    except Exception:  # noqa: BLE001 - printed and counted
        traceback.print_exc(file=sys.stdout)
        found = float("inf")
    verdict = "PASS" if found <= limit else "FAIL"
    if verdict == "FAIL":
        failed.append(name)
    print(
        f"{verdict} {name}: {found:.2e} (limit {limit:.1e}), {time.perf_counter() - begun:.1f} s", flush=True
    )


def shape_for(case: PagedCase, form: str = "auto") -> MqaShape:
    packed = case.layout not in ("bf16", "fp16", "fp32")
    rows = case.heads * max(case.query_lens, default=1)
    return mqa_shape(form, rows, case.dtype.itemsize, packed, limits(DEVICE).shared_memory)


def parts_for(shape: MqaShape) -> int:
    return max(1, limits(DEVICE).multiprocessors * shape.resident // shape.group)


def errors(case: PagedCase) -> float:
    """The larger of row and lse error, each over its tolerance."""
    shape = shape_for(case)
    (out, lse), (out_expected, lse_expected) = case.run(shape, parts_for(shape)), case.expected()
    rows = relative_error(out, out_expected) / ROW_TOLERANCE[case.dtype]
    return max(rows, lse_error(lse, lse_expected) / LSE_TOLERANCE)


def large(heads: int, layout: str = "bf16", dtype: torch.dtype = torch.bfloat16, **changes) -> PagedCase:
    return PagedCase(
        DEVICE, layout=layout, dtype=dtype, heads=heads, latent=512, rope=64,
        **{"page_size": 64, **RAGGED, **changes},
    )  # fmt: skip


def check_decode() -> None:
    for layout in LAYOUTS:
        for heads in (128, 4):
            check(f"decode {layout} h{heads}", lambda n=layout, h=heads: errors(large(h, n)), 1.0)
    check("decode fp16 queries h128", lambda: errors(large(128, "fp16", torch.float16)), 1.0)
    check("decode float32 h16", lambda: errors(large(16, "fp32", torch.float32)), 1.0)
    for size in (1, 16, 48):
        check(f"decode page {size} h4", lambda s=size: errors(large(4, page_size=s)), 1.0)
    check("decode h20, two rows a request", lambda: errors(large(20)), 1.0)
    check("decode h8", lambda: errors(large(8, query_lens=(1,) * 4, key_lens=(5, 64, 65, 4097))), 1.0)
    small = {"latent": 33, "rope": 6}
    check("decode odd widths", lambda: errors(PagedCase(DEVICE, layout="fp32", **small)), 1.0)
    for heads in (16, 128):
        check(f"decode same bits in 60 runs, h{heads}", lambda h=heads: float(differing_runs(h, 60)), 0.0)
        check(f"decode in a CUDA graph with new lengths, h{heads}", lambda h=heads: graph_error(h), 1.0)
    check("decode beyond 2^31 elements", far_pages_error, 1.0)


def ragged_batch(
    heads: int, layout: str, lengths: list[int]
) -> tuple[torch.Tensor, LatentCache, MqaSegments]:
    """Random queries and cache, shuffled pages of 64."""
    pages = [-(-keys // 64) for keys in lengths]
    made = layout_for(layout, torch.bfloat16, 512, 64)
    cache = LatentCache.allocate(made, sum(pages) + 1, 64, DEVICE, scales=Scales(0.03, 0.004))
    count = cache.num_pages * 64
    for first in range(0, count, 1 << 16):
        slots = torch.arange(first, min(count, first + (1 << 16)), device=DEVICE)
        rows = torch.randn(len(slots), 576, device=DEVICE, dtype=torch.bfloat16) * 0.5
        cache.write(slots, rows[:, :512], rows[:, 512:])
    order = torch.randperm(sum(pages), device=DEVICE, dtype=torch.int32)
    table = torch.full((len(lengths), max(pages)), 2**31 - 1, dtype=torch.int32, device=DEVICE)
    for row, own in zip(table, order.split(pages), strict=True):
        row[: len(own)] = own
    query_lens = (1,) * len(lengths)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    segments = MqaSegments(starts(query_lens, DEVICE), seq_lens, table, query_lens, tuple(lengths))
    query = torch.randn(len(lengths), heads, 576, device=DEVICE, dtype=torch.bfloat16)
    return query, cache, segments


def planned(segments: MqaSegments, heads: int, layout: str, form: str = "auto") -> MqaSegments:
    packed = layout not in ("bf16", "fp16", "fp32")
    shape = mqa_shape(form, heads, 2, packed, limits(DEVICE).shared_memory)
    segments.meta = launch_mqa.plan(segments, heads, shape, parts_for(shape), segments.meta)
    return segments


def differing_runs(heads: int, runs: int) -> int:
    lengths = torch.randint(1, 12000, (128,), generator=torch.Generator().manual_seed(0)).tolist()
    query, cache, segments = ragged_batch(heads, "bf16", lengths)
    planned(segments, heads, "bf16")
    outs = [torch.empty(128, heads, 512, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    launch_mqa.mqa(query, cache, segments, SCALE, outs[0], None)
    different = 0
    for _ in range(runs):
        launch_mqa.mqa(query, cache, segments, SCALE, outs[1], None)
        different += not torch.equal(*outs)
    return different


def graph_error(heads: int) -> float:
    """Capture over one set of lengths, replay over another with the plan refreshed outside the graph."""
    case = large(heads, query_lens=(1, 1, 1), key_lens=(900, 4000, 70))
    segments, shape = case.segments(), shape_for(case)
    right = segments.seq_lens.clone()
    segments.seq_lens.copy_(torch.tensor([1, 64, 0], dtype=torch.int32))
    segments.meta = launch_mqa.plan(segments, heads, shape, parts_for(shape))
    out = torch.empty(3, heads, 512, dtype=case.dtype, device=DEVICE)
    lse = torch.empty(3, heads, device=DEVICE)
    launch_mqa.mqa(case.query_THX, case.cache, segments, case.scale, out, lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_mqa.mqa(case.query_THX, case.cache, segments, case.scale, out, lse)
    segments.seq_lens.copy_(right)
    launch_mqa.plan(segments, heads, shape, parts_for(shape), segments.meta)
    graph.replay()
    return relative_error(out, case.expected()[0]) / ROW_TOLERANCE[case.dtype]


def far_pages_error() -> float:
    """The same case with its pages moved to the end of a cache of more than 2^31 elements."""
    case = large(4)
    pages = 2**31 // (64 * 576) + 100
    data = torch.empty(pages, 64, 576, dtype=torch.bfloat16, device=DEVICE)
    moved = pages - case.cache.num_pages
    data[moved:] = case.cache.data
    case.cache = LatentCache(data, case.cache.layout)
    case.pages = [[page + moved for page in row] for row in case.pages]
    return errors(case)


def check_append() -> None:
    for layout in LAYOUTS:
        for style in ("interleaved", "half_split", "none"):
            for dtype in (torch.float32, torch.bfloat16):
                name = f"rope_append {layout} {style} {str(dtype)[6:]}"
                check(name, lambda n=layout, s=style, d=dtype: differing_bytes(n, s, d), 0.0)


def differing_bytes(layout: str, style: str, dtype: torch.dtype) -> float:
    tokens = test_launch_rope.Tokens(layout, dtype, style, DEVICE)
    expected, found = tokens.by_stages(), tokens.by_kernel()
    different = int((expected.data != found.data).sum())
    different += int((expected.query != found.query).sum()) + int((expected.key != found.key).sum())
    return float(different)


def check_prefill() -> None:
    cases = {
        "causal": ((5, 1, 700), (5, 1, 700), True),
        "with a prefix": ((5, 130, 1), (900, 131, 64), True),
        "more queries than keys": ((9, 3), (4, 0), True),
        "unmasked": ((5, 130, 0, 4), (900, 33, 7, 0), False),
    }
    for name, (queries, keys, causal) in cases.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            arguments = (DEVICE, queries, keys, causal, 4, 192, 128, dtype)
            check(f"prefill 192/128 {name} {str(dtype)[6:]}", lambda a=arguments: prefill_error(*a), 1.0)
    check(
        "prefill 256/256",
        lambda: prefill_error(DEVICE, (300,), (300,), True, 4, 256, 256, torch.bfloat16),
        1.0,
    )
    check("prefill 14/6", lambda: prefill_error(DEVICE, (300,), (300,)), 1.0)


def prefill_error(*arguments) -> float:
    case = test_launch_mha.Packed(*arguments)
    (out, lse), (out_expected, lse_expected) = case.run(), case.expected()
    rows = relative_error(out, out_expected) / ROW_TOLERANCE[out.dtype]
    return max(rows, lse_error(lse, lse_expected) / LSE_TOLERANCE)


def report(name: str, run: Callable[[], object], flops: float, size: float) -> None:
    """Median time with a cold L2."""
    try:
        run()
        milliseconds = do_bench(run, warmup=10, rep=60, return_mode="median")
    except Exception:  # noqa: BLE001 - printed
        traceback.print_exc(file=sys.stdout)
        return
    print(
        f"TIME {name}: {milliseconds:.4f} ms, {flops / milliseconds / 1e9:.0f} TFLOP/s, "
        f"{size / milliseconds / 1e6:.0f} GB/s",
        flush=True,
    )


def time_decode() -> None:
    for batch, heads, keys in (
        (128, 128, 4096),
        (128, 64, 4096),
        (128, 16, 4096),
        (4, 128, 32768),
        (1, 16, 8192),
    ):
        flops = 2.0 * batch * heads * keys * 1088
        for layout in ("bf16", "fp8_e4m3", "fp8_ds_mla", "nvfp4"):
            query, cache, segments = ragged_batch(heads, layout, [keys] * batch)
            name = f"decode b{batch} h{heads} kv{keys} {layout}"
            size = float(batch * keys * cache.bytes_per_token)
            out = torch.empty(batch, heads, 512, dtype=torch.bfloat16, device=DEVICE)
            forms = ("rows", "columns") if heads <= 64 else ("auto",)
            for form in forms:
                planned(segments, heads, layout, form)
                arguments = (query, cache, segments, SCALE, out, None)
                report(f"{name} ours {form}", lambda a=arguments: launch_mqa.mqa(*a), flops, size)
                segments.meta = None
            if layout == "bf16":
                time_peers(name, query, cache, segments, flops, size)


def time_peers(name, query, cache, segments, flops, size) -> None:
    heads, batch = query.shape[1], query.shape[0]
    try:
        import flash_mla

        metadata = flash_mla.get_mla_metadata(segments.seq_lens, heads, 1, use_legacy=True)
        data, q = cache.data.unsqueeze(2), query.unsqueeze(1)
        report(
            f"{name} FlashMLA",
            lambda: flash_mla.flash_mla_with_kvcache(
                q, data, segments.block_table, segments.seq_lens, 512, *metadata, SCALE, True
            ),
            flops, size,
        )  # fmt: skip
    except Exception as error:  # noqa: BLE001 - printed
        print(f"TIME {name} FlashMLA: not measured, {type(error).__name__}: {str(error)[:200]}")
    try:
        import flashinfer

        space = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
        wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(space, backend="fa3")
        pages = -(-segments.key_lens[0] // 64)
        indices = segments.block_table[:, :pages].flatten()
        offsets = torch.arange(batch + 1, dtype=torch.int32, device=DEVICE) * pages
        wrapper.plan(
            segments.query_start_loc, offsets, indices, segments.seq_lens, heads, 512, 64, 64, True, SCALE,
            torch.bfloat16, torch.bfloat16,
        )  # fmt: skip
        parts = query[..., :512].contiguous(), query[..., 512:].contiguous()
        ckv, kpe = cache.data[..., :512], cache.data[..., 512:]
        report(f"{name} FlashInfer fa3", lambda: wrapper.run(*parts, ckv, kpe), flops, size)
    except Exception as error:  # noqa: BLE001 - printed
        print(f"TIME {name} FlashInfer: not measured, {type(error).__name__}: {str(error)[:200]}")


def time_prefill() -> None:
    for batch, tokens, heads in ((1, 8192, 16), (4, 2048, 16), (1, 2048, 128)):
        count = batch * tokens
        q, k = (torch.randn(count, heads, 192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
        v = torch.randn(count, heads, 128, dtype=torch.bfloat16, device=DEVICE)
        out, lse = torch.empty_like(v), torch.empty(count, heads, device=DEVICE)
        segments = mha_segments((tokens,) * batch, (tokens,) * batch, True, DEVICE)
        flops = batch * heads * tokens * tokens * 320.0
        name = f"prefill b{batch} s{tokens} h{heads}"
        report(f"{name} ours", lambda a=(q, k, v, segments, SCALE, out, lse): mha(*a), flops, 0.0)
        shaped = [x.view(batch, tokens, heads, -1).transpose(1, 2) for x in (q, k, v)]
        report(f"{name} torch sdpa", lambda a=shaped: sdpa(*a, is_causal=True, scale=SCALE), flops, 0.0)


def time_append() -> None:
    for tokens in (128, 4096):
        layout = layout_for("bf16", torch.bfloat16, 512, 64)
        cache = LatentCache.allocate(layout, tokens // 64 + 1, 64, DEVICE)
        made = test_launch_rope.Tokens("fp8_ds_mla", torch.bfloat16, "interleaved", DEVICE)
        targets = test_launch_rope.SlotTargets.split(torch.randperm(tokens, device=DEVICE), cache.geometry)
        query = torch.randn(tokens, 128, 192, dtype=torch.bfloat16, device=DEVICE)[..., 128:]
        latent, key = torch.randn(tokens, 576, dtype=torch.bfloat16, device=DEVICE).split([512, 64], dim=1)
        repeats = -(-tokens // 7)
        rope = test_launch_rope.RopeInputs(
            "interleaved", made.rope.cos_TF.repeat(repeats, 1)[:tokens],
            made.rope.sin_TF.repeat(repeats, 1)[:tokens], torch.arange(tokens),
        )  # fmt: skip
        size = 2.0 * tokens * (128 * 64 * 2 + 576 * 2)

        def stages(query=query, key=key, latent=latent, rope=rope, cache=cache, targets=targets) -> None:
            test_launch_rope.rotate(query, rope)
            test_launch_rope.rotate(key.unsqueeze(1), rope)
            cache.write_targets(targets, latent, key)

        arguments = (cache, targets, query, latent, key, rope)
        report(f"rope_append t{tokens} ours", lambda a=arguments: rope_append(*a), 0.0, size)
        report(f"rope_append t{tokens} torch stages", stages, 0.0, size)


def main() -> int:
    wanted = sys.argv[1:] or ["check", "time"]
    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name(DEVICE)}")
    torch.cuda.set_device(DEVICE)
    if "check" in wanted:
        check_append()
        check_prefill()
        check_decode()
    if "time" in wanted:
        time_decode()
        time_prefill()
        time_append()
    print(f"{len(failed)} failed: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
