"""The oracle's layer, held to the definitions of MLA on cases small enough to state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_core import reference
from mla_core.config import GateConfig, Llama4Scaling, MLAConfig, RopeConfig

TOKENS = 7
SMALL = MLAConfig(
    hidden_size=10,
    num_heads=3,
    q_lora_rank=6,
    kv_lora_rank=8,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=7,
)
VARIANTS = {
    "low-rank-query": SMALL,
    "direct-query": SMALL.model_copy(update={"q_lora_rank": None}),
    "half-split": SMALL.model_copy(update={"rope": RopeConfig(style="half_split")}),
    "no-rope-dims": SMALL.model_copy(update={"qk_rope_head_dim": 0, "rope": RopeConfig(style="none")}),
    "per-head-gate": SMALL.model_copy(update={"gate": GateConfig(kind="per_head")}),
    "elementwise-gate": SMALL.model_copy(update={"gate": GateConfig(kind="elementwise")}),
    "biases": SMALL.model_copy(update={"attention_bias": True}),
    "scaled": SMALL.model_copy(update={"query_scale": 1.7, "latent_scale": 0.6}),
    "llama-4": SMALL.model_copy(update={"query_scaling": Llama4Scaling(beta=0.5, floor_scale=3)}),
}
EVERY_VARIANT = pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)


def shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    heads, hidden, latent = config.num_heads, config.hidden_size, config.kv_lora_rank
    query, values = heads * config.qk_head_dim, heads * config.v_head_dim
    found: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (config.latent_width, hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (config.qk_nope_head_dim + config.v_head_dim), latent),
        "o_proj.weight": (hidden, values),
        "g_proj.weight": (heads if config.gate and config.gate.kind == "per_head" else values, hidden),
        "kv_a_proj_with_mqa.bias": (config.latent_width,),
        "o_proj.bias": (hidden,),
    }
    if config.q_lora_rank is None:
        return found | {"q_proj.weight": (query, hidden)}
    rank = config.q_lora_rank
    return found | {
        "q_a_proj.weight": (rank, hidden),
        "q_a_proj.bias": (rank,),
        "q_a_layernorm.weight": (rank,),
        "q_b_proj.weight": (query, rank),
    }


def weights_of(config: MLAConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(shape[-1])
        for name, shape in shapes(config).items()
    }


def hidden_of(config: MLAConfig, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(tokens, config.hidden_size, generator=generator, dtype=torch.float64)


def run(config: MLAConfig, hidden: Tensor | None = None, **options) -> reference.Output:
    hidden = hidden_of(config) if hidden is None else hidden
    return reference.attention_layer(config, weights_of(config), hidden, **options)


def fields(output: reference.Output) -> list[Tensor]:
    return [output.hidden_SD, output.attention_SHV, output.lse_SH, output.latent_SL, output.k_rope_SR]


def gap(left: Tensor, right: Tensor) -> float:
    return (left - right).abs().max().item()


@EVERY_VARIANT
def test_the_absorbed_form_gives_the_expanded_forms_numbers(config):
    for expanded, absorbed in zip(fields(run(config)), fields(run(config, form="absorbed")), strict=True):
        torch.testing.assert_close(absorbed, expanded, rtol=0, atol=1e-10)


def test_the_absorbed_form_is_not_the_expanded_one_of_other_weights():
    changed = weights_of(SMALL)
    changed["kv_b_proj.weight"] = changed["kv_b_proj.weight"].flip(0)
    absorbed = reference.attention_layer(SMALL, changed, hidden_of(SMALL), form="absorbed")
    assert gap(absorbed.attention_SHV, run(SMALL).attention_SHV) > 1e-2


@EVERY_VARIANT
@pytest.mark.parametrize("cut", [0, 1, 4, TOKENS])
def test_a_request_may_be_cut_anywhere_and_continued_from_its_cache(config, cut):
    whole, hidden = run(config), hidden_of(config)
    first = run(config, hidden[:cut])
    rest = reference.cached_layer(
        config, weights_of(config), hidden[cut:], first.latent_SL, first.k_rope_SR, start=cut
    )
    for before, after, expected in zip(fields(first), fields(rest), fields(whole), strict=True):
        torch.testing.assert_close(torch.cat([before, after]), expected, rtol=0, atol=1e-10)


def test_a_continuation_at_the_wrong_position_gives_other_numbers():
    hidden, first = hidden_of(SMALL), run(SMALL, hidden_of(SMALL)[:4])
    late = reference.cached_layer(
        SMALL, weights_of(SMALL), hidden[4:], first.latent_SL, first.k_rope_SR, start=5
    )
    assert gap(late.hidden_SD, run(SMALL).hidden_SD[4:]) > 1e-3


def test_a_changed_cache_row_changes_every_new_token():
    hidden, first = hidden_of(SMALL), run(SMALL, hidden_of(SMALL)[:4])
    latent = first.latent_SL.clone()
    latent[0] += 1.0
    rest = reference.cached_layer(SMALL, weights_of(SMALL), hidden[4:], latent, first.k_rope_SR, start=4)
    change = (rest.hidden_SD - run(SMALL).hidden_SD[4:]).abs().amax(-1)
    assert (change > 1e-4).all(), change


@EVERY_VARIANT
def test_a_token_may_see_itself_as_a_given_row(config):
    """Attention of one query does not care which of the same rows is its own."""
    hidden, first = hidden_of(config), run(config, hidden_of(config)[:4])
    latent, rope = first.latent_SL, first.k_rope_SR

    def last_is_own(order: list[int]) -> reference.Output:
        *seen, own = ((latent[[i]], rope[[i]]) for i in order)
        cached = (torch.cat([part[0] for part in seen]), torch.cat([part[1] for part in seen]))
        return reference.cached_layer(config, weights_of(config), hidden[4:5], *cached, start=4, own_rows=own)

    one, other = last_is_own([0, 1, 2, 3]), last_is_own([3, 1, 0, 2])
    torch.testing.assert_close(one.hidden_SD, other.hidden_SD, rtol=0, atol=1e-10)
    assert gap(one.hidden_SD, last_is_own([0, 1, 2, 2]).hidden_SD) > 1e-6


def test_no_token_sees_a_later_one():
    hidden = hidden_of(SMALL)
    hidden[4] += 1.0
    changed, plain = run(SMALL, hidden), run(SMALL)
    assert torch.equal(changed.hidden_SD[:4], plain.hidden_SD[:4])
    assert ((changed.hidden_SD - plain.hidden_SD)[4:].abs().amax(-1) > 1e-6).all()


def test_a_lone_token_returns_its_own_value_and_score():
    config = SMALL.model_copy(update={"q_lora_rank": None})
    weights, hidden = weights_of(config), hidden_of(config, tokens=1)
    output = reference.attention_layer(config, weights, hidden)
    row = weights["kv_a_proj_with_mqa.weight"] @ hidden[0]
    latent = row[:8] / (row[:8].square().mean() + 1e-6).sqrt() * weights["kv_a_layernorm.weight"]
    query = (weights["q_proj.weight"] @ hidden[0]).view(3, 9)
    for head in range(3):
        own = weights["kv_b_proj.weight"][12 * head : 12 * head + 12]
        key, value = torch.cat([own[:5] @ latent, row[8:]]), own[5:] @ latent
        torch.testing.assert_close(output.attention_SHV[0, head], value, rtol=0, atol=1e-12)
        assert output.lse_SH[0, head].item() == pytest.approx((query[head] @ key / 3).item(), abs=1e-12)


def test_the_log_sum_exp_is_natural_and_counts_every_visible_key():
    weights = weights_of(SMALL) | {"q_b_proj.weight": torch.zeros(27, 6)}
    output = reference.attention_layer(SMALL, weights, hidden_of(SMALL))
    expected = torch.arange(1, TOKENS + 1, dtype=torch.float64).log()
    torch.testing.assert_close(output.lse_SH, expected[:, None].expand(-1, 3), rtol=0, atol=1e-12)


SOFTMAX_SCALES = {
    "deepseek-v2-lite": 0.114721387,
    "deepseek-v2.5": 0.135233779,
    "deepseek-v3": 0.135233779,
    "kimi-k2": 0.130860800,
    "kimi-k2.5": 0.144679626,
    "kimi-linear": 0.072168784,
    "longcat-flash": 0.072168784,
    "glm-5": 0.0625,
    "minicpm3": 0.102062073,
    "mistral-small-4": 0.194969495,
    "mistral-large-3": 0.133160057,
}


@pytest.mark.parametrize(("preset", "scale"), SOFTMAX_SCALES.items(), ids=SOFTMAX_SCALES)
def test_scores_carry_the_softmax_scale_of_the_checkpoint(preset, scale):
    tiny = {"hidden_size": 6, "num_heads": 2, "kv_lora_rank": 4, "q_lora_rank": None}
    config = MLAConfig.preset(preset).model_copy(update=tiny | {"gate": None, "query_scale": 1.0})
    unscaled = config.model_copy(update={"softmax_scale_override": 1.0})
    ratio = run(config, hidden_of(config, 1)).lse_SH / run(unscaled, hidden_of(config, 1)).lse_SH
    torch.testing.assert_close(ratio, torch.full_like(ratio, scale), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("position", "offset", "expected"),
    [
        (2, 0, 1.0),
        (3, 0, 1 + 0.5 * math.log(2)),
        (2, 1, 1 + 0.5 * math.log(2)),
        (9, 0, 1 + 0.5 * math.log(4)),
    ],
)
def test_the_llama_4_scale_steps_with_the_position(position, offset, expected):
    scaling = Llama4Scaling(beta=0.5, floor_scale=3, offset=offset)
    scaled = SMALL.model_copy(update={"query_scaling": scaling})
    hidden, where = hidden_of(SMALL, 1), torch.tensor([position])
    ratio = run(scaled, hidden, positions=where).lse_SH / run(SMALL, hidden, positions=where).lse_SH
    torch.testing.assert_close(ratio, torch.full_like(ratio, expected), rtol=0, atol=1e-12)


def test_the_constant_scales_act_on_query_and_latent_only():
    plain, scaled = run(SMALL), run(VARIANTS["scaled"])
    torch.testing.assert_close(scaled.latent_SL, 0.6 * plain.latent_SL)
    torch.testing.assert_close(scaled.k_rope_SR, plain.k_rope_SR)
    assert gap(scaled.lse_SH, plain.lse_SH) > 1e-2


@pytest.mark.parametrize("kind", ["per_head", "elementwise"])
def test_a_gate_multiplies_each_value_by_the_sigmoid_of_its_projection(kind):
    config = VARIANTS[f"{kind.replace('_', '-')}-gate"]
    weights, hidden, output = weights_of(config), hidden_of(config), run(config)
    gate = torch.sigmoid(hidden @ weights["g_proj.weight"].T)
    gate = gate.repeat_interleave(7, dim=-1) if kind == "per_head" else gate
    expected = (output.attention_SHV.flatten(1) * gate) @ weights["o_proj.weight"].T
    torch.testing.assert_close(output.hidden_SD, expected, rtol=0, atol=1e-10)
    assert gap(output.hidden_SD, output.attention_SHV.flatten(1) @ weights["o_proj.weight"].T) > 1e-2


def test_the_output_bias_may_differ_from_the_attention_bias():
    both, inner = VARIANTS["biases"], SMALL.model_copy(update={"attention_bias": True, "output_bias": False})
    bias = weights_of(SMALL)["o_proj.bias"].expand(TOKENS, -1)
    torch.testing.assert_close(run(both).hidden_SD - run(inner).hidden_SD, bias, rtol=0, atol=1e-10)
    assert gap(run(inner).latent_SL, run(SMALL).latent_SL) > 1e-2


def test_the_norm_epsilon_shows_on_tiny_inputs():
    loose = SMALL.model_copy(update={"latent_norm_eps": 1e-5})
    assert gap(run(loose).latent_SL, run(SMALL).latent_SL) < 1e-3
    tiny = 1e-4 * hidden_of(SMALL)
    assert gap(run(loose, tiny).latent_SL, run(SMALL, tiny).latent_SL) > 1e-2


@EVERY_VARIANT
def test_a_request_without_tokens_gives_empty_outputs(config):
    output = run(config, hidden_of(config, 0))
    assert output.hidden_SD.shape == (0, config.hidden_size)
    assert output.lse_SH.shape == (0, config.num_heads)
    assert output.latent_SL.shape == (0, config.kv_lora_rank)


def test_low_precision_weights_are_computed_in_float64():
    weights = {name: weight.bfloat16() for name, weight in weights_of(SMALL).items()}
    output = reference.attention_layer(SMALL, weights, hidden_of(SMALL).bfloat16())
    assert {field.dtype for field in fields(output)} == {torch.float64}


def test_an_unknown_form_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'fused' is unknown; known: expanded, absorbed"):
        run(SMALL, form="fused")
