"""The kit's instruments: its oracle, its guarded memory, its tolerances, and a backend's one-line refusal."""

from __future__ import annotations

import pytest
import torch

from mla_core.backend import LayerContext
from mla_core.conformance.guard import Guarded, Watched
from mla_core.conformance.oracle import attend
from mla_core.conformance.scenes import Lengths, mha_scene, mqa_scene
from mla_core.conformance.tolerances import TOLERANCES, tolerance
from mla_core.errors import UnsupportedError
from mla_core.request import LayerRequest
from tests.unit.fakes import LAYER, backend

CPU = torch.device("cpu")
SMALL = LayerRequest(
    device="cpu", dtype="float32", layout="fp32", page_size=4, heads=2, latent=6, nope=5, rope=4, value=3
)


def context(kernels: set[str], **changes: object) -> LayerContext:
    request = LayerRequest.model_validate({**LAYER.model_dump(), "page_size": None, **changes})
    return LayerContext(request, frozenset(kernels), {}, 1.0, CPU, torch.float32)


def test_a_backend_accepts_in_one_line_what_its_manifest_offers():
    context({"mqa_decode", "mha_prefill"}).require(backend("mine"))


def test_a_backend_refuses_in_one_line_with_every_field():
    with pytest.raises(UnsupportedError) as caught:
        context({"mqa_decode"}, heads=129, dtype="float16").require(backend("mine"))
    assert [reason.field for reason in caught.value.reasons] == ["dtype", "heads"]


def test_the_refusal_is_about_the_kernels_it_was_chosen_for():
    """nope is no matter of the absorbed form."""
    offer = backend("mine", nope=[64])
    context({"mqa_decode"}).require(offer)
    with pytest.raises(UnsupportedError):
        context({"mha_prefill"}).require(offer)


@pytest.mark.parametrize(("page_size", "refused"), [(16, False), (32, True)])
def test_a_backend_refuses_page_sizes_in_one_line(page_size, refused):
    made = context({"mqa_decode"})
    offer = backend("mine")
    if not refused:
        made.require(offer, page_size=page_size)
        return
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="page_size: wanted 32"):
            made.require(offer, page_size=page_size)


def test_the_kits_oracle_is_softmax_attention():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 2, w, generator=generator) for n, w in ((3, 5), (7, 5), (7, 4)))
    answer = attend(q, k, v, [7, 7, 7], 0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in (q, k, v)), scale=0.3
    )
    torch.testing.assert_close(answer.out_THV, expected.transpose(0, 1))


def test_the_kits_oracle_gives_zero_and_minus_infinity_for_a_row_that_sees_nothing():
    answer = attend(torch.ones(1, 2, 3), torch.ones(4, 2, 3), torch.ones(4, 2, 3), [0], 1.0)
    assert answer.out_THV.abs().max() == 0
    assert torch.isneginf(answer.lse_TH).all()


@pytest.mark.parametrize("control", ["scale", "mask", "rope", "page"])
def test_a_control_changes_the_expected_answer(control):
    scene = mqa_scene(SMALL, Lengths((1, 2), (9, 6)), CPU, 0.3, page_size=4)
    difference = (scene.expected(control).out_THV - scene.expected().out_THV).norm()
    assert difference > tolerance("float32").row * scene.expected().out_THV.norm()


def test_the_lse_control_changes_lse_only():
    scene = mha_scene(SMALL, Lengths((3,), (5,)), CPU, 0.3)
    faulty, right = scene.expected("lse_base"), scene.expected()
    assert torch.equal(faulty.out_THV, right.out_THV)
    assert (faulty.lse_TH - right.lse_TH).abs().max() > 0.1


def test_bytes_that_no_token_owns_are_nan_in_a_scene():
    scene = mqa_scene(SMALL, Lengths((1,), (5,)), CPU, 0.3, page_size=4)
    finite = scene.cache.data.isfinite().all(dim=-1).sum()
    assert finite == 5


def test_a_write_outside_the_guarded_tensor_is_noticed():
    guarded = Guarded((2, 3), torch.float32, CPU)
    guarded.view.zero_()
    assert not guarded.overrun()
    guarded.view.as_strided((1,), (1,), guarded.view.storage_offset() + 6).zero_()
    assert guarded.overrun()


def test_a_row_that_was_not_written_is_nan():
    guarded = Guarded((2, 3), torch.bfloat16, CPU)
    guarded.view[0] = 0
    assert guarded.view[1].isnan().all()


def test_a_changed_input_is_named_even_among_nan():
    inputs = {"q": torch.full((2, 2), torch.nan), "k": torch.zeros(3)}
    watched = Watched(inputs)
    assert watched.changed() == []
    inputs["k"][1] = 1.0
    assert watched.changed() == ["k"]


def test_tolerances_follow_the_element_types():
    assert TOLERANCES["float32"].row < TOLERANCES["float16"].row < TOLERANCES["bfloat16"].row


def test_no_tolerance_reaches_the_smallest_deliberate_fault():
    """1 % of scale moves scores of standard deviation 3 by 0.03."""
    assert all(tolerance(dtype).row < 0.03 / 2 for dtype in TOLERANCES)


def test_a_quantised_cache_is_given_one_rounding_of_its_rows():
    more = tolerance("bfloat16", quantised=True).row - tolerance("bfloat16").row
    assert more == pytest.approx(3 * 2**-8)
