"""The latent cache: what is written at a slot is read from its page and offset, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_core import CacheGeometry, CachePool, LatentCache, SlotTargets
from mla_core.cache import Scales, layout_for
from mla_core.errors import CacheError

LAYOUT = layout_for("fp32", torch.float32, 5, 2)


def cache_of(num_pages: int = 4, page_size: int = 3) -> LatentCache:
    return LatentCache.allocate(LAYOUT, num_pages, page_size, "cpu")


def rows(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct latents and rope keys."""
    values = torch.arange(1.0, 1 + 7 * count).view(count, 7)
    return values[:, :5], values[:, 5:]


def test_a_new_cache_is_zero():
    assert not cache_of().data.any()


def test_a_new_cache_knows_its_geometry_and_cost():
    cache = cache_of()
    assert cache.geometry == CacheGeometry(LAYOUT, 3, 4, torch.device("cpu"))
    assert (cache.num_pages, cache.page_size, cache.bytes_per_token) == (4, 3, 28)


@settings(max_examples=30)
@given(page_size=st.integers(1, 5), length=st.integers(0, 15), seed=st.integers(0, 5))
def test_a_request_reads_back_what_was_written_through_its_shuffled_pages(page_size, length, seed):
    num_pages = 16
    pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))
    cache = cache_of(num_pages, page_size)
    positions = torch.arange(length)
    latent_TL, k_rope_TR = rows(length)
    cache.write(pages[positions // page_size] * page_size + positions % page_size, latent_TL, k_rope_TR)
    latent_SL, k_rope_SR = cache.read(pages, length)
    assert torch.equal(latent_SL, latent_TL)
    assert torch.equal(k_rope_SR, k_rope_TR)


def test_a_read_may_ask_for_another_dtype():
    cache = cache_of()
    cache.write(torch.tensor([3]), *rows(1))
    latent_SL, k_rope_SR = cache.read(torch.tensor([1]), 1, torch.bfloat16)
    assert (latent_SL.dtype, k_rope_SR.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("page", [-1, 4, 2**40])
def test_reading_a_page_that_does_not_exist_is_refused(page):
    with pytest.raises(CacheError, match=f"page {page} is outside the cache, which has pages 0 to 3"):
        cache_of().read(torch.tensor([0, page]), 4)


def test_reading_beyond_the_row_of_pages_is_refused_with_both_counts():
    with pytest.raises(CacheError, match="7 tokens need 3 pages of 3, but the row has 2"):
        cache_of().read(torch.tensor([0, 1]), 7)


def test_entries_beyond_the_pages_that_are_read_may_be_anything():
    cache = cache_of()
    cache.write(torch.tensor([6]), *rows(1))
    assert torch.equal(cache.read(torch.tensor([2, -1, 2**40]), 1)[0], rows(1)[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_split_into_page_and_offset_and_leave_out_minus_one(dtype):
    targets = SlotTargets.split(torch.tensor([7, -1, 0, 11], dtype=dtype), cache_of().geometry)
    assert (targets.pages.tolist(), targets.offsets.tolist()) == ([2, 0, 3], [1, 0, 2])
    assert targets.rows.tolist() == [0, 2, 3]


def test_slots_that_are_all_written_need_no_selection_of_rows():
    assert SlotTargets.split(torch.tensor([0, 5]), cache_of().geometry).rows is None


@pytest.mark.parametrize("slot", [-2, 12])
def test_a_slot_outside_the_cache_is_refused_with_the_limits(slot):
    with pytest.raises(CacheError, match=rf"slot {slot} .*4 pages of 3 tokens have slots 0 to 11"):
        cache_of().write(torch.tensor([0, slot]), *rows(2))


def test_a_tensor_of_another_row_width_is_refused_with_both_shapes():
    with pytest.raises(CacheError, match=r"\[num_pages, page_size, 7\].*\[4, 3, 8\]"):
        LatentCache.from_tensor(torch.zeros(4, 3, 8), LAYOUT, 3)


def test_a_tensor_of_another_dtype_is_refused_with_both():
    with pytest.raises(CacheError, match=r"torch\.float32.*torch\.bfloat16"):
        LatentCache.from_tensor(torch.zeros(4, 3, 7, dtype=torch.bfloat16), LAYOUT, 3)


def test_a_tensor_with_pages_of_no_tokens_is_refused():
    with pytest.raises(CacheError, match="page_size must be at least 1, got 0"):
        LatentCache.from_tensor(torch.zeros(4, 0, 7), LAYOUT, 0)


@pytest.mark.parametrize(("pages", "size"), [(-1, 3), (2, 0)])
def test_a_cache_of_impossible_size_is_refused(pages, size):
    with pytest.raises(CacheError, match=f"got {pages} and {size}"):
        LatentCache.allocate(LAYOUT, pages, size, "cpu")


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_positive_number_is_refused(scale):
    with pytest.raises(CacheError, match="k_scale must be a positive finite number"):
        Scales(scale)


def test_a_pool_has_one_cache_a_layer_with_one_geometry():
    pool = CachePool(LAYOUT, layers=[3, 5], num_pages=4, page_size=3)
    assert [pool.layer(index).layer_idx for index in (3, 5)] == [3, 5]
    assert pool.layer(3).geometry == pool.layer(5).geometry == pool.geometry
    assert pool.layer(3).data.data_ptr() != pool.layer(5).data.data_ptr()


def test_a_pool_counts_the_bytes_of_all_its_layers():
    assert CachePool(LAYOUT, layers=3, num_pages=1, page_size=1).bytes_per_token == 3 * 28


def test_a_pool_refuses_a_layer_it_does_not_hold_with_what_it_holds():
    with pytest.raises(CacheError, match=r"holds layers \[3, 5\], not layer 4"):
        CachePool(LAYOUT, layers=[5, 3], num_pages=1, page_size=1).layer(4)


def test_a_pool_of_no_layers_is_refused():
    with pytest.raises(CacheError, match="at least one layer"):
        CachePool(LAYOUT, layers=[], num_pages=1, page_size=1)
