"""The default stages, one by one, against their formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mla_core import Batch, RopeInputs
from mla_core.config import GateConfig, LongRope, RopeConfig, Yarn
from mla_core.stages.attend import absorb, expand, v_up
from mla_core.stages.gate import gate
from mla_core.stages.output import create_output
from mla_core.stages.project import project
from mla_core.stages.project_out import project_out
from mla_core.stages.rope import frequencies, query_factors, rope_inputs, rotate, scale_queries
from tests.support import build, random_hidden, random_weights, tiny_config


def inputs_of(style: str, tokens: int = 5, width: int = 6) -> RopeInputs:
    angles = torch.randn(tokens, width // 2, generator=torch.Generator().manual_seed(1))
    return RopeInputs(style, angles.cos(), angles.sin(), torch.arange(tokens))


def as_complex(x: Tensor, style: str) -> Tensor:
    pairs = x.unflatten(-1, (-1, 2)) if style == "interleaved" else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    return torch.view_as_complex(pairs.contiguous())


@pytest.mark.parametrize("style", ["interleaved", "half_split"])
def test_rotation_multiplies_each_pair_by_a_complex_unit(style):
    x_THR = torch.randn(5, 3, 6)
    inputs = inputs_of(style)
    expected = as_complex(x_THR, style) * torch.complex(inputs.cos_TF, inputs.sin_TF)[:, None]
    rotate(x_THR, inputs)
    torch.testing.assert_close(as_complex(x_THR, style), expected)


def test_the_two_styles_pair_different_dims():
    x = torch.randn(5, 3, 6)
    y = x.clone()
    rotate(x, inputs_of("interleaved"))
    rotate(y, inputs_of("half_split"))
    assert not torch.allclose(x, y)


@pytest.mark.parametrize("style", ["interleaved", "half_split"])
def test_rotation_writes_through_a_strided_view_and_nothing_beside_it(style):
    wide = torch.randn(5, 3, 10)
    before = wide.clone()
    rotate(wide[..., 4:], inputs_of(style))
    expected = before[..., 4:].clone()
    rotate(expected, inputs_of(style))
    assert torch.equal(wide[..., 4:], expected)
    assert torch.equal(wide[..., :4], before[..., :4])


def test_rotation_of_16_bit_values_is_computed_in_float32():
    x = torch.randn(5, 3, 6)
    half, full = x.bfloat16(), x.bfloat16().float()
    rotate(half, inputs_of("interleaved"))
    rotate(full, inputs_of("interleaved"))
    assert torch.equal(half, full.bfloat16())


def batch_of(query: int, context: int) -> Batch:
    return Batch.build([query], [context], [list(range(200))], 64)


def test_angles_are_position_times_inverse_wavelength():
    inputs = rope_inputs(tiny_config(qk_rope_head_dim=4), batch_of(3, 5))
    angles = torch.tensor([5.0, 6.0, 7.0])[:, None] * torch.tensor([1.0, 10000.0**-0.5])
    torch.testing.assert_close(inputs.cos_TF, angles.cos())
    torch.testing.assert_close(inputs.sin_TF, angles.sin())


@pytest.mark.parametrize(
    "config", [{"rope": {"style": "none"}}, {"qk_rope_head_dim": 0}], ids=["none", "no_dims"]
)
def test_nothing_to_rotate_gives_no_inputs(config):
    assert rope_inputs(tiny_config(**config), batch_of(3, 5)) is None


def test_yarn_keeps_fast_dims_and_stretches_slow_ones_by_its_factor():
    scaling = Yarn(factor=4, original_max_position=4096)
    plain = tiny_config(qk_rope_head_dim=64)
    stretched = tiny_config(qk_rope_head_dim=64, rope=RopeConfig(scaling=scaling))
    ratio = frequencies(plain, torch.device("cpu"))[0] / frequencies(stretched, torch.device("cpu"))[0]
    assert ratio[0] == pytest.approx(1.0)
    assert ratio[-1] == pytest.approx(4.0)
    assert torch.all(ratio.diff() >= -1e-5)


def test_longrope_has_a_short_and_a_long_table():
    scaling = LongRope(short_factor=(1.0, 2.0), long_factor=(3.0, 5.0), original_max_position=8)
    table, _ = frequencies(tiny_config(rope=RopeConfig(scaling=scaling)), torch.device("cpu"))
    base = torch.tensor([1.0, 10000.0**-0.5])
    torch.testing.assert_close(table, base / torch.tensor([[1.0, 2.0], [3.0, 5.0]]))


@pytest.mark.parametrize(
    ("maximum", "amplitude"), [(8, 1.0), (4, 1.0), (64, math.sqrt(1 + math.log(8) / math.log(8)))]
)
def test_longrope_raises_the_amplitude_with_the_stretch(maximum, amplitude):
    scaling = LongRope(short_factor=(1.0, 2.0), long_factor=(3.0, 5.0), original_max_position=8)
    config = tiny_config(rope=RopeConfig(scaling=scaling), max_position_embeddings=maximum)
    assert frequencies(config, torch.device("cpu"))[1] == pytest.approx(amplitude)


@pytest.mark.parametrize(("offset", "expected"), [(0, [1, 1, 1, 1, 2]), (1, [1, 1, 1, 2, 2])])
def test_query_factors_step_at_multiples_of_the_floor(offset, expected):
    config = tiny_config(query_scaling={"beta": 0.5, "floor_scale": 4, "offset": offset})
    factors = query_factors(config, batch_of(5, 0))
    torch.testing.assert_close(factors, 1 + 0.5 * torch.tensor(expected).log())


def test_scaling_queries_multiplies_whole_rows_in_place():
    query_THE = torch.ones(3, 2, 4)
    projected = SimpleNamespace(query_THE=query_THE)
    scale_queries(projected, SimpleNamespace(query_factors_T=torch.tensor([1.0, 2.0, 3.0])))
    assert torch.equal(query_THE, torch.tensor([1.0, 2.0, 3.0])[:, None, None].expand(3, 2, 4))


def test_the_output_buffer_has_all_rows_in_the_dtype_of_the_hidden_states():
    layer = build(tiny_config(), dtype=torch.bfloat16)
    batch = Batch.build([2], [0], [[0]], 4, max_tokens=5)
    buffer = create_output(layer, random_hidden(5, layer.config, 0, torch.bfloat16), batch)
    assert (buffer.shape, buffer.dtype) == ((5, 18), torch.bfloat16)


def test_projection_gives_the_normed_latent_and_the_raw_rope_key():
    config, weights = tiny_config(), random_weights(tiny_config())
    hidden_TD = random_hidden(4, config, 0)
    projected = project(build(config), hidden_TD, None)
    both = hidden_TD @ weights["kv_a_proj_with_mqa.weight"].T
    latent = both[:, :16] * torch.rsqrt(both[:, :16].square().mean(dim=1, keepdim=True) + 1e-6)
    torch.testing.assert_close(projected.latent_TL, latent * weights["kv_a_layernorm.weight"])
    torch.testing.assert_close(projected.k_rope_TR, both[:, 16:])


def test_projection_keeps_what_an_indexer_needs():
    config = tiny_config()
    hidden_TD = random_hidden(4, config, 0)
    projected = project(build(config), hidden_TD, None)
    assert projected.hidden_TD is hidden_TD
    assert projected.q_lora_TQ.shape == (4, 24)
    lite = tiny_config(q_lora_rank=None)
    assert project(build(lite, random_weights(lite)), hidden_TD, None).q_lora_TQ is None


def test_constant_scales_multiply_queries_and_latents():
    plain, scaled = tiny_config(), tiny_config(query_scale=3.0, latent_scale=0.5)
    hidden_TD = random_hidden(4, plain, 0)
    one, other = (project(build(config), hidden_TD, None) for config in (plain, scaled))
    torch.testing.assert_close(other.query_THE, 3 * one.query_THE)
    torch.testing.assert_close(other.latent_TL, 0.5 * one.latent_TL)
    torch.testing.assert_close(other.k_rope_TR, one.k_rope_TR)


def test_expanding_and_absorbing_give_the_same_scores_and_values():
    layer = build(tiny_config())
    query_THE, latent_SL, k_rope_SR = torch.randn(2, 3, 14), torch.randn(5, 16), torch.randn(5, 4)
    k_SHE, v_SHV = expand(layer, latent_SL, k_rope_SR)
    scores = torch.einsum("the,she->hts", query_THE, k_SHE)
    absorbed = torch.einsum("thx,sx->hts", absorb(layer, query_THE), torch.cat([latent_SL, k_rope_SR], dim=1))
    torch.testing.assert_close(scores, absorbed, rtol=1e-4, atol=1e-4)
    values = torch.empty(5, 3, 6)
    v_up(layer, latent_SL[:, None].expand(-1, 3, -1), values)
    torch.testing.assert_close(values, v_SHV, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["per_head", "elementwise"])
def test_the_gate_multiplies_by_a_sigmoid_of_the_layers_input(kind):
    config = tiny_config(gate=GateConfig(kind=kind))
    weights = random_weights(config)
    hidden_TD, values_THV = random_hidden(4, config, 0), torch.randn(4, 3, 6)
    logits = (hidden_TD @ weights["g_proj.weight"].T).view(4, 3, -1)
    torch.testing.assert_close(
        gate(build(config, weights), values_THV, hidden_TD), values_THV * logits.sigmoid()
    )


def test_without_a_gate_the_output_passes_through():
    values_THV = torch.randn(4, 3, 6)
    assert gate(build(tiny_config()), values_THV, random_hidden(4, tiny_config(), 0)) is values_THV


def test_the_output_projection_flattens_the_heads_and_reduces():
    config = tiny_config(output_bias=True)
    weights = random_weights(config)
    values_THV = torch.randn(4, 3, 6)
    expected = values_THV.flatten(1) @ weights["o_proj.weight"].T + weights["o_proj.bias"]
    torch.testing.assert_close(project_out(build(config, weights), values_THV, None), expected)
    doubling = build(config, weights, reduce=lambda partial: 2 * partial)
    torch.testing.assert_close(project_out(doubling, values_THV, None), 2 * expected)
