"""Reading the rotary part of a config: two spellings, every switch, and refusals that say what would work."""

from __future__ import annotations

import math

import pytest

from mla_core.config import Llama4Scaling, LongRope, RopeConfig, Yarn
from mla_core.config_families import FAMILIES
from mla_core.config_rope import read_query_scaling, read_rope
from mla_core.errors import ConfigError

NOPE, ROPE = 12, 8
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
LONGROPE = {"type": "longrope", "short_factor": [1, 1, 1, 1], "long_factor": [1, 2, 3, 4]}


def rope(family: str = "deepseek_v3", **raw) -> RopeConfig:
    return read_rope({"max_position_embeddings": 8192} | raw, FAMILIES[family], NOPE, ROPE)


def yarn(**switches) -> Yarn | LongRope | None:
    return rope(rope_scaling=YARN | switches).scaling


def refusal(family: str = "deepseek_v3", **raw) -> str:
    with pytest.raises(ConfigError) as caught:
        rope(family, **raw)
    return str(caught.value)


@pytest.mark.parametrize(
    "raw",
    [
        {"rope_theta": 5e4, "rope_scaling": YARN},
        {"rope_theta": 5e4, "rope_scaling": YARN | {"type": "deepseek_yarn"}},
        {"rope_theta": 5e4, "rope_scaling": {**YARN, "rope_type": "yarn"}},
        {"rope_parameters": {**YARN, "type": None, "rope_type": "yarn", "rope_theta": 5e4}},
        {"rope_theta": 1.0, "rope_parameters": YARN | {"rope_theta": 5e4}},
        {"rope_theta": 5e4, "rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 5e4}},
    ],
    ids=["old", "deepseek_yarn", "both-type-keys", "new", "theta-in-the-block-wins", "both-blocks"],
)
def test_every_spelling_reads_the_same(raw):
    scaling = Yarn(factor=40.0, original_max_position=4096)
    assert rope(**raw) == RopeConfig(theta=5e4, scaling=scaling)


def test_two_blocks_that_disagree_are_refused():
    message = refusal(rope_scaling=YARN, rope_parameters=YARN | {"factor": 4})
    assert message.startswith("rope_scaling={'type': 'yarn', 'factor': 40")
    assert "supported: the same meaning as rope_parameters=" in message


@pytest.mark.parametrize(
    "raw",
    [{}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_parameters": {"rope_type": "default"}}],
    ids=str,
)
def test_no_scaling_is_plain_rotation(raw):
    assert rope(**raw) == RopeConfig(style="interleaved", theta=10000.0)


@pytest.mark.parametrize(
    ("family", "theta"), [("longcat_flash", 1e7), ("bailing_hybrid", 6e6), ("youtu", 1e4)]
)
def test_an_absent_theta_is_the_familys(family, theta):
    assert rope(family).theta == theta


def test_mistral_4_without_a_rope_block_stretches_as_its_config_class_does():
    expected = Yarn(factor=128.0, original_max_position=8192, mscale=1.0, mscale_all_dim=1.0)
    assert rope("mistral4").scaling == expected


@pytest.mark.parametrize(
    ("switches", "field", "value"),
    [
        ({"beta_fast": 1}, "beta_fast", 1.0),
        ({"beta_fast": 0}, "beta_fast", 32.0),
        ({"mscale": 0.707}, "mscale", 0.707),
        ({"mscale_all_dim": 0}, "mscale_all_dim", 0.0),
        ({"attention_factor": 1.2}, "attention_factor", 1.2),
        ({"truncate": False}, "truncate", False),
        ({"factor": None}, "factor", 2.0),
        ({"original_max_position_embeddings": None}, "original_max_position", 8192),
    ],
    ids=str,
)
def test_every_yarn_switch_is_read(switches, field, value):
    assert getattr(yarn(**switches), field) == value


def test_a_length_beside_the_block_wins_over_the_one_inside():
    scaling = rope(rope_scaling=YARN, original_max_position_embeddings=512).scaling
    assert scaling == Yarn(factor=40.0, original_max_position=512)


def test_yarn_without_any_length_is_refused():
    block = {"type": "yarn", "factor": 4}
    message = refusal(rope_scaling=block, max_position_embeddings=None)
    assert message == "rope_scaling.original_max_position_embeddings is missing from the config"


def test_apply_yarn_scaling_false_stretches_without_scaling():
    scaling = yarn(mscale=1.0, mscale_all_dim=1.0, apply_yarn_scaling=False)
    assert scaling == Yarn(factor=40.0, original_max_position=4096, attention_factor=1.0)


def test_longrope_keeps_both_tables():
    assert rope(rope_scaling=LONGROPE | {"original_max_position_embeddings": 512}).scaling == LongRope(
        short_factor=(1, 1, 1, 1), long_factor=(1, 2, 3, 4), original_max_position=512
    )


@pytest.mark.parametrize(("factor", "expected"), [(1, 1.0), (4, math.sqrt(1 + math.log(4) / math.log(8192)))])
def test_an_explicit_longrope_factor_replaces_the_ratio_of_lengths(factor, expected):
    assert rope(rope_scaling=LONGROPE | {"factor": factor}).scaling.attention_factor == pytest.approx(
        expected
    )


def test_a_longrope_table_of_another_length_is_refused():
    message = refusal(rope_scaling=LONGROPE | {"long_factor": [1, 2]})
    assert message == (
        "rope_scaling.long_factor=[1, 2] is not supported; supported: 4 numbers, one for each rotated pair"
    )


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "mrope"])
def test_other_scalings_are_refused_by_name(kind):
    assert refusal(rope_scaling={"type": kind, "factor": 2}) == (
        f"rope_scaling.rope_type={kind!r} is not supported; supported: default, yarn, deepseek_yarn, longrope"
    )


