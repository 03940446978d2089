"""Verification of draft tokens: row t sees the prefix and drafts 0 to t, nothing later."""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_core.conformance.bench import Bench, Wrong
from mla_core.conformance.checks.basic import lengths
from mla_core.conformance.checks.numerics import obeyed_or_refused
from mla_core.conformance.oracle import Answer
from mla_core.conformance.scenes import Lengths, MqaScene

__all__ = ["no_future", "token_by_token", "uncausal"]


def no_future(bench: Bench) -> None:
    """Replacing the last draft token changes the last row of its request and no other."""
    scene = bench.mqa(lengths(bench))
    before = bench.check(scene)
    after = bench.run(_other_last_token(scene))
    last = torch.tensor(scene.lengths.queries).cumsum(0) - 1
    earlier = torch.ones(scene.q_THX.shape[0], dtype=torch.bool)
    earlier[last] = False
    pairs = [Answer(answer.out_THV[earlier], answer.lse_TH[earlier]) for answer in (after, before)]
    bench.compare(*pairs)
    if torch.equal(after.out_THV[last], before.out_THV[last]):
        raise Wrong("a draft token does not see itself")


def uncausal(bench: Bench) -> None:
    """causal=False is obeyed or refused, never ignored."""
    obeyed_or_refused(bench, bench.mqa(replace(lengths(bench), causal=False)))


def token_by_token(bench: Bench) -> None:
    """All drafts at once equal one decode step after the other."""
    scene = bench.mqa(lengths(bench))
    together = bench.check(scene)
    row = 0
    for b, (queries, keys) in enumerate(zip(scene.lengths.queries, scene.lengths.keys, strict=True)):
        for t in range(queries):
            single = replace(
                scene,
                lengths=Lengths((1,), (keys - queries + 1 + t,)),
                q_THX=scene.q_THX[row : row + 1],
                block_table=scene.block_table[b : b + 1],
                _answers={},
            )
            rows = slice(row, row + 1)
            bench.compare(bench.run(single), Answer(together.out_THV[rows], together.lse_TH[rows]))
            row += 1


def _other_last_token(scene: MqaScene) -> MqaScene:
    """The same cache with other values, finite since the last row sees them, in place of every request's last
    token.
    """
    cache = replace(scene.cache, data=scene.cache.data.clone())
    slots = [
        int(scene.block_table[b, (keys - 1) // cache.page_size]) * cache.page_size
        + (keys - 1) % cache.page_size
        for b, keys in enumerate(scene.lengths.keys)
    ]
    generator = torch.Generator().manual_seed(77)
    rows = torch.randn(len(slots), cache.layout.width, generator=generator).to(scene.q_THX)
    where = torch.tensor(slots, dtype=torch.int64, device=scene.q_THX.device)
    cache.write(where, rows[:, : cache.layout.latent], rows[:, cache.layout.latent :])
    return replace(scene, cache=cache, _answers={})
