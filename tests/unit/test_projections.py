"""The weight modules against their formulas."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from mla_core.projections import Direct, Linear, Projections, RMSNorm
from tests.support import tiny_config

CPU = torch.device("cpu")


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_linear_is_x_times_the_transposed_weight_plus_bias(bias):
    module = Linear(4, 3, bias, torch.float32, CPU)
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter))
    x = torch.randn(2, 4)
    expected = x @ module.weight.T + (module.bias if bias else 0)
    torch.testing.assert_close(module(x), expected)


def norm_of(width: int, dtype: torch.dtype, eps: float = 1e-3) -> RMSNorm:
    module = RMSNorm(width, eps, dtype, CPU)
    module.weight.copy_(torch.linspace(0.5, 2.0, width))
    return module


def test_rms_norm_divides_by_the_root_mean_square_and_scales():
    module, x = norm_of(6, torch.float32), torch.randn(2, 6)
    expected = x / (x.square().mean(dim=1, keepdim=True) + 1e-3).sqrt() * module.weight
    torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_rms_norm_of_16_bit_values_is_computed_in_float32(dtype):
    """The square of 300 does not fit float16, and its sum not bfloat16's 8 bits."""
    module, x = norm_of(512, dtype), 300 * torch.ones(1, 512, dtype=dtype)
    torch.testing.assert_close(module(x), module.weight[None], rtol=1e-2, atol=0)


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(norm_of(6, torch.float32)(torch.zeros(2, 6)), torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("changes", "fuse", "names"),
    [
        ({}, True, {"q_a_layernorm", "q_b_proj", "qkv_a_proj", "kv_a_layernorm", "kv_b_proj"}),
        (
            {},
            False,
            {"q_a_layernorm", "q_b_proj", "q_a_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"},
        ),
        ({"q_lora_rank": None}, True, {"q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"}),
    ],
    ids=["fused", "apart", "no_query_lora"],
)
def test_a_model_has_exactly_the_modules_it_needs(changes, fuse, names):
    projections = Projections(tiny_config(**changes), 3, fuse, torch.float32, CPU)
    assert {name for name, _ in projections.named_children()} == names


def test_without_query_lora_there_is_no_query_latent():
    projections = Projections(tiny_config(q_lora_rank=None), 3, True, torch.float32, CPU)
    q_a_TQ, kv_a_TX = projections.down(torch.zeros(2, 40))
    assert q_a_TQ is None
    assert kv_a_TX.shape == (2, 20)


def direct() -> Direct:
    module = Direct()
    module.weight = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    return module


def test_parameters_and_modules_are_found_as_plain_attributes():
    module = direct()
    module.child = direct()
    assert vars(module)["weight"] is dict(module.named_parameters())["weight"]
    assert vars(module)["child"] is dict(module.named_children())["child"]


def test_a_replaced_parameter_is_the_one_that_is_found():
    module = direct()
    new = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    module.weight = new
    assert module.weight is new
    assert dict(module.named_parameters()) == {"weight": new}


def test_assigning_a_state_dict_replaces_what_is_found():
    module, new = direct(), torch.ones(2)
    module.load_state_dict({"weight": new}, assign=True)
    assert torch.equal(module.weight, new)


def test_a_parameter_set_to_none_is_none():
    module = direct()
    module.weight = None
    assert module.weight is None


def test_a_deleted_parameter_is_gone():
    module = direct()
    del module.weight
    with pytest.raises(AttributeError, match="weight"):
        _ = module.weight


def test_a_copy_finds_its_own_parameter():
    copied = deepcopy(direct())
    assert copied.weight is dict(copied.named_parameters())["weight"]
