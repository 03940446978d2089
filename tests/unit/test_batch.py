"""Batch: slots, positions and padding follow from lengths; contradictions are refused by place and value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_core import Batch
from mla_core.errors import BatchError


def mixed(**options: object) -> Batch:
    """A prefill of three tokens, a request without new tokens, and a decode behind five cached ones."""
    return Batch.build([3, 0, 1], [0, 2, 5], [[7], [1], [4, 2]], 4, **options)


def test_slots_are_page_times_size_plus_offset():
    assert mixed().slot_mapping.tolist() == [28, 29, 30, 2 * 4 + 1]


def test_positions_continue_behind_the_context():
    assert mixed().positions.tolist() == [0, 1, 2, 5]


def test_starts_and_lengths_describe_the_requests():
    batch = mixed()
    assert batch.query_start_loc.tolist() == [0, 3, 3, 4]
    assert batch.seq_lens.tolist() == [3, 2, 6]


def test_host_mirrors_equal_the_tensors():
    batch = mixed()
    assert batch.query_lens == (3, 0, 1)
    assert batch.context_lens == (0, 2, 5)
    assert batch.lengths == (3, 2, 6)
    assert (batch.num_tokens, batch.num_rows, batch.num_requests) == (4, 4, 3)


def test_short_rows_of_a_listed_table_are_filled_with_minus_one():
    assert mixed().block_table.tolist() == [[7, -1], [1, -1], [4, 2]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_table_keeps_its_integer_type(dtype):
    table = torch.tensor([[7, 0], [1, 0], [4, 2]], dtype=dtype)
    assert Batch.build([3, 0, 1], [0, 2, 5], table, 4).block_table.dtype == dtype


def test_rows_of_a_table_beyond_the_requests_are_left_out():
    assert Batch.build([1], [0], torch.zeros(5, 2, dtype=torch.int32), 4).block_table.shape == (1, 2)


def test_padding_is_requests_without_tokens_and_rows_without_slots():
    batch = mixed(max_tokens=7, max_requests=5)
    assert batch.slot_mapping.tolist() == [28, 29, 30, 9, -1, -1, -1]
    assert batch.positions.tolist() == [0, 1, 2, 5, 0, 0, 0]
    assert batch.query_start_loc.tolist() == [0, 3, 3, 4, 4, 4]
    assert batch.seq_lens.tolist() == [3, 2, 6, 0, 0]
    assert batch.block_table.shape == (5, 2)
    assert (batch.num_tokens, batch.num_rows, batch.num_requests) == (4, 7, 5)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5),
    page_size=st.integers(1, 5),
)
def test_every_token_gets_the_slot_of_its_position_in_its_own_pages(lengths, page_size):
    pages = [list(range(20 * i, 20 * i + 18)) for i in range(len(lengths))]
    batch = Batch.build([q for q, _ in lengths], [c for _, c in lengths], pages, page_size)
    expected = [
        pages[i][p // page_size] * page_size + p % page_size
        for i, (query, context) in enumerate(lengths)
        for p in range(context, context + query)
    ]
    assert batch.slot_mapping.tolist() == expected


def test_the_raw_form_and_the_built_form_agree():
    built = mixed()
    raw = Batch(
        query_start_loc=built.query_start_loc,
        seq_lens=built.seq_lens,
        block_table=built.block_table,
        slot_mapping=built.slot_mapping,
    )
    assert (raw.query_lens, raw.context_lens) == (built.query_lens, built.context_lens)
    assert torch.equal(raw.positions, built.positions)


def test_the_raw_form_keeps_the_callers_tensors():
    built = mixed()
    raw = Batch(
        query_start_loc=built.query_start_loc,
        seq_lens=built.seq_lens,
        block_table=built.block_table,
        slot_mapping=built.slot_mapping,
        positions=built.positions,
    )
    assert raw.block_table is built.block_table
    assert raw.positions is built.positions


def test_a_batch_is_frozen():
    with pytest.raises(AttributeError):
        mixed().num_tokens = 3


def build(queries=(1,), contexts=(0,), table=((0,),), page_size=4, **options) -> Batch:
    return Batch.build(queries, contexts, table, page_size, **options)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"queries": (1, 2)}, "query_lens has 2 requests but context_lens has 1"),
        ({"queries": (-1,)}, r"query_lens\[0\] is -1"),
        ({"contexts": (-3,)}, r"context_lens\[0\] is -3"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"queries": (5,)}, "request 0 has 5 tokens and needs 2 pages of 4, but its block_table row has 1"),
        (
            {"queries": (5,), "table": ((0, -1),)},
            r"request 0 needs 2 pages but block_table\[0\] is \[0, -1\]",
        ),
        ({"table": ()}, "block_table has 0 rows for 1 requests"),
        (
            {"table": torch.zeros(1, 1)},
            r"block_table must be an int32 or int64 tensor with 2 dims, got torch\.float32",
        ),
        ({"table": torch.zeros(1, dtype=torch.int32)}, r"block_table must be .* 2 dims"),
        ({"queries": (3,), "max_tokens": 2}, "max_tokens=2 cannot hold the batch's 3 new tokens"),
        ({"max_requests": 0}, "max_requests=0 cannot hold the batch's 1 requests"),
    ],
)
def test_lengths_and_tables_that_contradict_each_other_are_refused(wrong, message):
    with pytest.raises(BatchError, match=message):
        build(**wrong)


def raw(**changes) -> Batch:
    fields = {
        "query_start_loc": [0, 2, 3],
        "seq_lens": [2, 5],
        "block_table": [[0], [1]],
        "slot_mapping": [0, 1, 4],
    }
    tensors = {name: torch.tensor(value) for name, value in {**fields, **changes}.items()}
    return Batch(**tensors)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"query_start_loc": [0, 3]}, "query_start_loc needs 3 entries for 2 seq_lens, got 2"),
        ({"query_start_loc": [1, 2, 3]}, "query_start_loc must start at 0, got 1"),
        ({"query_start_loc": [0, 2, 9]}, "query_start_loc ends at 9 but slot_mapping has only 3 rows"),
        (
            {"query_start_loc": [0, 3, 2], "seq_lens": [3, 5]},
            "query_start_loc decreases at request 1: 3 then 2",
        ),
        ({"seq_lens": [1, 5]}, r"seq_lens\[0\] is 1, less than the request's 2 new tokens"),
        ({"block_table": [[0]]}, "block_table has 1 rows for 2 requests"),
        ({"positions": [0, 1]}, "positions has 2 rows but slot_mapping has 3"),
        ({"seq_lens": [2.0, 5.0]}, r"seq_lens must be an int32 or int64 tensor .* got torch\.float32"),
        ({"slot_mapping": [[0, 1, 4]]}, "slot_mapping must be .* 1 dims"),
    ],
)
def test_raw_tensors_that_contradict_each_other_are_refused(wrong, message):
    with pytest.raises(BatchError, match=message):
        raw(**wrong)


def test_the_unchanged_raw_tensors_are_accepted():
    assert raw().context_lens == (0, 4)


def test_something_that_is_no_tensor_is_refused_by_name_and_type():
    with pytest.raises(BatchError, match="seq_lens must be an integer tensor with 1 dims, got list"):
        Batch(
            query_start_loc=torch.tensor([0]),
            seq_lens=[],
            block_table=torch.zeros(0, 0),
            slot_mapping=torch.zeros(0),
        )
