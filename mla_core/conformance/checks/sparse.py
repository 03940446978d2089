"""Sparse attention over given indices: `mqa_sparse(q, cache, segments, indices, scale, out, lse)`.

indices [T, K] int32 are positions in the row's own request. -1, positions beyond the request and positions
after the row's own token are ignored; one that is named twice counts once.
Legend: T query rows, K selected keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mla_core.conformance.bench import Bench
from mla_core.conformance.checks.basic import lengths
from mla_core.conformance.scenes import MqaScene

__all__ = ["all_keys_equal_dense", "ignored_indices", "nothing_selected"]


def all_keys_equal_dense(bench: Bench) -> None:
    """More indices than keys, every key among them: dense attention."""
    scene = bench.mqa(lengths(bench))
    bench.check_sparse(scene, _every(scene, extra=5))


def ignored_indices(bench: Bench) -> None:
    """-1 anywhere, positions outside the request or in the future, duplicates: none of them counts."""
    scene = bench.mqa(lengths(bench))
    every = _every(scene, extra=5)
    order = torch.randperm(every.shape[1], generator=torch.Generator().manual_seed(9))
    outside = torch.full_like(every[:, :2], max(scene.lengths.keys) + 7)
    bench.check_sparse(scene, torch.cat([every[:, order], outside, every[:, :3]], dim=1))


def nothing_selected(bench: Bench) -> None:
    """Only ignored indices: output 0 and lse -inf."""
    scene = bench.mqa(lengths(bench))
    bench.check_sparse(scene, torch.full_like(_every(scene, extra=0), -1), nothing=True)


def _every(scene: MqaScene, *, extra: int) -> Tensor:
    """All positions of the longest request for every row, and some -1."""
    longest = max(scene.lengths.keys)
    row = torch.cat([torch.arange(longest), torch.full((extra,), -1)]).to(torch.int32)
    return row.repeat(scene.q_THX.shape[0], 1).to(scene.q_THX.device)
