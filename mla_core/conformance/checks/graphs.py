"""CUDA graphs: a captured call, replayed over other contents, gives what a direct call gives."""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_core.conformance.bench import Bench, Unavailable
from mla_core.conformance.checks.basic import lengths
from mla_core.conformance.oracle import Answer
from mla_core.conformance.scenes import MqaScene

__all__ = ["replay"]

_WARM_UP = 3


def replay(bench: Bench) -> None:
    """Capture once, then replay with other queries, pages and lengths copied into the same tensors."""
    if bench.device.type != "cuda":
        raise Unavailable("graphs are captured on CUDA devices only")
    captured = _with_own_metadata(bench.mqa(lengths(bench), seed=0))
    other = _with_own_metadata(bench.mqa(_shorter(bench), seed=1))
    out = torch.empty(captured.out_shape, dtype=captured.q_THX.dtype, device=bench.device)
    lse = torch.empty(captured.out_shape[:2], device=bench.device) if bench.asks_lse else None
    graph, segments = _capture(bench, captured, out, lse)
    for scene in (captured, other):
        for name, tensor in captured.inputs.items():
            tensor.copy_(scene.inputs[name])
        segments.query_lens, segments.key_lens = scene.lengths.queries, scene.lengths.keys
        captured.cache.data.copy_(scene.cache.data)
        segments.meta = bench.backend.prepare(bench.cell.kernel, segments, captured.cache.geometry)
        graph.replay()
        torch.cuda.synchronize()
        lse_now = lse if lse is not None else torch.full(out.shape[:2], torch.nan)
        bench.compare(Answer(out, lse_now), scene.expected(bench.cell.control))


def _capture(bench: Bench, scene: MqaScene, out: torch.Tensor, lse: torch.Tensor | None):  # noqa: ANN202
    segments = replace(scene.segments(), graph_rows=len(scene.q_THX))
    segments.meta = bench.backend.prepare(bench.cell.kernel, segments, scene.cache.geometry)
    arguments = (scene.q_THX, scene.cache, segments, scene.scale, out, lse)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            bench.backend.mqa(*arguments)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bench.backend.mqa(*arguments)
    return graph, segments


def _with_own_metadata(scene: MqaScene) -> MqaScene:
    segments = scene.segments()
    return replace(scene, seq_lens=segments.seq_lens, query_start_loc=segments.query_start_loc, _answers={})


def _shorter(bench: Bench):  # noqa: ANN202
    """Fewer keys for every request but the same pages, so that all tensors keep their shapes."""
    whole = lengths(bench)
    page = bench.layer.page_size or 16
    keys = tuple(
        max(key - 1, query, (key - 1) // page * page + 1)
        for key, query in zip(whole.keys, whole.queries, strict=True)
    )
    return replace(whole, keys=keys)
