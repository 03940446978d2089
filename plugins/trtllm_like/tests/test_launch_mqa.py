"""Decode kernels against attention in float64, in both forms, over every layout and awkward batch."""

from __future__ import annotations

import pytest
import torch

from mla_trtllm_like import launch_mqa
from mla_trtllm_like.tuning import MqaShape
from plugins.trtllm_like.tests.support import (
    LSE_TOLERANCE,
    ROW_TOLERANCE,
    PagedCase,
    lse_error,
    relative_error,
)

ROWS = MqaShape("rows", group=1, rows=16, keys=16, warps=4, depth=2, resident=1)
PAIRS = MqaShape("rows", group=2, rows=16, keys=16, warps=4, depth=2, resident=1)
COLUMNS = MqaShape("columns", group=1, rows=16, keys=32, warps=4, depth=2, resident=1)
FORMS = pytest.mark.parametrize("shape", [ROWS, PAIRS, COLUMNS], ids=["rows", "pairs", "columns"])


def check(case: PagedCase, shape: MqaShape, parts: int) -> None:
    (out, lse), (out_expected, lse_expected) = case.run(shape, parts), case.expected()
    assert relative_error(out, out_expected) < ROW_TOLERANCE[case.dtype]
    assert lse_error(lse, lse_expected) < LSE_TOLERANCE


@FORMS
@pytest.mark.parametrize("parts", [1, 3, 12])
def test_any_number_of_parts_gives_the_same_attention(device, shape, parts):
    check(PagedCase(device), shape, parts)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_16_bit_queries_read_a_cache_of_their_own_type(device, shape, dtype):
    layout = "fp16" if dtype == torch.float16 else "bf16"
    check(PagedCase(device, layout=layout, dtype=dtype, heads=7, key_lens=(5, 40, 0, 2, 33)), shape, 5)


@FORMS
@pytest.mark.parametrize(
    ("layout", "latent", "rope"),
    [
        ("fp8_e4m3", 24, 6),
        ("nvfp4", 48, 16),
        ("nvfp4_rope_bf16", 48, 16),
        ("fp8_ds_mla", 512, 64),
        ("fp32", 16, 4),
    ],
)
def test_every_layout_is_read_from_its_pages(device, shape, layout, latent, rope):
    case = PagedCase(
        device, layout=layout, dtype=torch.bfloat16, latent=latent, rope=rope, heads=5,
        page_size=64 if "nvfp4" in layout else 16, query_lens=(1, 2), key_lens=(3, 70),
    )  # fmt: skip
    check(case, shape, 3)


@FORMS
@pytest.mark.parametrize("page_size", [1, 16, 48, 64])
def test_any_page_size_gives_the_same_attention(device, shape, page_size):
    check(PagedCase(device, page_size=page_size, query_lens=(1, 2), key_lens=(17, 70)), shape, 3)


@FORMS
def test_without_a_causal_order_every_query_sees_all_keys(device, shape):
    check(PagedCase(device, causal=False), shape, 3)


@FORMS
@pytest.mark.parametrize(("latent", "rope"), [(12, 0), (33, 6), (16, 16)])
def test_widths_that_are_no_powers_of_two_are_padded_inside(device, shape, latent, rope):
    check(PagedCase(device, latent=latent, rope=rope), shape, 3)


@FORMS
def test_a_query_with_fewer_keys_than_tokens_leaves_its_first_rows_empty(device, shape):
    case = PagedCase(device, query_lens=(4, 2), key_lens=(2, 0))
    out, lse = case.run(shape, 2)
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert bool(lse[:2].isneginf().all())
    check(case, shape, 2)


@FORMS
def test_rows_beyond_the_last_request_are_left_alone(device, shape):
    case = PagedCase(device, query_lens=(1, 1, 0), key_lens=(9, 40, 0))
    case.query_THX = torch.cat([case.query_THX, torch.full_like(case.query_THX, torch.nan)])
    out, _ = case.run(shape, 3)
    assert bool(out[2:].isnan().all())
    assert relative_error(out[:2], case.expected()[0][:2]) < ROW_TOLERANCE[torch.float32]


