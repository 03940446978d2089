"""NVFP4 inputs in a layer: given as hidden states, or rounded in front of weights with a static scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mla_core import MLA, hookimpl
from mla_core.config import GateConfig
from mla_core.projections import Linear, QuantisedLinear, SplitUp
from mla_core.quant import weight_formats
from mla_core.quant.fp4_hidden import Fp4Hidden, rms_norm_fp4
from mla_core.quant.weight import QuantisedWeight, multiply
from tests.fakes import Counting, registered
from tests.quantise import checkpoint, quantise
from tests.support import World, build, random_weights, tiny_config

CONFIG = tiny_config(
    hidden_size=64,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    gate=GateConfig(kind="per_head"),
)
WEIGHTS = random_weights(CONFIG)
STEP = torch.tensor(0.002)


def linear(kind: str, fp4_inputs: bool = False, bias: Tensor | None = None) -> tuple[QuantisedLinear, Tensor]:
    """A module, and the values of its weight [24, 64]."""
    stored = quantise(kind, torch.randn(24, 64, generator=torch.Generator().manual_seed(0)))
    found, _ = weight_formats.read(stored.tensors, (24, 64), (128, 128))
    own = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return QuantisedLinear(found, own, torch.device("cpu"), fp4_inputs), stored.values


def rows(tokens: int = 5) -> Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(1))


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# One module.


def test_a_module_multiplies_by_the_values_and_adds_its_bias():
    bias = torch.arange(24.0)
    module, values = linear("nvfp4", bias=bias)
    assert_close(module(rows()), rows() @ values.T + bias)


def test_inputs_are_not_rounded_unless_asked():
    module, values = linear("nvfp4")
    assert not module.takes_fp4
    assert_close(module(rows()), rows() @ values.T)


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4_packed"])
def test_inputs_are_rounded_to_nvfp4_when_asked(kind):
    module, values = linear(kind, fp4_inputs=True)
    assert module.takes_fp4
    rounded = Fp4Hidden.quantise(rows(), module.input_scale).values()
    assert_close(module(rows()), rounded @ values.T)
    assert (module(rows()) - rows() @ values.T).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["fp8_block", "fp8_tensor", "int4_group"])
def test_inputs_of_other_formats_are_never_rounded(kind):
    module, values = linear(kind, fp4_inputs=True)
    assert not module.takes_fp4
    assert_close(module(rows()), rows() @ values.T)


def test_rows_that_come_in_nvfp4_are_multiplied_as_they_are():
    module, values = linear("nvfp4")
    given = Fp4Hidden.quantise(rows(), STEP, keep=True)
    assert_close(module(given), given.values() @ values.T)


@pytest.mark.parametrize("kind", ["fp8_block", "int4_group"])
def test_weights_of_other_formats_take_the_rows_before_quantisation(kind):
    module, values = linear(kind)
    assert_close(module(Fp4Hidden.quantise(rows(), STEP, keep=True)), rows() @ values.T)


def test_a_plain_module_takes_the_rows_before_quantisation():
    module = Linear(64, 24, False, torch.float32, torch.device("cpu"))
    nn.init.normal_(module.weight)
    assert torch.equal(module(Fp4Hidden.quantise(rows(), STEP, keep=True)), module(rows()))


def test_a_replaced_product_gets_nvfp4_rows_undecoded():
    module, _ = linear("nvfp4", fp4_inputs=True)
    seen = []
    module.multiply = lambda x, weight, bias: seen.append(x) or torch.zeros(5, 24)
    module(rows())
    assert isinstance(seen[0], Fp4Hidden)


def test_the_halves_of_kv_b_give_what_the_whole_gives():
    w_uk_HLN, w_uv_HVL = torch.randn(3, 32, 16), torch.randn(3, 10, 32)
    latent_SL = torch.randn(7, 32)
    whole_HXL = torch.cat([w_uk_HLN.transpose(1, 2), w_uv_HVL], dim=1)
    module = SplitUp(w_uk_HLN, w_uv_HVL)
    assert module.shape == (3 * 26, 32)
    assert_close(module(latent_SL), latent_SL @ whole_HXL.flatten(0, 1).T)


# A whole layer.


class OwnProducts(Counting):
    """A plugin that multiplies by FP8 weights itself."""

    @hookimpl
    def prepare_weights(self, layer: MLA) -> None:
        for module in layer.quantised_modules.values():
            if module.stored.format.id == "fp8":
                module.multiply = self.product

    def product(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        self.calls["product"] += 1
        return multiply(x, weight, bias)


def test_a_plugin_replaces_the_products_in_its_prepare_weights_hook():
    given, _ = checkpoint("fp8_block", WEIGHTS)
    with registered("hooked", OwnProducts):
        layer = build(CONFIG, given, backend="hooked")
        assert torch.equal(outputs(layer, rows()), outputs(build(CONFIG, given), rows()))
    # q_a, q_b, kv_a, o and the gate; kv_b_proj is split instead.
    assert layer.kernels.mqa.calls["product"] == 5


def outputs(layer: MLA, hidden: Tensor | Fp4Hidden) -> Tensor:
    world = World(layer, [hidden.shape[0]])
    return layer(hidden, layer.prepare(world.batch([(0, hidden.shape[0])]), world.cache))


def test_a_dense_layer_given_nvfp4_rows_uses_what_came_along():
    layer = build(CONFIG, WEIGHTS)
    given = Fp4Hidden.quantise(rows(), STEP, keep=True)
    assert torch.equal(outputs(layer, given), outputs(layer, rows()))


def test_a_dense_layer_given_bare_nvfp4_rows_decodes_them():
    layer = build(CONFIG, WEIGHTS)
    given = Fp4Hidden.quantise(rows(), STEP)
    assert_close(outputs(layer, given), outputs(layer, given.values()))
    assert (outputs(layer, given) - outputs(layer, rows())).abs().max() > 1e-2


def test_an_nvfp4_layer_multiplies_the_rows_as_they_come():
    layer = build(CONFIG, checkpoint("nvfp4", WEIGHTS)[0])
    given = Fp4Hidden.quantise(rows(), STEP, keep=True)
    assert_close(outputs(layer, given), outputs(layer, given.values()))
    assert (outputs(layer, given) - outputs(layer, rows())).abs().max() > 1e-2


def test_leading_rows_of_a_padded_buffer_are_computed_like_the_rows_alone():
    layer = build(CONFIG, checkpoint("nvfp4", WEIGHTS)[0])
    padded = Fp4Hidden.quantise(torch.cat([rows(), torch.full((140, 64), 3.0)]), STEP, keep=True)
    alone = Fp4Hidden.quantise(rows(), STEP, keep=True)
    assert torch.equal(outputs(layer, padded.rows(5)), outputs(layer, alone))


def test_the_query_norm_rounds_for_q_b_proj_in_the_same_step():
    layer = build(CONFIG, checkpoint("nvfp4", WEIGHTS)[0], fp4_inputs=True)
    unfused = layer.projections
    q_a_TQ = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    fused = unfused.norm_query(q_a_TQ)
    assert torch.equal(fused.unquantised, unfused.q_a_layernorm(q_a_TQ))
    assert_close(unfused.up(fused), unfused.up(unfused.q_a_layernorm(q_a_TQ)))


def test_a_kernel_may_replace_the_fused_norm():
    layer = build(CONFIG, checkpoint("nvfp4", WEIGHTS)[0], fp4_inputs=True)
    expected, calls = outputs(layer, rows()), []

    def kernel(*arguments):
        calls.append(len(arguments))
        return rms_norm_fp4(*arguments)

    layer.projections.norm_fp4 = kernel
    assert torch.equal(outputs(layer, rows()), expected)
    assert calls == [4]


@pytest.mark.parametrize(
    ("kind", "fp4_inputs"), [("nvfp4", False), ("fp8_block", True), ("int4_group", True)]
)
def test_the_query_norm_stays_plain_for_other_weights(kind, fp4_inputs):
    layer = build(CONFIG, checkpoint(kind, WEIGHTS)[0], fp4_inputs=fp4_inputs)
    assert isinstance(layer.projections.norm_query(torch.randn(5, 32)), Tensor)


def test_rounding_the_inputs_changes_the_outputs_a_little():
    given, _ = checkpoint("nvfp4", WEIGHTS)
    plain, rounded = (build(CONFIG, given, fp4_inputs=on) for on in (False, True))
    expected = outputs(plain, rows())
    error = (outputs(rounded, rows()) - expected).norm() / expected.norm()
    assert 0.01 < error < 0.5
