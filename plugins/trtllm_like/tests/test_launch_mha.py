"""The prefill kernel against attention in float64: packed requests, strided inputs, awkward lengths."""

from __future__ import annotations

import pytest
import torch

from mla_trtllm_like.launch_mha import mha, parts_of
from plugins.trtllm_like.tests.support import (
    LSE_TOLERANCE,
    ROW_TOLERANCE,
    lse_error,
    mha_segments,
    relative_error,
    textbook,
    visible,
)

TYPES = [torch.float32, torch.float16, torch.bfloat16]


class Packed:
    """Packed requests with NaN rows after the last, q, k and v as strided views."""

    def __init__(self, device, queries, keys, causal=True, heads=2, width=14, value=6, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)

        def rows(count, width):
            wide = torch.full((count + 5, 2, heads, width), torch.nan)
            wide[:count, 1] = torch.randn(count, heads, width, generator=generator)
            return wide.to(dtype).to(device)[:, 1]

        self.queries, self.keys, self.causal, self.heads = queries, keys, causal, heads
        self.q, self.k, self.v = rows(sum(queries), width), rows(sum(keys), width), rows(sum(keys), value)
        self.scale, self.device = 2.0 * width**-0.5, device

    def run(self, scale=None, causal=None):
        out = torch.full((len(self.q), self.heads, self.v.shape[2]), torch.nan, dtype=self.q.dtype)
        out = out.to(self.device)
        lse = torch.full(out.shape[:2], torch.nan, device=self.device)
        causal = self.causal if causal is None else causal
        segments = mha_segments(self.queries, self.keys, causal, self.device)
        mha(self.q, self.k, self.v, segments, scale or self.scale, out, lse)
        total = sum(self.queries)
        assert bool(out[total:].isnan().all()), "rows beyond the last request were written"
        return out[:total], lse[:total]

    def expected(self):
        outs, sums, first, first_key = [], [], 0, 0
        for queries, keys in zip(self.queries, self.keys, strict=True):
            rows, columns = slice(first, first + queries), slice(first_key, first_key + keys)
            sees = visible(queries, keys, self.causal, self.device)
            found = [
                textbook(self.q[rows, h], self.k[columns, h], self.v[columns, h], sees, self.scale)
                for h in range(self.heads)
            ]
            outs.append(torch.stack([out for out, _ in found], dim=1))
            sums.append(torch.stack([lse for _, lse in found], dim=1))
            first, first_key = first + queries, first_key + keys
        return torch.cat(outs), torch.cat(sums)


def check(case: Packed) -> None:
    (out, lse), (out_expected, lse_expected) = case.run(), case.expected()
    assert relative_error(out, out_expected) < ROW_TOLERANCE[out.dtype]
    assert lse_error(lse, lse_expected) < LSE_TOLERANCE


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_causal_requests_attend_among_themselves(device, dtype):
    check(Packed(device, (5, 1, 70), (5, 1, 70), dtype=dtype))


@pytest.mark.parametrize(("queries", "keys"), [((3, 40), (9, 50)), ((6, 2), (2, 0)), ((0, 4), (3, 4))])
def test_causal_order_is_aligned_with_the_last_key(device, queries, keys):
    check(Packed(device, queries, keys))


@pytest.mark.parametrize(("queries", "keys"), [((3, 40), (9, 33)), ((6, 2), (2, 0)), ((0, 4), (3, 140))])
def test_without_a_mask_every_query_sees_all_keys(device, queries, keys):
    check(Packed(device, queries, keys, causal=False))


@pytest.mark.parametrize(("width", "value"), [(16, 16), (24, 33), (48, 20), (5, 3)])
def test_any_width_is_computed_exactly(device, width, value):
    check(Packed(device, (7,), (20,), width=width, value=value))


def test_no_queries_are_no_work(device):
    out, lse = Packed(device, (), ()).run()
    assert (len(out), len(lse)) == (0, 0)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("fault", [{"scale": 0.55}, {"causal": False}], ids=["scale", "mask"])
def test_a_planted_fault_is_noticed(device, fault, dtype):
    """Negative control. The right scale is 2 / sqrt(14) = 0.535."""
    case = Packed(device, (5, 20), (5, 20), dtype=dtype)
    out, _ = case.run(**fault)
    assert relative_error(out, case.expected()[0]) > ROW_TOLERANCE[dtype]


def test_lse_may_be_left_out(device):
    case = Packed(device, (5,), (9,))
    out = torch.full((len(case.q), case.heads, case.v.shape[2]), torch.nan, device=device)
    mha(case.q, case.k, case.v, mha_segments((5,), (9,), True, device), case.scale, out, None)
    assert torch.equal(out[:5], case.run()[0])


@pytest.mark.parametrize(
    ("width", "parts"),
    [(192, (128, 64)), (256, (256, 0)), (128, (128, 0)), (14, (16, 0)), (24, (32, 0)), (80, (64, 16))],
)
def test_a_width_is_cut_into_powers_of_two_that_cover_it(width, parts):
    assert parts_of(width) == parts
