"""A trained model over quantised caches: what its loss and its attention outputs lose on held-out text."""

from __future__ import annotations

from functools import cache

import pytest
from torch import Tensor

from bench.cache_loss import CachedModel, heldout, output_errors
from mla_core import Scales

TOKENS = 256
# Loss against bf16 and relative output error, about three times what is measured on this text.
BOUNDS = {
    "fp8_e4m3": (0.03, 0.1),
    "fp8_ds_mla": (0.01, 0.03),
    "nvfp4": (0.1, 0.35),
    "nvfp4_rope_bf16": (0.04, 0.13),
}


@cache
def text() -> Tensor:
    return heldout(1, TOKENS)


@cache
def exact() -> CachedModel:
    model = CachedModel("fp32")
    model.loss(text())
    return model


@cache
def measured(layout: str, k_scale: float = 1.0) -> tuple[float, float]:
    """Loss, and the worst layer's output error."""
    model = CachedModel(layout, [Scales(k_scale=k_scale)] * 3)
    return model.loss(text()), max(output_errors(model, exact()))


@pytest.mark.parametrize("layout", BOUNDS)
def test_the_loss_stays_close_to_that_of_a_bf16_cache(layout):
    assert abs(measured(layout)[0] - measured("bf16")[0]) <= BOUNDS[layout][0]


@pytest.mark.parametrize("layout", BOUNDS)
def test_attention_outputs_stay_within_the_layouts_error(layout):
    assert measured("bf16")[1] < measured(layout)[1] <= BOUNDS[layout][1]


def test_rope_keys_in_bf16_bring_nvfp4_closer():
    """Why the layout exists: the rope part makes most of nvfp4's error."""
    assert measured("nvfp4_rope_bf16")[1] < 0.6 * measured("nvfp4")[1]


def test_a_scale_that_pushes_the_cache_out_of_range_is_seen_in_the_loss():
    assert measured("fp8_e4m3", 2000.0)[0] > measured("bf16")[0] + 10 * BOUNDS["fp8_e4m3"][0]
