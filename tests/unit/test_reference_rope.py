"""The oracle's rotary embedding: which pairs turn how fast, how far, and where they stay."""

from __future__ import annotations

import math

import pytest
import torch

from mla_core.config import LongRope, MLAConfig, RopeConfig, Yarn
from mla_core.reference.rope import rotate, rotation

PLAIN = MLAConfig(
    hidden_size=8, num_heads=1, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=8, v_head_dim=4
)


def with_scaling(scaling: Yarn | LongRope, **fields) -> MLAConfig:
    return PLAIN.model_copy(update={"rope": RopeConfig(scaling=scaling), **fields})


def frequencies(config: MLAConfig, position: int = 1) -> torch.Tensor:
    """Radians per position, read back from the angle at a small position."""
    cos, sin = rotation(config, torch.tensor([position]), torch.float64)
    return torch.atan2(sin[0], cos[0]) / position


def amplitude(config: MLAConfig, position: int = 1) -> float:
    cos, sin = rotation(config, torch.tensor([position]), torch.float64)
    return torch.hypot(cos, sin)[0, 0].item()


def test_pair_i_turns_by_theta_to_the_minus_2i_over_r():
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    torch.testing.assert_close(frequencies(PLAIN), expected, rtol=0, atol=1e-15)


def test_angles_grow_with_the_position():
    cos, sin = rotation(PLAIN, torch.tensor([0, 3]), torch.float64)
    torch.testing.assert_close(cos[0], torch.ones(4, dtype=torch.float64), rtol=0, atol=0)
    assert sin[1, 1].item() == pytest.approx(math.sin(0.3), abs=1e-15)


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("interleaved", [math.cos(1), math.sin(1), -math.sin(0.5), math.cos(0.5)]),
        ("half_split", [math.cos(1), 0.0, math.sin(1), 0.0]),
        ("none", [1.0, 0.0, 0.0, 1.0]),
    ],
)
def test_each_style_turns_its_own_pairs_and_keeps_their_order(style, expected):
    x = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    angle = torch.tensor([1.0, 0.5], dtype=torch.float64)
    if style == "half_split":
        x[3] = 0.0
    turned = rotate(x, angle.cos(), angle.sin(), style)
    torch.testing.assert_close(turned, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


def test_the_two_styles_differ_only_by_the_order_of_the_dims():
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cos, sin = rotation(PLAIN, torch.arange(5, 8), torch.float64)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    interleaved = rotate(x, cos, sin, "interleaved")
    torch.testing.assert_close(rotate(x[:, order], cos, sin, "half_split"), interleaved[:, order])
    assert (rotate(x, cos, sin, "half_split") - interleaved).abs().max() > 0.1


def test_scores_depend_on_the_distance_of_the_positions_only():
    generator = torch.Generator().manual_seed(2)
    query, key = torch.randn(2, 8, generator=generator, dtype=torch.float64)

    def score(query_position: int, key_position: int) -> float:
        cos, sin = rotation(PLAIN, torch.tensor([query_position, key_position]), torch.float64)
        turned = [rotate(x, cos[i], sin[i], "interleaved") for i, x in enumerate((query, key))]
        return (turned[0] @ turned[1]).item()

    assert score(40, 33) == pytest.approx(score(7, 0), abs=1e-12)
    assert abs(score(40, 33) - score(41, 33)) > 1e-2


def test_an_unknown_style_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'neox' is unknown; known: interleaved, half_split, none"):
        rotate(torch.zeros(4), torch.ones(2), torch.zeros(2), "neox")


@pytest.mark.parametrize(
    ("preset", "low", "high"),
    [("deepseek-v3", 10, 23), ("kimi-k2", 19, 20), ("kimi-k2.5", 8, 20), ("mistral-small-4", 12, 25)],
)
def test_yarn_keeps_fast_pairs_stretches_slow_ones_and_blends_between(preset, low, high):
    config = MLAConfig.preset(preset)
    plain = config.model_copy(update={"rope": RopeConfig(theta=config.rope.theta)})
    stretch = frequencies(plain) / frequencies(config)
    factor = config.rope.scaling.factor
    torch.testing.assert_close(stretch[: low + 1], torch.ones(low + 1, dtype=torch.float64))
    torch.testing.assert_close(stretch[high:], torch.full((32 - high,), factor, dtype=torch.float64))
    assert ((stretch[low + 1 : high] > 1) & (stretch[low + 1 : high] < factor)).all()


def test_yarn_without_rounding_moves_the_ends_of_the_ramp():
    config = MLAConfig.preset("deepseek-v3")
    scaling = config.rope.scaling.model_copy(update={"truncate": False})
    exact = config.model_copy(update={"rope": config.rope.model_copy(update={"scaling": scaling})})
    # 64 ln(4096 / 64 pi) / (2 ln 10000) = 10.47 and 64 ln(4096 / 2 pi) / (2 ln 10000) = 22.51
    share = (12 - 10.4722) / (22.5132 - 10.4722)
    expected = 10000 ** (-24 / 64) * (1 - share + share / 40)
    assert frequencies(exact)[12].item() == pytest.approx(expected, rel=1e-4)
    assert frequencies(config)[12].item() != pytest.approx(expected, rel=1e-3)


YARN = {"factor": 40.0, "original_max_position": 4096}


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({}, 1.368888),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.5, "mscale_all_dim": 1.0}, 1.184444 / 1.368888),
        ({"mscale_all_dim": 1.0}, 1.368888),
        ({"mscale": 0.5}, 1.368888),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.2}, 1.2),
    ],
    ids=str,
)
def test_yarn_scales_cos_and_sin_as_its_switches_say(switches, expected):
    assert amplitude(with_scaling(Yarn(**YARN, **switches))) == pytest.approx(expected, abs=1e-6)


