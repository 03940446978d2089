"""Which block shapes a device and a layer get."""

from __future__ import annotations

import pytest

from mla_trtllm_like.tuning import mqa_shape

H100, A100, SMALL = 232448, 166912, 101376


@pytest.mark.parametrize(
    ("max_rows", "form", "tile_rows"),
    [(1, "columns", 16), (16, "columns", 16), (17, "columns", 32), (33, "rows", 64), (128, "rows", 128)],
)
def test_few_query_rows_are_columns_and_many_are_rows(max_rows, form, tile_rows):
    shape = mqa_shape("auto", max_rows, 2, packed=False, shared_memory=H100)
    assert (shape.form, shape.tile_rows) == (form, tile_rows)


def test_a_named_form_is_obeyed():
    assert mqa_shape("columns", 128, 2, packed=False, shared_memory=H100).form == "columns"
    assert mqa_shape("rows", 1, 2, packed=False, shared_memory=H100).form == "rows"


def test_float32_is_always_computed_in_rows():
    assert mqa_shape("columns", 8, 4, packed=True, shared_memory=A100).form == "rows"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("max_rows", [16, 32, 64])
def test_less_shared_memory_means_no_larger_blocks(max_rows, packed):
    wide, middle, narrow = (
        mqa_shape("auto", max_rows, 2, packed=packed, shared_memory=size) for size in (H100, A100, SMALL)
    )
    assert wide.keys >= middle.keys >= narrow.keys
