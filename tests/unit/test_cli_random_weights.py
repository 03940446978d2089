"""Random weights leave attention neither flat nor one-hot, whatever constants the model has."""

from __future__ import annotations

import pytest
import torch

from mla_core import MLA, MLAConfig
from mla_core.cli.random_weights import random_weights
from mla_core.cli.seeds import stream
from mla_core.reference import attention_layer
from mla_core.weights import expected_shapes

# Each with what makes its scores large: YaRN's factor on the softmax, LongCat's on query and latent.
PRESETS = ("deepseek-v2-lite", "longcat-flash", "kimi-linear", "minicpm3")


def small(preset: str) -> MLAConfig:
    return MLAConfig.preset(preset).model_copy(update={"num_heads": 4, "hidden_size": 256})


@pytest.mark.parametrize("preset", PRESETS)
def test_scores_spread_over_a_few_units(preset):
    config = small(preset)
    shapes = expected_shapes(MLA(config, dtype=torch.float32, backend="vanilla"))
    weights = random_weights(config, shapes, torch.float32, stream(0, "weights"))
    hidden_SD = torch.randn(64, config.hidden_size, generator=stream(0, "inputs"))
    lse_SH = attention_layer(config, weights, hidden_SD).lse_SH
    # Equal scores of 0 would give log(position + 1); scores of spread s add s^2 / 2 on average.
    excess = float((lse_SH - torch.arange(1, 65).log()[:, None])[32:].mean())
    assert 0.1 < excess < 4, excess


def test_streams_of_one_seed_are_independent():
    first, second = (torch.randn(1000, generator=stream(0, purpose)) for purpose in ("weights", "inputs"))
    assert abs(float((first * second).mean())) < 0.1


def test_a_stream_repeats():
    assert torch.equal(*(torch.randn(4, generator=stream(5, "x")) for _ in range(2)))
