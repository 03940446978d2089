"""What FlashInfer is told about a step: pieces, launches, page lists."""

from __future__ import annotations

import pytest
import torch

from mla_flashinfer import planning
from mla_flashinfer.planning import (
    Piece,
    Room,
    csr,
    launches,
    pieces,
    room_for,
    spans,
    split_scale,
    starts,
    workspace_bytes,
)


def seen(found):
    """(request, keys that a row sees), row by row."""
    return [(p.request, max(p.keys - p.queries + 1 + t, 0)) for p in found for t in range(p.queries)]


def test_requests_that_fit_stay_whole():
    assert pieces((1, 4), (9, 4), causal=True, heads=16) == (Piece(0, 1, 9), Piece(1, 4, 4))


def test_requests_without_new_tokens_are_not_planned():
    assert pieces((0, 1, 0), (5, 3, 0), causal=True, heads=16) == (Piece(1, 1, 3),)


def test_rows_before_every_key_become_a_piece_without_keys():
    assert pieces((5,), (2,), causal=True, heads=16) == (Piece(0, 3, 0), Piece(0, 2, 2))


def test_a_request_without_keys_is_one_piece_without_keys():
    assert pieces((2,), (0,), causal=True, heads=16) == (Piece(0, 2, 0),)


def test_without_a_mask_every_row_sees_every_key():
    assert pieces((5,), (2,), causal=False, heads=16) == (Piece(0, 5, 2),)


@pytest.mark.parametrize("heads", [3, 12, 20, 24, 40, 48, 63, 65, 96, 127])
def test_no_tile_border_falls_inside_a_token(heads):
    found = pieces((1, 7, 40), (1, 7, 90), causal=True, heads=heads)
    average = sum(piece.queries for piece in found) * heads // len(found)
    tile = 128 if average > 64 else 64
    assert all(piece.queries * heads <= tile for piece in found)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32, 64, 128])
def test_heads_that_fill_tiles_are_not_split(heads):
    assert len(pieces((40,), (90,), causal=True, heads=heads)) == 1


@pytest.mark.parametrize("heads", [3, 16, 96])
def test_splitting_changes_no_row_and_no_key(heads):
    queries, keys = (3, 0, 9, 4), (7, 2, 9, 1)
    expected = [
        (b, max(key - query + 1 + t, 0))
        for b, (query, key) in enumerate(zip(queries, keys, strict=True))
        for t in range(query)
    ]
    assert seen(pieces(queries, keys, causal=True, heads=heads)) == expected


def test_a_long_prefill_is_cut_to_what_one_plan_holds():
    found = pieces((20_000,), (21_000,), causal=True, heads=128)
    assert [(p.queries, p.keys) for p in found] == [(8000, 9000), (8000, 17_000), (4000, 21_000)]


def test_launches_keep_order_and_hold_no_more_tiles_than_a_plan():
    found = pieces((5000, 5000, 1, 7000), (5000, 5000, 9, 7000), causal=True, heads=128)
    groups = launches(found, 128)
    assert [piece for group in groups for piece in group] == list(found)
    assert [sum(p.queries for p in group) * 128 // 64 <= planning.MAX_TILES for group in groups] == [True] * 3


def test_nothing_to_do_needs_no_launch():
    assert launches(pieces((0, 0), (0, 3), causal=True, heads=16), 16) == []


def test_csr_lists_the_pages_of_each_piece_and_reads_no_other_entry():
    hostile = 2**31 - 1
    table = torch.tensor([[7, 3, hostile], [5, -1, hostile], [2, 9, 4]])
    plan = csr([Piece(0, 1, 5), Piece(2, 2, 12), Piece(1, 3, 0)], table, 4)
    assert plan.qo_indptr.tolist() == [0, 1, 3, 6]
    assert plan.kv_indptr.tolist() == [0, 2, 5, 5]
    assert plan.kv_indices.tolist() == [7, 3, 2, 9, 4]
    assert plan.kv_len_arr.tolist() == [5, 12, 0]
    assert {tensor.dtype for tensor in vars(plan).values()} == {torch.int32}


def test_csr_of_pieces_without_keys_lists_no_page():
    plan = csr([Piece(0, 2, 0)], torch.zeros(1, 0, dtype=torch.int32), 64)
    assert (plan.kv_indptr.tolist(), plan.kv_indices.numel()) == ([0, 0], 0)


def test_spans_keep_every_packed_row_and_split_off_rows_without_keys():
    assert spans((3, 0, 2), (3, 4, 1), causal=True) == ([3, 0, 1, 1], [3, 4, 0, 1])


def test_spans_without_a_mask_are_the_requests():
    assert spans((3, 2), (0, 1), causal=False) == ([3, 2], [0, 1])


def test_starts_are_where_spans_begin_and_end():
    assert starts([2, 0, 3]).tolist() == [0, 2, 2, 5]


def test_the_workspace_holds_two_tiles_a_multiprocessor():
    assert workspace_bytes(132, 512) >= 2 * 132 * 64 * (512 * 2 + 4)


@pytest.mark.parametrize("queries", [(1, 0, 0), (4, 4, 4), (2, 1, 3), (0, 0, 0)])
@pytest.mark.parametrize("heads", [1, 3, 16, 20, 64, 96, 128])
def test_a_graph_has_room_for_every_step_and_each_fills_it(heads, queries):
    room = room_for(3, 7, 12, 4, heads, causal=True)
    filled = room.fill(pieces(queries, (9, 3, 2), causal=True, heads=heads))
    assert (len(filled), sum(piece.queries for piece in filled)) == (room.pieces, room.rows)


def test_padding_sees_no_keys():
    assert Room(rows=4, pieces=4, pages=9).fill((Piece(2, 1, 7),)) == (
        Piece(2, 1, 7),
        Piece(0, 3, 0),
        Piece(0, 0, 0),
        Piece(0, 0, 0),
    )


@pytest.mark.parametrize("found", [(Piece(0, 3, 3),), (Piece(0, 1, 1),) * 2], ids=["rows", "pieces"])
def test_what_a_graph_has_no_room_for_is_not_filled_in(found):
    assert Room(rows=2, pieces=2, pages=9).fill(found) is None


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.03, 448.0, 2.0**-100, 1.9 * 2.0**99])
def test_a_scale_is_a_power_of_two_times_less_than_two(scale):
    power, rest = split_scale(scale)
    assert power * rest == scale
    assert 1 <= rest < 2
    assert torch.tensor(power).bfloat16().item() == power
