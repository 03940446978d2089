"""Chunk planning: every cached token once, in order, never more than the budget at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_core.chunks import Piece, plan_chunks

lengths = st.lists(st.integers(0, 30), max_size=6)


@given(context_lens=lengths, budget=st.integers(1, 40))
def test_every_cached_token_is_in_exactly_one_piece_in_order(context_lens, budget):
    pieces = [piece for chunk in plan_chunks(context_lens, budget) for piece in chunk]
    tokens = [(piece.request, token) for piece in pieces for token in range(piece.start, piece.end)]
    assert tokens == [(r, token) for r, length in enumerate(context_lens) for token in range(length)]


@given(context_lens=lengths, budget=st.integers(1, 40))
def test_all_chunks_but_the_last_use_the_budget_exactly(context_lens, budget):
    sizes = [sum(piece.end - piece.start for piece in chunk) for chunk in plan_chunks(context_lens, budget)]
    assert all(size == budget for size in sizes[:-1])
    assert all(0 < size <= budget for size in sizes)


@pytest.mark.parametrize("context_lens", [[], [0], [0, 0, 0]])
def test_nothing_cached_needs_no_chunk(context_lens):
    assert plan_chunks(context_lens, 5) == []


def test_a_request_may_straddle_chunks_and_a_chunk_may_hold_several_requests():
    assert plan_chunks([3, 0, 4], 5) == [[Piece(0, 0, 3), Piece(2, 0, 2)], [Piece(2, 2, 4)]]
