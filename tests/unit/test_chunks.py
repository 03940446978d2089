"""Chunk planning: every cached token once, in order, never more than the budget at a time; and its bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_core.chunks import Piece, chunk_bytes, plan_chunks
from mla_core.request import LayerRequest

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


def request_of(**changes):
    dims = {"heads": 128, "latent": 512, "nope": 128, "rope": 64, "value": 128}
    return LayerRequest(**{"device": "cpu", "dtype": "bfloat16", "layout": "bf16", **dims, **changes})


def test_a_chunk_of_deepseeks_rows_takes_the_bytes_worked_out_by_hand():
    # 576 cached values; per head 256 expanded, 192 of the key, 192 for a result or a copy; 2 bytes each.
    exact = 4096 * (576 + 128 * (256 + 192 + 192)) * 2
    assert chunk_bytes(request_of(), 4096) == exact + exact // 32


def test_wide_values_decide_the_size_of_a_copy():
    exact = 64 * (576 + 2 * ((128 + 300) + 192 + 300)) * 4
    assert chunk_bytes(request_of(heads=2, value=300, dtype="float32"), 64) == exact + exact // 32


def test_decoding_quantised_rows_counts_where_heads_are_few():
    few, many = ({"heads": heads, "layout": "fp8_ds_mla"} for heads in (1, 16))
    assert chunk_bytes(request_of(**few), 64) > chunk_bytes(request_of(heads=1), 64)
    assert chunk_bytes(request_of(**many), 64) == chunk_bytes(request_of(heads=16), 64)
