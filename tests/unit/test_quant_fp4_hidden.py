"""NVFP4 hidden states: values, row slices, what others see of them, and the fused norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mla_core.errors import ContractError
from mla_core.quant import nvfp4
from mla_core.quant.fp4_hidden import Fp4Hidden, plain, rms_norm_fp4
from mla_core.quant.swizzle import padded_size, swizzle

# The largest value of the rows below is just within 6 * 448 steps.
STEP = torch.tensor(0.012)


def rows(tokens: int, width: int = 64, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(tokens)
    sizes = torch.logspace(-2, 1, max(tokens, 1))[:tokens, None]
    return (torch.randn(tokens, width, generator=generator) * sizes).to(dtype)


def test_values_are_those_of_the_codec():
    x = rows(5)
    codes, scales = nvfp4.encode(x, float(STEP))
    torch.testing.assert_close(Fp4Hidden.quantise(x, STEP).values(), nvfp4.decode(codes, scales, float(STEP)))


def test_values_are_within_half_a_step_of_the_rows():
    x = rows(5)
    groups = x.unflatten(1, (-1, 16))
    # The widest step of e2m1 is 2 of 6, and the group's scale is off by at most 1/16.
    bound = groups.abs().amax(-1, keepdim=True) * (1 / 6 + 1 / 16)
    error = (Fp4Hidden.quantise(x, STEP).values().unflatten(1, (-1, 16)) - groups).abs()
    assert bool((error <= bound).all())


def test_scales_are_swizzled():
    x = rows(130)
    assert torch.equal(
        Fp4Hidden.quantise(x, STEP).scales.view(torch.uint8),
        swizzle(nvfp4.encode(x, float(STEP))[1]).view(torch.uint8),
    )


def test_scales_in_plain_order_stand_for_the_same_values():
    x = rows(5)
    codes, scales = nvfp4.encode(x, float(STEP))
    flat = Fp4Hidden(codes, scales, STEP, torch.float32, swizzled=False)
    assert torch.equal(flat.values(), Fp4Hidden.quantise(x, STEP).values())


def test_it_looks_like_the_rows_it_stands_for():
    hidden = Fp4Hidden.quantise(rows(5, dtype=torch.bfloat16), STEP)
    assert (hidden.shape, hidden.dtype, hidden.device) == ((5, 64), torch.bfloat16, torch.device("cpu"))
    empty = hidden.new_empty(2, 3)
    assert (empty.shape, empty.dtype) == ((2, 3), torch.bfloat16)


# The row slice for batches padded to a fixed capacity.


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 299])
def test_leading_rows_are_those_of_the_whole(count):
    hidden = Fp4Hidden.quantise(rows(300), STEP, keep=True)
    part = hidden.rows(count)
    assert torch.equal(part.values(), hidden.values()[:count])
    assert torch.equal(part.unquantised, hidden.unquantised[:count])


@pytest.mark.parametrize("count", [1, 128, 129])
def test_a_slice_has_the_scales_of_whole_tiles_and_owns_its_memory_in_order(count):
    part = Fp4Hidden.quantise(rows(300), STEP, keep=True).rows(count)
    assert part.scales.numel() == padded_size(count, 4)
    assert all(tensor.is_contiguous() for tensor in (part.codes, part.scales, part.unquantised))


def test_all_rows_are_the_same_object():
    hidden = Fp4Hidden.quantise(rows(5), STEP)
    assert hidden.rows(5) is hidden


def test_scales_in_plain_order_cannot_be_cut():
    codes, scales = nvfp4.encode(rows(5), float(STEP))
    hidden = Fp4Hidden(codes, scales, STEP, torch.float32, swizzled=False)
    assert hidden.rows(5) is hidden
    with pytest.raises(ContractError, match=r"cannot take 3 of 5 rows.*plain order"):
        hidden.rows(3)


def test_more_rows_than_there_are_cannot_be_taken():
    with pytest.raises(ContractError, match="cannot take 6 rows of 5"):
        Fp4Hidden.quantise(rows(5), STEP).rows(6)


# What a consumer gets that takes no NVFP4.


def test_plain_rows_pass_through():
    x = rows(2)
    assert plain(x) is x


def test_rows_that_were_carried_along_are_used_as_they_are():
    x = rows(2)
    assert plain(Fp4Hidden.quantise(x, STEP, keep=True)) is x


def test_rows_that_were_not_are_decoded_in_their_dtype():
    hidden = Fp4Hidden.quantise(rows(2, dtype=torch.bfloat16), STEP)
    assert torch.equal(plain(hidden), hidden.values().bfloat16())


# The fused norm.


def norm_weight(width: int, dtype: torch.dtype) -> Tensor:
    return (1 + 0.3 * torch.randn(width, generator=torch.Generator().manual_seed(9))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 130])
def test_the_fused_norm_equals_the_norm_then_the_codec_bit_for_bit(dtype, tokens):
    x, weight = rows(tokens, dtype=dtype), norm_weight(64, dtype)
    fused = rms_norm_fp4(x, weight, 1e-6, STEP)
    normed = F.rms_norm(x, (64,), weight, 1e-6)
    codes, scales = nvfp4.encode(normed, float(STEP))
    assert torch.equal(fused.codes, codes)
    assert torch.equal(fused.scales.view(torch.uint8), swizzle(scales).view(torch.uint8))
    assert torch.equal(fused.unquantised, normed)


def test_a_norm_without_its_weight_gives_other_codes():
    x = rows(4)
    fused = rms_norm_fp4(x, norm_weight(64, torch.float32), 1e-6, STEP)
    assert not torch.equal(fused.codes, rms_norm_fp4(x, torch.ones(64), 1e-6, STEP).codes)
