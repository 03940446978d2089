"""Absorbed attention: what is planned and called, and that the answers are right, over a fake FlashInfer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_core.errors import CacheError, ContractError
from plugins.flashinfer.tests.calls import SCALE, TOLERANCE, Paged, context, error

MIXED = {"queries": (1, 3, 2, 4), "keys": (9, 3, 8, 13)}


@pytest.fixture
def build(fake):
    return lambda **changes: fake.backend.FlashInfer(context(**changes))


@pytest.mark.parametrize("heads", [1, 3, 4, 12, 16, 20, 40, 64, 96, 128])
def test_mixed_query_lengths_give_the_right_rows(build, heads):
    call = Paged(**MIXED, heads=heads)
    assert error(call.run(build(heads=heads)), call.expected()) < TOLERANCE


@pytest.mark.parametrize("page_size", [1, 4, 7, 64])
def test_any_page_size_gives_the_right_rows(build, page_size):
    call = Paged(**MIXED, page_size=page_size)
    assert error(call.run(build()), call.expected()) < TOLERANCE


def test_without_a_mask_every_row_sees_every_key(build):
    call = Paged(**MIXED, causal=False)
    assert error(call.run(build()), call.expected()) < TOLERANCE


def test_requests_without_queries_or_keys_are_no_trouble(build):
    call = Paged((0, 1, 2, 0, 3), (5, 0, 4, 0, 2))
    out, lse = call.run(build())
    assert error((out, lse), call.expected()) < TOLERANCE
    assert torch.equal(lse[0], torch.full((4,), -torch.inf))
    assert torch.equal(out[0], torch.zeros_like(out[0]))


@pytest.mark.parametrize(("queries", "keys"), [((), ()), ((0, 0), (0, 3))])
def test_nothing_to_do_calls_nothing(build, fake, queries, keys):
    out, _ = Paged(queries, keys).run(build())
    assert (len(out), fake.calls["plan paged"], fake.calls["run paged"]) == (0, 0, 0)


def test_an_answer_from_another_requests_pages_is_noticed(build):
    call = Paged((1, 3), (9, 11))
    expected = call.expected()
    call.table = call.table.flip(0)
    assert error(call.run(build()), expected) > TOLERANCE


def test_a_plan_for_one_key_less_is_noticed(build):
    call = Paged(**MIXED)
    expected = call.expected()
    call.keys = tuple(keys - 1 for keys in call.keys)
    assert error(call.run(build()), expected) > TOLERANCE


def test_the_plan_is_made_once_a_step_and_used_by_every_layer(build, fake):
    call, layers = Paged(**MIXED), [build() for _ in range(3)]
    segments = call.segments()
    segments.meta = layers[0].prepare("mqa_decode", segments, call.cache.geometry)
    for layer in layers:
        out, lse = call.outputs()
        layer.mqa(call.q_THX, call.cache, segments, SCALE, out, lse)
        assert error((out, lse), call.expected()) < TOLERANCE
    assert (fake.calls["plan paged"], fake.calls["run paged"]) == (1, 3)


def test_output_is_right_without_lse(build):
    call, backend = Paged(**MIXED), build()
    segments, (out, _) = call.segments(), call.outputs()
    segments.meta = backend.prepare("mqa_decode", segments, call.cache.geometry)
    backend.mqa(call.q_THX, call.cache, segments, SCALE, out, None)
    expected = call.expected()
    assert error((out, expected[1]), expected) < TOLERANCE


def test_strided_queries_outputs_and_lse_are_handled(build):
    call, backend = Paged(**MIXED), build()
    segments = call.segments()
    segments.meta = backend.prepare("mqa_decode", segments, call.cache.geometry)
    rows, heads, width = call.q_THX.shape
    wide = torch.full((2 * rows, heads + 2, width + 5), torch.nan).bfloat16()
    query = wide[1::2, 1:-1, 3:-2].copy_(call.q_THX)
    out = torch.full((rows, heads, 133), torch.nan).bfloat16()[..., 3:-2]
    lse = torch.full((rows, 2 * heads), torch.nan)[:, ::2]
    backend.mqa(query, call.cache, segments, SCALE, out, lse)
    assert error((out, lse), call.expected()) < TOLERANCE


def test_a_cache_of_every_second_page_is_read_in_place(build):
    call, backend = Paged(**MIXED), build()
    larger = torch.full((2 * call.cache.num_pages, *call.cache.data.shape[1:]), torch.nan).bfloat16()
    view = larger[1::2].copy_(call.cache.data)
    expected = call.expected()
    call.cache = replace(call.cache, data=view)
    assert error(call.run(backend), expected) < TOLERANCE


def test_a_cache_whose_rows_are_not_aligned_is_refused_with_its_strides(build):
    call, backend = Paged(**MIXED), build()
    wide = torch.zeros(*call.cache.data.shape[:2], call.cache.data.shape[2] + 5).bfloat16()
    call.cache = replace(call.cache, data=wide[..., 3:-2])
    with pytest.raises(CacheError, match="multiples of 16 bytes"):
        call.run(backend)


def test_an_fp8_cache_is_read_with_its_scale(build):
    call = Paged(**MIXED, layout="fp8_e4m3", k_scale=0.02)
    # The declared latent width of fp8 caches would make this test slow; the fake takes any.
    backend = build()
    assert error(call.run(backend), call.expected()) < TOLERANCE


def test_another_softmax_scale_than_planned_is_an_error(build):
    call, backend = Paged(**MIXED), build()
    segments, (out, lse) = call.segments(), call.outputs()
    segments.meta = backend.prepare("mqa_decode", segments, call.cache.geometry)
    with pytest.raises(ContractError, match="softmax scale"):
        backend.mqa(call.q_THX, call.cache, segments, 2 * SCALE, out, lse)


def test_a_prefill_too_long_for_one_plan_is_launched_in_parts(build, fake, monkeypatch):
    monkeypatch.setattr("mla_flashinfer.planning.MAX_TILES", 2)
    call = Paged((40, 1), (41, 5), heads=4)
    assert error(call.run(build(), "mqa_prefill"), call.expected()) < TOLERANCE
    assert fake.calls["run paged"] == 2


@pytest.mark.parametrize("turn_on", [{"options": {"graph": True}}, {"cuda_graph": "decode"}])
def test_a_graph_of_one_shape_is_planned_anew_at_the_same_addresses(build, fake, turn_on):
    backend = build(**turn_on)
    first, other = Paged((1, 1), (9, 4), seed=1), Paged((1, 1), (2, 8), seed=2)
    captured = first.segments()
    captured.meta = backend.prepare("mqa_decode", captured, first.cache.geometry)
    replanned = backend.prepare("mqa_decode", other.segments(), other.cache.geometry)
    assert replanned.launches[0][1] is captured.meta.launches[0][1]
    # A replay runs what was captured, over the buffers as they are now.
    out, lse = other.outputs()
    backend.mqa(other.q_THX, other.cache, captured, SCALE, out, lse)
    assert error((out, lse), other.expected()) < TOLERANCE


def test_another_shape_gets_another_plan_in_graph_mode(build):
    backend = build(options={"graph": True})
    plans = [
        backend.prepare("mqa_decode", call.segments(), call.cache.geometry)
        for call in (Paged((1, 1), (9, 4)), Paged((1, 2), (9, 4)), Paged((1, 1, 1), (9, 4, 2)))
    ]
    assert len({id(plan.launches[0][1]) for plan in plans}) == 3


def test_absorbed_prefill_is_planned_afresh_in_graph_mode_too(build):
    backend, call = build(options={"graph": True}), Paged((9, 7), (9, 8))
    plans = [backend.prepare("mqa_prefill", call.segments(), call.cache.geometry) for _ in range(2)]
    assert plans[0].launches[0][1] is not plans[1].launches[0][1]


def test_a_request_without_keys_keeps_its_place_in_a_graph(build):
    backend = build(options={"graph": True})
    first, other = Paged((1, 1), (9, 4), seed=1), Paged((1, 1), (8, 0), seed=2)
    captured = first.segments()
    captured.meta = backend.prepare("mqa_decode", captured, first.cache.geometry)
    backend.prepare("mqa_decode", other.segments(), other.cache.geometry)
    out, lse = other.outputs()
    backend.mqa(other.q_THX, other.cache, captured, SCALE, out, lse)
    assert error((out, lse), other.expected()) < TOLERANCE


def test_without_graph_mode_every_step_gets_its_own_plan(build):
    backend, call = build(), Paged((1, 1), (9, 4))
    plans = [backend.prepare("mqa_decode", call.segments(), call.cache.geometry) for _ in range(2)]
    assert plans[0].launches[0][1] is not plans[1].launches[0][1]


def test_a_block_table_that_outgrew_the_captured_one_is_an_error(build):
    backend = build(options={"graph": True})
    small, large = Paged((1, 1), (2, 3)), Paged((1, 1), (90, 90))
    backend.prepare("mqa_decode", small.segments(), small.cache.geometry)
    with pytest.raises(ContractError, match="widest block table"):
        backend.prepare("mqa_decode", large.segments(), large.cache.geometry)
