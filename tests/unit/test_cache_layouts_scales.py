"""The scales of a cache: what is refused, what None means, and which layouts listen to them."""

from __future__ import annotations

import math

import pytest
import torch

from mla_core.cache import Scales, layout_for
from mla_core.errors import CacheError


@pytest.mark.parametrize("name", ["k_scale", "global_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, -math.inf, math.nan, 1e39, 1e-46])
def test_a_scale_that_is_not_positive_and_finite_in_float32_is_refused(name, value):
    with pytest.raises(CacheError, match=rf"{name} must be a positive finite number.*got"):
        Scales(**{name: value})


@pytest.mark.parametrize("value", [1.0, 0.37, 1e-20, 1e20])
def test_a_positive_scale_is_kept_as_float32(value):
    assert Scales(k_scale=value).k_scale == torch.tensor(value).item()


def test_none_means_one():
    assert Scales.of(None, None, None) == Scales(1.0, 1.0)


def test_an_equal_v_scale_is_accepted():
    assert Scales.of(0.5, 0.5) == Scales(k_scale=0.5)


@pytest.mark.parametrize(("k_scale", "v_scale"), [(0.5, 0.25), (None, 2.0)])
def test_a_v_scale_of_its_own_is_refused(k_scale, v_scale):
    with pytest.raises(CacheError, match=rf"v_scale={v_scale} differs from k_scale"):
        Scales.of(k_scale, v_scale)


SCALED = {"fp8_e4m3": {"k_scale"}, "nvfp4": {"global_scale"}, "nvfp4_rope_bf16": {"global_scale"}}


@pytest.mark.parametrize("layout_id", ["fp32", "fp16", "bf16", "fp8_e4m3", "fp8_ds_mla", "nvfp4"])
@pytest.mark.parametrize("name", ["k_scale", "global_scale"])
def test_a_scale_acts_on_exactly_the_layouts_that_use_it(layout_id, name):
    layout = layout_for(layout_id, torch.float32, 512, 64)
    x = torch.randn(3, 576, generator=torch.Generator().manual_seed(0))
    plain, scaled = (
        layout.pack(x[:, :512], x[:, 512:], scales) for scales in (Scales(), Scales(**{name: 3}))
    )
    changed = not torch.equal(plain.view(torch.uint8), scaled.view(torch.uint8))
    assert changed is (name in SCALED.get(layout_id, set()))
