"""Which format a module's tensors are in, and what is said of tensors that are in none."""

from __future__ import annotations

import pytest
import torch

from mla_core.quant import weight_formats
from tests.quantise import BLOCK, FORMATS, quantise

SHAPE = (130, 160)
IDS = {
    "fp8_block": "fp8",
    "fp8_block_bf16_scales": "fp8",
    "fp8_block_four_dims": "fp8",
    "fp8_channel": "fp8",
    "fp8_channel_flat": "fp8",
    "fp8_tensor": "fp8",
    "nvfp4": "nvfp4",
    "nvfp4_packed": "nvfp4_packed",
    "int4_group": "int4_packed",
    "int4_channel": "int4_packed",
}


def tensors(kind: str, **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A module's tensors with some replaced or, by None, removed."""
    generator = torch.Generator().manual_seed(0)
    given = {**quantise(kind, torch.randn(SHAPE, generator=generator)).tensors, **changes}
    return {name: value for name, value in given.items() if value is not None}


def problems(given: dict[str, torch.Tensor]) -> str:
    found, said = weight_formats.read(given, SHAPE, (BLOCK, BLOCK))
    assert found is None
    return "\n".join(said)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_tensors_that_are_there_decide_the_format(kind):
    given = tensors(kind)
    found, said = weight_formats.read(given, SHAPE, (BLOCK, BLOCK))
    assert weight_formats.is_quantised(given)
    assert said == []
    assert found.format.id == IDS[kind]


@pytest.mark.parametrize(
    ("kind", "steps"),
    [
        ("fp8_block", (128, 128)),
        ("fp8_block_bf16_scales", (128, 128)),
        ("fp8_channel", (1, 0)),
        ("fp8_tensor", (0, 0)),
        ("nvfp4", (1, 16)),
        ("int4_group", (1, 32)),
        ("int4_channel", (1, 0)),
    ],
)
def test_how_many_scales_there_are_says_what_each_covers(kind, steps):
    found, _ = weight_formats.read(tensors(kind), SHAPE, (BLOCK, BLOCK))
    name = "weight_scale_inv" if kind == "fp8_block" else "weight_scale"
    assert found.format.parts[name].steps == steps


def test_the_block_size_is_the_one_given_not_rows_over_scales():
    codes = torch.ones(576, 256).to(torch.float8_e4m3fn)
    scales = torch.arange(1.0, 11.0).reshape(5, 2)
    given = {"weight": codes, "weight_scale_inv": scales}
    found, _ = weight_formats.read(given, (576, 256), (128, 128))
    values = found.dequantise(torch.float32)
    # 576 // 5 = 115 rows a block would put row 127 under the second scale.
    assert [values[row, 0].item() for row in (0, 127, 128, 511, 512, 575)] == [1, 1, 3, 7, 9, 9]


def test_other_block_sizes_are_read_as_configured():
    codes = torch.ones(100, 90).to(torch.float8_e4m3fn)
    given = {"weight": codes, "weight_scale_inv": torch.arange(1.0, 13.0).reshape(4, 3)}
    found, _ = weight_formats.read(given, (100, 90), (32, 40))
    values = found.dequantise(torch.float32)
    assert [values[31, 39].item(), values[32, 40].item(), values[99, 89].item()] == [1, 5, 12]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_may_be_of_other_float_types(dtype):
    scales = torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    given = {"weight": torch.ones(SHAPE).to(torch.float8_e4m3fn), "weight_scale_inv": scales.to(dtype)}
    found, _ = weight_formats.read(given, SHAPE, (BLOCK, BLOCK))
    assert found.dequantise(torch.float32)[129, 0] == 4.0


def test_codes_may_be_e5m2():
    given = {"weight": torch.full(SHAPE, 57344.0).to(torch.float8_e5m2), "weight_scale": torch.tensor(2.0)}
    found, _ = weight_formats.read(given, SHAPE, (BLOCK, BLOCK))
    assert found.dequantise(torch.float32)[0, 0] == 2 * 57344


def test_a_scale_of_the_whole_multiplies_in_one_form_and_divides_in_the_other():
    plain, packed = tensors("nvfp4"), tensors("nvfp4_packed")
    read = [
        weight_formats.read(given, SHAPE, (BLOCK, BLOCK))[0].dequantise(torch.float32)
        for given in (
            plain,
            plain | {"weight_scale_2": 2 * plain["weight_scale_2"]},
            packed,
            packed | {"weight_global_scale": 2 * packed["weight_global_scale"]},
        )
    ]
    assert torch.equal(read[1], 2 * read[0])
    assert torch.equal(read[3], read[2] / 2)


def test_a_static_input_scale_is_kept_and_its_inverse_turned():
    plain, _ = weight_formats.read(tensors("nvfp4"), SHAPE, (BLOCK, BLOCK))
    packed, _ = weight_formats.read(tensors("nvfp4_packed"), SHAPE, (BLOCK, BLOCK))
    absent, _ = weight_formats.read(tensors("fp8_block"), SHAPE, (BLOCK, BLOCK))
    assert plain.input_scale == torch.tensor(0.004)
    assert packed.input_scale == torch.tensor(1 / 250)
    assert absent.input_scale is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_plain_weight_is_not_quantised(dtype):
    assert not weight_formats.is_quantised({"weight": torch.zeros(2, 2, dtype=dtype)})
    assert not weight_formats.is_quantised({})


WRONG = {
    "fp8-without-scale": (
        "fp8_block",
        {"weight_scale_inv": None},
        "lacks weight_scale_inv [2, 2], which the format fp8 needs",
    ),
    "scale-without-weight": ("fp8_block", {"weight": None}, "lacks weight [130, 160]"),
    "wrong-grid": (
        "fp8_block",
        {"weight_scale_inv": torch.ones(3, 2)},
        "weight_scale_inv has shape [3, 2], expected [2, 2] for blocks of 128 x 128",
    ),
    "wrong-codes": (
        "fp8_block",
        {"weight": torch.zeros(130, 150).to(torch.float8_e4m3fn)},
        "weight has shape [130, 150], expected [130, 160]",
    ),
    "scale-of-bytes": (
        "fp8_block",
        {"weight_scale_inv": torch.ones(2, 2, dtype=torch.uint8)},
        "weight_scale_inv is uint8, expected float32 or bfloat16 or float16 or float8_e8m0fnu",
    ),
    "scale-beside-plain-weight": (
        "fp8_block",
        {"weight": torch.zeros(SHAPE)},
        "has the tensors weight (float32), weight_scale_inv (float32), which is no known format",
    ),
    "nvfp4-without-group-scales": ("nvfp4", {"weight_scale": None}, "lacks weight_scale [130, 10]"),
    "nvfp4-with-other-groups": (
        "nvfp4",
        {"weight_scale": torch.ones(130, 5).to(torch.float8_e4m3fn)},
        "weight_scale has shape [130, 5], expected [130, 10]",
    ),
    "nvfp4-scales-in-bf16": (
        "nvfp4_packed",
        {"weight_scale": torch.ones(130, 10).bfloat16()},
        "weight_scale is bfloat16, expected float8_e4m3fn",
    ),
    "int4-of-another-shape": (
        "int4_group",
        {"weight_shape": torch.tensor([130, 161])},
        "weight_shape says [130, 161], expected [130, 160]",
    ),
    "int4-with-zero-points": (
        "int4_group",
        {"weight_zero_point": torch.zeros(130, 5)},
        "has weight_zero_point, which the format int4_packed does not know",
    ),
    "packed-bytes-without-scale-of-all": (
        "nvfp4_packed",
        {"weight_global_scale": None},
        "has the tensors input_global_scale (float32), weight_packed (uint8), weight_scale (float8_e4m3fn)",
    ),
}


@pytest.mark.parametrize(("kind", "changes", "message"), WRONG.values(), ids=WRONG)
def test_tensors_that_do_not_fit_are_named_with_what_would(kind, changes, message):
    assert message in problems(tensors(kind, **changes))


def test_everything_wrong_with_a_module_is_said_at_once():
    given = tensors("int4_group", weight_scale=None, weight_packed=torch.zeros(1, 1, dtype=torch.int32))
    said = problems(given | {"weight_g_idx": torch.zeros(160)})
    assert all(name in said for name in ("weight_scale", "weight_packed", "weight_g_idx"))