def test_yarn_does_not_scale_for_a_factor_of_one():
    assert amplitude(with_scaling(Yarn(factor=1.0, original_max_position=4096))) == 1.0


LONG = LongRope(short_factor=(1, 1, 1, 1), long_factor=(1, 2, 4, 8), original_max_position=100)


@pytest.mark.parametrize(("last_position", "stretch"), [(99, 1.0), (100, 8.0)])
def test_longrope_takes_the_long_table_when_the_request_outgrows_the_original_length(last_position, stretch):
    config = with_scaling(LONG)
    cos, sin = rotation(config, torch.tensor([1, last_position]), torch.float64)
    assert torch.atan2(sin[0], cos[0])[3].item() == pytest.approx(0.001 / stretch, rel=1e-12)


@pytest.mark.parametrize(("longest", "expected"), [(100, 1.0), (50, 1.0), (10000, math.sqrt(2))])
def test_longrope_scales_by_the_ratio_of_the_lengths(longest, expected):
    assert amplitude(with_scaling(LONG, max_position_embeddings=longest)) == pytest.approx(
        expected, abs=1e-12
    )


def test_float32_angles_round_at_long_positions_and_float64_ones_do_not():
    position = torch.tensor([100_003])
    exact = math.sin(100_003 * 10000 ** (-2 / 8))
    assert rotation(PLAIN, position, torch.float64)[1][0, 1].item() == pytest.approx(exact, abs=1e-10)
    assert abs(rotation(PLAIN, position, torch.float32)[1][0, 1].item() - exact) > 1e-5


def test_an_unknown_scaling_is_refused_with_the_known_ones():
    class Stretched:
        kind = "ntk"

    rope = PLAIN.rope.model_copy(update={"scaling": Stretched()})
    with pytest.raises(ValueError, match="'ntk' is unknown; known: yarn, longrope"):
        rotation(PLAIN.model_copy(update={"rope": rope}), torch.tensor([1]), torch.float64)
