"""The codecs inside the kernels give the bytes and values of the core's reference codecs."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl

from mla_core.cache import Scales, layout_for
from mla_trtllm_like.kernels.numerics import e2m1_code, e4m3_code, from_e2m1, from_e4m3, rounded, ue8m0_up

# Halves of steps in every format, both sides of every limit, and what is no number.
_STEPS = torch.arange(0, 2048).float()
VALUES = torch.cat(
    [
        _STEPS / 1024,
        _STEPS / 64,
        _STEPS / 2,
        _STEPS * 2.0**-14,
        torch.logspace(-44, 38, 2042),
        torch.tensor([448.0, 464.0, 464.1, 6.0, torch.inf, torch.nan]),
    ]
)
VALUES = torch.cat([VALUES, -VALUES[:-1], VALUES[:1]])


@triton.jit
def apply(x, out, COUNT: tl.constexpr, WHAT: tl.constexpr):
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    value = tl.load(x + at)
    if WHAT == "e4m3_code":
        tl.store(out + at, e4m3_code(value))
    elif WHAT == "e2m1_code":
        tl.store(out + at, e2m1_code(value).to(tl.uint8))
    elif WHAT == "from_e4m3":
        tl.store(out + at, from_e4m3(value))
    elif WHAT == "from_e2m1":
        tl.store(out + at, from_e2m1(value.to(tl.int32)))
    elif WHAT == "ue8m0_up":
        tl.store(out + at, ue8m0_up(value))
    else:
        tl.store(out + at, rounded(value, tl.bfloat16))


def run(what: str, x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    count = math.gcd(len(x), 1024)
    out = torch.empty(len(x), dtype=dtype, device=device)
    apply[(len(x) // count,)](x.to(device), out, COUNT=count, WHAT=what)
    return out.cpu()


def test_e4m3_bytes_are_torchs_after_saturation(device):
    expected = VALUES.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(run("e4m3_code", VALUES, torch.uint8, device), expected)


def test_every_e4m3_byte_decodes_to_torchs_value(device):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(run("from_e4m3", codes, torch.float32, device).nan_to_num(7), expected.nan_to_num(7))


def test_every_e2m1_code_decodes_to_its_value(device):
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    found = run("from_e2m1", torch.arange(16, dtype=torch.uint8), torch.float32, device)
    assert torch.equal(found, torch.cat([sizes, -sizes]))


def test_e2m1_codes_are_the_nearest_with_ties_to_even(device):
    finite = VALUES.nan_to_num().clamp(-1e4, 1e4)
    codes = run("e2m1_code", finite, torch.uint8, device)
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distance = (finite.abs().unsqueeze(1) - sizes).abs()
    # A tie has two nearest; the even code is the one wanted.
    nearest = distance == distance.amin(1, keepdim=True)
    odd_last = (nearest.float() - 0.1 * (torch.arange(8) % 2)).argmax(1)
    assert torch.equal(codes & 7, odd_last.to(torch.uint8))
    assert torch.equal(codes >> 3, finite.signbit().to(torch.uint8))


def test_nan_becomes_the_largest_e2m1_code(device):
    assert run("e2m1_code", torch.full((16,), torch.nan), torch.uint8, device).tolist() == [7] * 16


def test_powers_of_two_are_rounded_up_as_the_reference_layout_does(device):
    values = torch.logspace(-37, 37, 16)
    row = torch.zeros(16, 512)
    row[:, 0] = values
    layout = layout_for("fp8_ds_mla", torch.float32, 512, 64)
    packed = layout.pack(row, torch.zeros(16, 64), Scales(power_of_two=True))
    scales = packed[:, 512:516].contiguous().view(torch.float32).flatten()
    assert torch.equal(run("ue8m0_up", values / values.new_tensor(448.0), torch.float32, device), scales)


def test_bfloat16_is_rounded_to_nearest_even(device):
    # The interpreter's own conversion, which follows, flushes what is subnormal in bfloat16.
    normal = VALUES.where(VALUES.abs() >= torch.finfo(torch.bfloat16).tiny, 0.0)
    expected = normal.to(torch.bfloat16)
    found = run("rounded", normal, torch.bfloat16, device)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("shift", [1.02, 0.98])
def test_a_codec_of_shifted_values_is_noticed(device, shift):
    """Negative control: the comparison above is exact."""
    expected = VALUES.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert not torch.equal(run("e4m3_code", VALUES * shift, torch.uint8, device), expected)
