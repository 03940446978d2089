"""Planning a step: requests are split by phase, rows stay views where they can, chunks fit the workspace."""

from __future__ import annotations

import pytest
import torch

from mla_core import MLA, Batch
from mla_core.planner import prepare
from mla_core.step import AbsorbedPart, ExpandedPart, Step
from tests.support import build, poisoned_cache, tiny_config

PAGES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def step_of(queries: list[int], contexts: list[int], layer: MLA | None = None, **options: object) -> Step:
    layer = layer or build(tiny_config(), **options)
    batch = Batch.build(queries, contexts, PAGES[: len(queries)], 4)
    return prepare(layer, batch, poisoned_cache(layer, 12, 4))


def test_decode_requests_go_to_the_decode_kernel_and_longer_ones_to_prefill():
    decode, prefill = step_of([1, 6], [3, 0]).parts
    assert isinstance(decode, AbsorbedPart)
    assert isinstance(prefill, ExpandedPart)
    assert (decode.kernel, decode.rows, prefill.kernel, prefill.rows) == (
        "mqa",
        slice(0, 1),
        "mha",
        slice(1, 7),
    )


def test_a_phase_without_requests_has_no_part():
    assert [part.kernel for part in step_of([1, 1], [3, 4]).parts] == ["mqa"]
    assert [part.kernel for part in step_of([2, 3], [3, 4]).parts] == ["mha"]
    assert step_of([0], [3]).parts == ()


def test_absorbed_prefill_is_a_part_of_its_own():
    decode, prefill = step_of([1, 6], [3, 2], prefill_form="absorb").parts
    assert (decode.kernel, prefill.kernel) == ("mqa", "mqa_prefill")
    assert prefill.segments.key_lens == (8,)


def test_the_rows_of_scattered_requests_are_an_index_and_those_of_neighbours_a_slice():
    decode, prefill = step_of([1, 3, 1, 2], [2, 0, 4, 0]).parts
    assert decode.rows.tolist() == [0, 4]
    assert prefill.rows.tolist() == [1, 2, 3, 5, 6]


def test_requests_without_tokens_do_not_break_up_neighbours():
    (decode,) = step_of([1, 0, 1], [2, 3, 4]).parts
    assert decode.rows == slice(0, 2)
    assert decode.segments.query_lens == (1, 1)
    assert decode.segments.key_lens == (3, 5)


def test_a_pure_decode_batch_passes_on_its_own_table_and_lengths():
    layer = build(tiny_config())
    batch = Batch.build([1, 1], [3, 4], PAGES[:2], 4)
    segments = prepare(layer, batch, poisoned_cache(layer, 12, 4)).parts[0].segments
    assert segments.block_table is batch.block_table
    assert segments.seq_lens is batch.seq_lens


def test_segments_of_some_requests_hold_their_rows_of_table_and_lengths():
    segments = step_of([3, 1, 2, 1], [0, 3, 0, 5]).parts[0].segments
    assert segments.seq_lens.tolist() == [4, 6]
    assert segments.block_table.tolist() == [PAGES[1], PAGES[3]]
    assert segments.query_start_loc.tolist() == [0, 1, 2]


def test_new_tokens_attend_causally_and_context_chunks_without_a_mask():
    (part,) = step_of([2, 2], [5, 4], workspace_tokens=6).parts
    assert part.own.causal
    assert [chunk.segments.causal for chunk in part.chunks] == [False, False]


def test_context_is_cut_into_chunks_of_the_workspace():
    (part,) = step_of([2, 3, 2], [5, 0, 4], workspace_tokens=6).parts
    # The first chunk ends with one token of request 2; request 1 has nothing cached but lies in between.
    assert [chunk.segments.key_lens for chunk in part.chunks] == [(5, 0, 1), (3,)]
    assert [chunk.rows for chunk in part.chunks] == [slice(0, 7), slice(5, 7)]
    assert [chunk.segments.query_lens for chunk in part.chunks] == [(2, 3, 2), (2,)]


def test_context_chunks_point_at_the_pages_and_offsets_of_their_tokens():
    (part,) = step_of([2], [6], workspace_tokens=4).parts
    where = [(chunk.targets.pages.tolist(), chunk.targets.offsets.tolist()) for chunk in part.chunks]
    assert where == [([0, 0, 0, 0], [0, 1, 2, 3]), ([1, 1], [0, 1])]


def test_a_prefill_without_context_has_no_chunks():
    (part,) = step_of([5], [0], workspace_tokens=1).parts
    assert part.chunks == ()


@pytest.mark.parametrize("workspace", [1, 3, 4, 100])
def test_no_chunk_expands_more_than_the_workspace(workspace):
    (part,) = step_of([2, 2, 2], [7, 3, 6], workspace_tokens=workspace).parts
    sizes = [sum(chunk.segments.key_lens) for chunk in part.chunks]
    assert sum(sizes) == 16
    assert max(sizes) <= workspace


def test_a_step_of_an_unrotated_model_has_no_rope_inputs():
    layer = build(tiny_config(rope={"style": "none"}))
    assert step_of([2], [0], layer).rope is None


def test_rope_inputs_have_one_row_a_token_row_in_float32():
    rope = step_of([2, 1], [0, 3]).rope
    assert (rope.style, rope.cos_TF.shape, rope.cos_TF.dtype) == ("interleaved", (3, 2), torch.float32)
    assert rope.positions_T.tolist() == [0, 1, 3]


def test_a_step_without_position_scaling_has_no_query_factors():
    assert step_of([2], [0]).query_factors_T is None


def test_query_factors_follow_the_positions():
    layer = build(tiny_config(query_scaling={"beta": 1.0, "floor_scale": 2}))
    factors = step_of([4], [0], layer).query_factors_T
    torch.testing.assert_close(factors, 1 + torch.tensor([1.0, 1.0, 2.0, 2.0]).log())