def test_no_requests_are_no_work(device):
    case = PagedCase(device, query_lens=(), key_lens=())
    out, lse = case.run(ROWS, 3)
    assert (out.shape[0], lse.shape[0]) == (0, 0)


def test_a_refreshed_plan_keeps_its_tensors_and_follows_the_new_lengths(device):
    short = PagedCase(device, query_lens=(1, 1), key_lens=(3, 5))
    case = PagedCase(device, query_lens=(1, 1), key_lens=(130, 5))
    segments = case.segments()
    before = launch_mqa.plan(short.segments(), case.heads, ROWS, 3)
    segments.meta = launch_mqa.plan(segments, case.heads, ROWS, 3, before)
    assert segments.meta is before
    out, _ = case.run(ROWS, 3, segments=segments)
    assert relative_error(out, case.expected()[0]) < ROW_TOLERANCE[torch.float32]


def test_a_stale_plan_is_noticed(device):
    """Negative control of the test above."""
    short = PagedCase(device, query_lens=(1, 1), key_lens=(3, 5))
    case = PagedCase(device, query_lens=(1, 1), key_lens=(130, 5))
    segments = case.segments()
    segments.meta = launch_mqa.plan(short.segments(), case.heads, ROWS, 3)
    out, _ = case.run(ROWS, 3, segments=segments)
    assert relative_error(out, case.expected()[0]) > 100 * ROW_TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["scale", "mask", "page"])
def test_a_planted_fault_is_noticed(device, fault, dtype):
    """Negative control: what `check` allows is far less than any of these does."""
    case = PagedCase(device, layout="bf16" if dtype == torch.bfloat16 else "fp32", dtype=dtype)
    expected, lse_expected = case.expected()
    segments, scale = case.segments(), case.scale
    if fault == "scale":
        scale *= 1.01
    if fault == "mask":
        segments.seq_lens -= torch.tensor([1, 1, 0, 1, 1], device=device, dtype=torch.int32)
    if fault == "page":
        case.cache = type(case.cache)(case.cache.data.roll(1, 0), case.cache.layout, case.cache.scales)
    out, lse = case.run(ROWS, 3, segments=segments, scale=scale)
    noticed = relative_error(out, expected) > ROW_TOLERANCE[dtype]
    assert noticed or lse_error(lse, lse_expected) > LSE_TOLERANCE


def test_lse_may_be_left_out(device):
    case = PagedCase(device)
    segments = case.segments()
    segments.meta = launch_mqa.plan(segments, case.heads, ROWS, 3)
    out = torch.full((len(case.query_THX), case.heads, case.latent), torch.nan, device=device)
    launch_mqa.mqa(case.query_THX, case.cache, segments, case.scale, out, None)
    assert torch.equal(out, case.run(ROWS, 3)[0])


def test_a_nan_in_a_live_row_comes_out(device):
    case = PagedCase(device, query_lens=(1, 1), key_lens=(40, 9))
    case.cache.data[case.pages[0][0], 3] = torch.nan
    out, lse = case.run(ROWS, 3)
    assert bool(out[0].isnan().all() & lse[0].isnan().all())
    assert relative_error(out[1:], case.expected()[0][1:]) < ROW_TOLERANCE[torch.float32]


@pytest.mark.parametrize("layout", ["fp8_ds_mla", "nvfp4_rope_bf16"])
def test_rows_may_start_at_odd_bytes(device, layout):
    latent, rope = (512, 64) if layout == "fp8_ds_mla" else (32, 16)
    case = PagedCase(
        device, layout=layout, dtype=torch.bfloat16, latent=latent, rope=rope, heads=2, page_size=64,
        query_lens=(1,), key_lens=(40,),
    )  # fmt: skip
    aligned = case.cache.data
    odd = torch.full((*aligned.shape[:-1], aligned.shape[-1] + 1), 0x7F, dtype=torch.uint8, device=device)
    odd[..., 1:] = aligned
    case.cache = type(case.cache)(odd[..., 1:], case.cache.layout, case.cache.scales)
    check(case, COLUMNS, 2)
