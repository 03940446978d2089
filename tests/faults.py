"""Planted faults: what the numeric tests must notice. Each is a context manager over a `World`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mla_core.stages import attend
from tests.support import World

Fault = Callable[[World], AbstractContextManager[object]]


def scale_one_percent_off(world: World) -> AbstractContextManager[object]:
    return patch.object(world.layer, "softmax_scale", 1.01 * world.layer.softmax_scale)


@contextmanager
def mask_one_too_wide(world: World) -> Iterator[None]:
    """Every causal row but a request's last sees one token of the future."""
    backends = {
        world.layer.kernels.mqa,
        *filter(None, (world.layer.kernels.mha, world.layer.kernels.mqa_prefill)),
    }
    with ExitStack() as stack:
        for backend in backends:
            for kernel in ("mha", "mqa"):
                honest = getattr(backend, kernel)
                stack.enter_context(patch.object(backend, kernel, partial(_look_ahead, honest)))
        yield


def _look_ahead(honest: Callable[..., None], query: Tensor, *others: Any) -> None:
    """Compute each row in the place of the next one of its request, where the mask allows one key more."""
    *given, segments, scale, out, lse = others
    honest(query, *others)
    if not segments.causal:
        return
    rows = torch.arange(len(query))
    first = torch.tensor([0, *accumulate(segments.query_lens)])
    moved = query[torch.where(torch.isin(rows, first), rows, rows - 1)]
    ahead, ahead_lse = torch.empty_like(out), None if lse is None else torch.empty_like(lse)
    honest(moved, *given, segments, scale, ahead, ahead_lse)
    early = rows[~torch.isin(rows + 1, first)]
    out[early] = ahead[early + 1]
    if lse is not None:
        lse[early] = ahead_lse[early + 1]


def newest_key_lost(world: World) -> AbstractContextManager[object]:
    """Absorbed attention forgets the last token of every request."""
    return _other_lengths(world, lambda length, page_size: length - 1)


def unowned_rows_read(world: World) -> AbstractContextManager[object]:
    """Absorbed attention goes one token too far, where the page has one."""
    return _other_lengths(world, lambda length, page_size: length + (length % page_size > 0))


def _other_lengths(world: World, change: Callable[[int, int], int]) -> AbstractContextManager[object]:
    backend = world.layer.kernels.mqa
    honest = backend.prepare

    def prepare(kernel: str, segments: Any, geometry: Any) -> Any:
        if kernel.startswith("mqa"):
            lengths = tuple(change(length, geometry.page_size) for length in segments.key_lens)
            segments = replace(segments, key_lens=lengths)
        return honest(kernel, segments, geometry)

    return patch.object(backend, "prepare", prepare)


def rope_twice(world: World) -> AbstractContextManager[object]:
    once = world.layer.program.rope

    def twice(*arguments: Any) -> None:
        once(*arguments)
        once(*arguments)

    return patch.object(world.layer, "program", replace(world.layer.program, rope=twice))


def positions_from_zero(world: World) -> AbstractContextManager[object]:
    """New tokens are rotated as if their request had no context."""
    honest = world.batch

    def restarted(*arguments: Any, **options: Any) -> Any:
        batch = honest(*arguments, **options)
        own = torch.cat([torch.arange(length) for length in batch.query_lens])
        object.__setattr__(batch, "positions", own)
        return batch

    return patch.object(world, "batch", restarted)


def wrong_page(world: World) -> AbstractContextManager[object]:
    """Every request reads its second page where its first one belongs."""

    def shifted(table: Tensor) -> Tensor:
        return table[:, [1, *range(1, table.shape[1])]]

    return patch.object(world, "distort", shifted)


@contextmanager
def lse_in_base_two(world: World) -> Iterator[None]:
    backend = world.layer.kernels.mha
    honest = backend.mha

    def binary(*arguments: Any) -> None:
        honest(*arguments)
        lse_TH = arguments[-1]
        if lse_TH is not None:
            lse_TH.div_(math.log(2))

    with patch.object(backend, "mha", binary):
        yield


def empty_parts_counted(world: World) -> AbstractContextManager[object]:
    """A context chunk in which a request has no key is merged with weight exp(0) instead of 0."""
    honest = attend.merge_into

    def counting(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
        honest(out, lse, part_out, part_lse.nan_to_num(neginf=0.0))

    return patch.object(attend, "merge_into", counting)


@contextmanager
def key_and_value_rows_swapped(world: World) -> Iterator[None]:
    """kv_b_proj read as [value | nope] instead of [nope | value]."""
    layer = world.layer
    weight = layer.projections.kv_b_proj.weight
    honest = weight.clone()
    by_head = honest.view(layer.num_heads, -1, weight.shape[1])
    weight.copy_(by_head.roll(layer.config.v_head_dim, dims=1).reshape(weight.shape))
    layer.prepare_weights()
    yield
    weight.copy_(honest)
    layer.prepare_weights()


def none(world: World) -> AbstractContextManager[object]:
    """No fault at all."""
    return nullcontext()
