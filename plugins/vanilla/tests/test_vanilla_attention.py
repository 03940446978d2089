"""The one attention function of the vanilla backend, against a float64 softmax.

Legend: G groups, M query rows, S keys, E query width, V value width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import mla_vanilla.attention as module
from mla_vanilla.attention import attention, causal_attention

SCALE = 0.37


def inputs(groups: int, rows: int, keys: int, width: int, value: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * 100 + keys)
    shapes = ((groups, rows, width), (groups, keys, width), (groups, keys, value))
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def expected(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = SCALE * q.double() @ k.double().transpose(1, 2)
    if visible is not None:
        hidden = torch.arange(k.shape[1]) >= visible.unsqueeze(-1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    return torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None]) @ v.double(), lse


def worst(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> float:
    """Largest difference of output and lse, where equal infinities differ by nothing."""
    differences = [torch.where(a == b, 0.0, a.double() - b).abs() for a, b in zip(found, wanted, strict=True)]
    return max(float(d.nan_to_num(nan=torch.inf).max()) if d.numel() else 0.0 for d in differences)


VISIBLE = {
    "all": None,
    "causal": torch.tensor([[1, 2, 3, 4, 5]]),
    "one_row_for_all_groups": torch.tensor([[7, 3, 1, 9, 9]]),
    "one_column_for_all_rows": torch.tensor([[9], [4], [1]]),
    "every_row_its_own": torch.tensor([[9, 1, 2, 3, 4], [1, 1, 1, 1, 1], [5, 6, 7, 8, 9]]),
    "some_rows_see_nothing": torch.tensor([[0, 2, 0, 9, 1]]),
    "nobody_sees_anything": torch.tensor([[0], [0], [0]]),
}
WIDTHS = {"equal": (6, 6), "narrow_value": (6, 4), "wide_value": (4, 7), "one": (1, 1)}
COMPUTE = {"on_cpu": module._on_cpu, "by_matmul": module._by_matmul}


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("widths", WIDTHS)
def test_attention_matches_float64_for_every_mask_and_width(widths, visible, compute, monkeypatch):
    monkeypatch.setattr(module, "_on_cpu", COMPUTE[compute])
    q, k, v = inputs(3, 5, 9, *WIDTHS[widths])
    found = attention(q, k, v, VISIBLE[visible], SCALE)
    assert found[1].dtype == torch.float32
    assert worst(found, expected(q, k, v, VISIBLE[visible])) < 1e-5


@pytest.mark.parametrize("change", ["scale", "mask"])
def test_a_scale_one_percent_off_and_a_mask_off_by_one_are_noticed(change):
    q, k, v = inputs(3, 5, 9, 6, 4)
    visible = VISIBLE["causal"]
    scale, shown = (1.01 * SCALE, visible) if change == "scale" else (SCALE, visible + 1)
    assert worst(attention(q, k, v, shown, scale), expected(q, k, v, visible)) > 1e-3


@pytest.mark.parametrize("visible", VISIBLE)
@pytest.mark.parametrize("limit", [1, 27, 60, 100])
def test_a_bound_on_scores_splits_the_rows_and_changes_nothing(limit, visible, monkeypatch):
    q, k, v = inputs(3, 5, 9, 6, 4)
    monkeypatch.setattr(module, "_MAX_SCORES", limit)
    assert worst(attention(q, k, v, VISIBLE[visible], SCALE), expected(q, k, v, VISIBLE[visible])) < 1e-5


@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("widths", WIDTHS)
def test_causal_attention_lets_row_m_see_keys_0_to_m(rows, widths):
    q, k, v = inputs(3, rows, rows, *WIDTHS[widths])
    visible = torch.arange(1, rows + 1).unsqueeze(0)
    assert worst(causal_attention(q, k, v, SCALE), expected(q, k, v, visible)) < 1e-5


def test_without_keys_the_output_is_zero_and_lse_minus_infinity():
    q, k, v = inputs(3, 5, 0, 6, 4)
    out, lse = attention(q, k, v, None, SCALE)
    assert torch.equal(out, torch.zeros(3, 5, 4))
    assert torch.equal(lse, torch.full((3, 5), -torch.inf))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("visible", ["all", "causal", "some_rows_see_nothing"])
def test_16_bit_inputs_are_attended_in_float32(visible, dtype):
    q, k, v = (x.to(dtype) for x in inputs(3, 5, 9, 6, 4))
    out, lse = attention(q, k, v, VISIBLE[visible], SCALE)
    wanted_out, wanted_lse = expected(q, k, v, VISIBLE[visible])
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert worst((out, lse), (wanted_out, wanted_lse)) < 2e-2
    assert worst((lse, lse), (wanted_lse, wanted_lse)) < 1e-4


@pytest.mark.parametrize("compute", COMPUTE)
def test_inputs_may_be_strided(compute, monkeypatch):
    monkeypatch.setattr(module, "_on_cpu", COMPUTE[compute])
    q, k, v = inputs(3, 5, 9, 6, 6)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    wide = torch.full((3, 9, 11), torch.nan)
    wide[..., 5:] = v
    found = attention(strided[0], strided[1], wide[..., 5:], VISIBLE["causal"], SCALE)
    assert worst(found, expected(q, k, v, VISIBLE["causal"])) < 1e-5


def test_inputs_are_not_written():
    q, k, v = inputs(3, 5, 9, 6, 4)
    before = [x.clone() for x in (q, k, v)]
    attention(q, k, v, VISIBLE["causal"], SCALE)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))
