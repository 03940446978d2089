"""Nothing to do: no requests, and requests without new tokens between others."""

from __future__ import annotations

from mla_core.conformance.bench import Bench
from mla_core.conformance.scenes import Lengths

__all__ = ["idle_requests", "no_requests"]


def no_requests(bench: Bench) -> None:
    """A call without requests returns; no shape is too small."""
    if bench.cell.kernel == "mha_prefill":
        bench.check(bench.mha(Lengths((), ())))
        bench.check(bench.mha(Lengths((0, 0), (0, 3))))
    else:
        bench.check(bench.mqa(Lengths((), ())))
        bench.check(bench.mqa(Lengths((0, 0), (0, 3))))


def idle_requests(bench: Bench) -> None:
    """Requests with no new tokens, with and without keys, between live ones."""
    if bench.cell.kernel == "mha_prefill":
        bench.check(bench.mha(Lengths((0, 3, 0, 2, 0), (0, 3, 4, 5, 0))))
        bench.check(bench.mha(Lengths((2, 3, 0), (0, 4, 2), causal=False)))
        return
    page = bench.layer.page_size or 16
    bench.check(bench.mqa(Lengths((0, 1, 0, 1, 0), (0, page + 1, 5, 2, page))))