def test_a_key_that_is_not_understood_is_refused():
    message = refusal(rope_scaling=YARN | {"mrope_section": [12, 10, 10]})
    assert message.startswith(
        "rope_scaling.mrope_section=[12, 10, 10] is not supported; supported: for yarn: "
    )
    assert "beta_fast" in message


def test_a_block_that_is_no_object_is_refused():
    assert refusal(rope_scaling="yarn") == (
        "rope_scaling='yarn' is not supported; supported: an object of named values"
    )


@pytest.mark.parametrize("factor", [1.0, ROPE / (NOPE + ROPE)])
def test_a_partial_factor_that_covers_all_rope_dims_is_accepted(factor):
    assert rope(rope_parameters=YARN | {"partial_rotary_factor": factor}).scaling == yarn()


def test_a_partial_factor_may_count_from_the_configs_head_dim():
    assert rope(head_dim=16, partial_rotary_factor=0.5) == rope()


def test_a_partial_factor_that_leaves_rope_dims_out_is_refused():
    assert refusal(partial_rotary_factor=0.5) == (
        "rope_parameters.partial_rotary_factor=0.5 is not supported; "
        "supported: 1 or 0.4: all rope dims rotate"
    )


@pytest.mark.parametrize(
    ("family", "raw", "style"),
    [
        ("deepseek_v3", {}, "interleaved"),
        ("deepseek_v3", {"rope_interleave": False}, "half_split"),
        ("glm_moe_dsa", {"rope_interleave": True}, "interleaved"),
        ("minicpm3", {}, "half_split"),
        ("kimi_linear", {"mla_use_nope": True}, "none"),
    ],
    ids=str,
)
def test_the_style_is_the_familys_unless_its_reference_obeys_the_config(family, raw, style):
    assert rope(family, **raw).style == style


@pytest.mark.parametrize(
    ("family", "asked"), [("deepseek_v2", False), ("minicpm3", True), ("longcat_flash", False)]
)
def test_a_style_that_the_familys_reference_ignores_is_refused(family, asked):
    message = refusal(family, rope_interleave=asked)
    assert message.startswith(
        f"rope_interleave={asked} is not supported; supported: {str(not asked).lower()}"
    )


@pytest.mark.parametrize(("family", "asked"), [("kimi_linear", False), ("deepseek_v3", True)])
def test_a_nope_switch_that_contradicts_the_family_is_refused(family, asked):
    message = refusal(family, mla_use_nope=asked)
    assert message == f"mla_use_nope={asked} is not supported; supported: {str(not asked).lower()}"


def test_dims_that_never_rotate_take_no_scaling():
    assert rope("kimi_linear", rope_scaling=YARN) == RopeConfig(style="none")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({"rope_scaling": YARN}, None),
        ({"rope_scaling": YARN | {"llama_4_scaling_beta": 0.2}}, Llama4Scaling(beta=0.2, floor_scale=4096)),
        ({"llama_4_scaling": {}}, Llama4Scaling(beta=0.1, floor_scale=8192)),
        (
            {"llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": 64}},
            Llama4Scaling(beta=0.3, floor_scale=64),
        ),
    ],
    ids=["off", "in-the-rope-block", "own-block-defaults", "own-block"],
)
def test_llama_4_scaling_is_read_from_either_place(raw, expected):
    assert read_query_scaling(raw, FAMILIES["deepseek_v3"]) == expected
