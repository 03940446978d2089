"""Groups of 16 e2m1 values with an e4m3 scale each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_core.quant import nvfp4
from tests.byte_rows import E2M1, e2m1_values, e4m3_value, half_step


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def group(*values: float) -> Tensor:
    return torch.tensor([[*values, *[0.0] * (16 - len(values))]])


def scale_of(largest: float, global_scale: float) -> float:
    return nvfp4.encode(group(largest), global_scale)[1].float().item()


@pytest.mark.parametrize(
    ("largest", "global_scale", "scale"),
    [(6.0, 1.0, 1.0), (6.0, 0.25, 4.0), (6.3, 1.0, 1.0), (6.4, 1.0, 1.125), (2688.0, 1.0, 448.0)],
)
def test_a_groups_scale_is_the_nearest_e4m3_of_its_largest_over_six(largest, global_scale, scale):
    assert scale_of(largest, global_scale) == scale


@pytest.mark.parametrize("largest", [0.0, 1e-9, 6 * 2.0**-10])
def test_a_groups_scale_is_never_below_the_smallest_e4m3(largest):
    assert scale_of(largest, 1.0) == 2.0**-9


@pytest.mark.parametrize("largest", [3000.0, 1e30, math.inf])
def test_values_beyond_the_largest_scale_saturate(largest):
    packed, scales = nvfp4.encode(group(largest, -largest, 1.0), 1.0)
    assert nvfp4.decode(packed, scales, 1.0)[0, :3].tolist() == [2688.0, -2688.0, 0.0]


def test_a_group_of_known_values_has_the_bytes_worked_out_by_hand():
    packed, scales = nvfp4.encode(group(12.0, -1.0, 3.0, 0.4), 1.0)
    assert scales.view(torch.uint8).tolist() == [[0x40]]
    # Over the scale of 2: 6, -0.5, 1.5, 0.2, codes 7, 9, 3, 0.
    assert packed.tolist() == [[0x97, 0x03, 0, 0, 0, 0, 0, 0]]


def test_decoding_multiplies_code_group_scale_and_global_scale():
    packed = torch.tensor([[0x97, 0x03, 0, 0, 0, 0, 0, 0]], dtype=torch.uint8)
    scales = torch.tensor([[0x40]], dtype=torch.uint8)
    assert nvfp4.decode(packed, scales, 0.5)[0, :4].tolist() == [6.0, -0.5, 1.5, 0.0]


@pytest.mark.parametrize("global_scale", [1.0, 0.003, 2.0**-9])
def test_values_come_back_within_half_a_step_of_their_group(global_scale):
    # Groups from 2^-6 to 2^8 times the global scale: where e4m3 scales have full precision.
    x = noise(30, 32) * global_scale * torch.logspace(0, 8, 30, base=2).unsqueeze(1)
    packed, scales = nvfp4.encode(x, global_scale)
    back = nvfp4.decode(packed, scales, global_scale)
    for row in range(30):
        for column in range(32):
            step = scales[row, column // 16].float().item() * global_scale
            # A scale rounded down saturates up to 6.25 % beyond six steps: within half of the last step.
            allowed = half_step(E2M1, x[row, column].item() / step) * step
            error = abs(back[row, column].item() - x[row, column].item())
            assert error <= min(allowed * (1 + 1e-5) + step * 1e-6, step), (row, column)


def test_tiny_groups_come_back_within_a_quarter_of_the_smallest_scale():
    x = noise(20, 16) * 1e-4
    back = nvfp4.decode(*nvfp4.encode(x, 1.0), 1.0)
    assert (back - x).abs().max() <= 0.25 * 2.0**-9


def test_groups_with_coarse_scales_lose_no_more_than_half_a_step_or_six_of_the_smallest():
    x = noise(200, 16) * torch.logspace(-10, -4, 200, base=2).unsqueeze(1)
    packed, scales = nvfp4.encode(x, 1.0)
    error = (nvfp4.decode(packed, scales, 1.0) - x).abs()
    size, step = x.abs(), scales.float()
    half = torch.where(size < 2 * step, step / 4, torch.where(size < 4 * step, step / 2, step))
    assert (error <= torch.where(size > 6 * step, 6 * 2.0**-10, half) * (1 + 1e-5)).all()


def test_swapped_nibbles_would_leave_half_a_step():
    x = noise(20, 16)
    packed, scales = nvfp4.encode(x, 1.0)
    swapped = (packed >> 4) | (packed << 4)
    error = (nvfp4.decode(swapped, scales, 1.0) - x).abs()
    assert (error > scales.float()).any()


def test_a_nan_makes_its_whole_group_nan_and_no_other():
    x = torch.cat([group(math.nan, 1.0), group(1.0)], dim=1)
    packed, scales = nvfp4.encode(x, 1.0)
    assert scales.view(torch.uint8)[0].tolist()[0] == 0x7F
    assert packed[0, :8].tolist() == [0x77] * 8
    decoded = nvfp4.decode(packed, scales, 1.0)[0]
    assert decoded[:16].isnan().all()
    assert decoded[16:].isfinite().all()


def test_decoding_agrees_with_a_reader_of_bytes():
    packed, scales = nvfp4.encode(noise(3, 48), 0.02)
    for row in range(3):
        factors = [e4m3_value(byte) for byte in scales.view(torch.uint8)[row].tolist()]
        values = e2m1_values(bytes(packed[row].tolist()))
        expected = [value * factors[i // 16] * 0.02 for i, value in enumerate(values)]
        decoded = nvfp4.decode(packed, scales, 0.02)[row].tolist()
        assert decoded == pytest.approx(expected, rel=1e-6)
