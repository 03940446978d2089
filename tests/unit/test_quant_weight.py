"""Quantised matrices: values, cuts anywhere, and products, against values worked out element by element."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mla_core.quant import weight, weight_formats
from mla_core.quant.fp4_hidden import Fp4Hidden
from mla_core.quant.weight import Part, QuantisedWeight, multiply
from tests.quantise import BLOCK, FORMATS, Stored, quantise

# The first has kv_a_proj's ragged last block of 64 rows; the others are smaller than a block or odd.
SHAPES = [(576, 320), (130, 160), (7, 32)]
EVERY_FORMAT = pytest.mark.parametrize("kind", FORMATS)
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


def matrix(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Sizes that differ from block to block, so that a scale in the wrong place is seen."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-3, 4, (shape[0], shape[1] // 16), generator=generator)
    return torch.randn(shape, generator=generator) * sizes.repeat_interleave(16, 1)


def read(stored: Stored) -> QuantisedWeight:
    shape = tuple(stored.values.shape)
    found, problems = weight_formats.read(stored.tensors, (shape[0], shape[1]), (BLOCK, BLOCK))
    assert problems == []
    assert found is not None
    return found


def case(kind: str, shape: tuple[int, int]) -> tuple[QuantisedWeight, Tensor]:
    stored = quantise(kind, matrix(shape))
    return read(stored), stored.values


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pieces even of a small matrix."""
    monkeypatch.setattr(weight, "_CHUNK", 1000)


@pytest.mark.parametrize(
    ("part", "shape", "expected"),
    [
        (Part(128, 128, ()), (576, 7168), (5, 56)),
        (Part(1, 0, ()), (576, 7168), (576, 1)),
        (Part(1, 16, ()), (576, 40), (576, 3)),
        (Part(0, 0, ()), (576, 7168), ()),
    ],
    ids=["blocks", "rows", "groups", "all"],
)
def test_a_part_has_one_entry_for_each_block_ragged_ones_included(part, shape, expected):
    assert part.shape(shape) == expected


@EVERY_FORMAT
@EVERY_SHAPE
def test_values_are_bit_for_bit_those_of_the_formula(kind, shape):
    found, values = case(kind, shape)
    assert torch.equal(found.dequantise(torch.float32), values)


@EVERY_FORMAT
def test_values_are_rounded_once_to_the_dtype_asked_for(kind):
    found, values = case(kind, (130, 160))
    assert torch.equal(found.dequantise(torch.bfloat16), values.bfloat16())


@EVERY_FORMAT
def test_pieces_together_are_the_whole(kind, tiny_chunks):
    found, values = case(kind, (576, 320))
    assert len(found.chunks()) > 4
    assert torch.equal(found.dequantise(torch.float32), values)


# Cuts at borders of blocks, between them, inside one, and of nothing.
ROWS = [(0, 128), (128, 576), (100, 333), (5, 9), (575, 576), (40, 40)]
COLUMNS = [(0, 128), (128, 320), (17, 161), (5, 9), (319, 320), (40, 40)]


@EVERY_FORMAT
@pytest.mark.parametrize(("dim", "start", "stop"), [(0, *c) for c in ROWS] + [(1, *c) for c in COLUMNS])
def test_a_cut_anywhere_has_the_values_of_the_whole(kind, dim, start, stop):
    found, values = case(kind, (576, 320))
    cut = found.cut(dim, start, stop)
    expected = values.narrow(dim, start, stop - start)
    assert cut.shape == tuple(expected.shape)
    assert torch.equal(cut.dequantise(torch.float32), expected)


@EVERY_FORMAT
def test_a_cut_of_a_cut_counts_from_the_first(kind):
    found, values = case(kind, (576, 320))
    cut = found.cut(0, 100, 500).cut(1, 33, 300).cut(0, 50, 290).cut(1, 1, 2)
    assert torch.equal(cut.dequantise(torch.float32), values[150:390, 34:35])


@EVERY_FORMAT
def test_an_unaligned_cut_decodes_the_same_in_pieces(kind, tiny_chunks):
    found, values = case(kind, (576, 320))
    assert torch.equal(found.cut(0, 100, 533).dequantise(torch.float32), values[100:533])


@EVERY_FORMAT
def test_a_cut_copies_nothing(kind):
    found, _ = case(kind, (576, 320))
    cut = found.cut(0, 100, 333)
    for name, tensor in cut.tensors.items():
        assert tensor.untyped_storage().data_ptr() == found.tensors[name].untyped_storage().data_ptr()


def test_a_cut_takes_only_the_blocks_it_touches():
    found, _ = case("fp8_block", (576, 320))
    cut = found.cut(0, 200, 300)
    assert {name: tuple(tensor.shape) for name, tensor in cut.tensors.items()} == {
        "weight": (172, 320),
        "weight_scale_inv": (2, 3),
    }
    assert cut.skip == (72, 0)


def test_scales_anchored_at_the_cut_instead_of_the_whole_are_seen():
    """The negative control of the cuts: the same tensors without what they skip."""
    found, values = case("fp8_block", (576, 320))
    wrong = found.tensors["weight"][100:228].float() * found.tensors["weight_scale_inv"][0, 0]
    assert not torch.equal(wrong[:, :128], values[100:228, :128])


@EVERY_FORMAT
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_product_is_that_of_the_values(kind, tokens, tiny_chunks):
    found, values = case(kind, (130, 160))
    x = torch.randn(tokens, 160, generator=torch.Generator().manual_seed(1))
    bias = torch.arange(130.0)
    expected = (x.double() @ values.double().T + bias).float()
    torch.testing.assert_close(multiply(x, found, bias), expected, rtol=1e-5, atol=1e-4)


def test_a_product_with_one_block_scaled_wrongly_is_seen():
    found, values = case("fp8_block", (130, 160))
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(1))
    found.tensors["weight_scale_inv"][1, 1] *= 1.05
    assert (multiply(x, found) - x @ values.T)[:, 128:].abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_product_has_the_dtype_of_its_input(dtype):
    found, values = case("fp8_channel", (7, 32))
    x = torch.randn(2, 3, 32).to(dtype)
    out = multiply(x, found)
    assert (out.dtype, out.shape) == (dtype, (2, 3, 7))
    torch.testing.assert_close(out.float(), x.float() @ values.T, rtol=1e-2, atol=1e-2)


def test_a_product_of_nvfp4_inputs_is_that_of_their_values():
    found, values = case("nvfp4", (130, 160))
    x = Fp4Hidden.quantise(torch.randn(3, 160), torch.tensor(0.002))
    expected = x.values().double() @ values.double().T
    torch.testing.assert_close(multiply(x, found).double(), expected, rtol=1e-5, atol=1e-4)


def test_the_size_counts_all_tensors():
    found, _ = case("fp8_block", (576, 320))
    assert found.nbytes == 576 * 320 + 4 * 5 * 3
