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


@pytest.mark.parametrize("k_scale", [1.0, 0.25, 0.03, 0.02, 1.9, 3e-9, 7e8])
def test_an_fp8_scale_costs_no_digits_of_the_scores(build, k_scale):
    call = Paged(**MIXED, layout="fp8_e4m3", k_scale=k_scale)
    call.q_THX = (call.q_THX / k_scale).clamp(-1e30, 1e30) if k_scale < 1 else call.q_THX
    backend, expected = build(), call.expected()
    _, lse = call.run(backend)
    assert float(((lse - expected[1]) / expected[1].abs().clamp(min=1)).abs().max()) < 1e-5


def test_rounding_the_scale_to_bfloat16_is_noticed(build, monkeypatch):
    monkeypatch.setattr("mla_flashinfer.paged.split_scale", lambda scale: (scale, 1.0))
    call = Paged(**MIXED, layout="fp8_e4m3", k_scale=0.03)
    _, lse = call.run(build())
    assert float((lse - call.expected()[1]).abs().max()) > 1e-5


def test_caches_of_different_scales_share_a_plan(build):
    calls = [Paged(**MIXED, layout="fp8_e4m3", k_scale=k_scale) for k_scale in (0.03, 1.0, 0.7)]
    backend, segments = build(), calls[0].segments()
    segments.meta = backend.prepare("mqa_decode", segments, calls[0].cache.geometry)
    for call in calls:
        out, lse = call.outputs()
        backend.mqa(call.q_THX, call.cache, segments, SCALE, out, lse)
        assert error((out, lse), call.expected()) < TOLERANCE


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


def refresh(backend, segments, call):
    """Let a graph step's segments describe another call, as the core does; returns the call's answer."""
    other = call.segments()
    segments.query_start_loc.copy_(other.query_start_loc)
    segments.seq_lens.copy_(other.seq_lens)
    segments.block_table.copy_(other.block_table)
    segments.query_lens, segments.key_lens = other.query_lens, other.key_lens
    segments.meta = backend.prepare("mqa_decode", segments, call.cache.geometry)
    out, lse = call.outputs()
    backend.mqa(call.q_THX, call.cache, segments, SCALE, out, lse)
    return out, lse


@pytest.mark.parametrize("heads", [4, 20, 64, 128])
@pytest.mark.parametrize(
    ("queries", "keys"),
    [((1, 1, 1), (9, 4, 12)), ((1, 0, 0), (2, 0, 0)), ((0, 4, 2), (0, 9, 12)), ((0, 0, 0), (0, 0, 0))],
    ids=["all live", "one live", "longer queries", "none live"],
)
def test_a_graph_step_serves_any_live_requests_over_one_grid(build, heads, queries, keys):
    backend = build(heads=heads, max_query_len=4, cuda_graph="decode")
    first = Paged((2, 1, 3), (9, 4, 12), heads, rows=6, seed=1)
    segments = first.segments()
    assert error(refresh(backend, segments, first), first.expected()) < TOLERANCE
    wrapper = segments.meta.launches[0][1]
    other = Paged(queries, keys, heads, rows=6, seed=2)
    other.table = torch.nn.functional.pad(other.table, (0, 5), value=-1)[:, : first.table.shape[1]]
    assert error(refresh(backend, segments, other), other.expected()) < TOLERANCE
    assert segments.meta.launches[0][1] is wrapper


def test_a_stale_graph_plan_is_noticed(build):
    backend = build(cuda_graph="decode")
    first, other = Paged((1, 1), (9, 4), rows=2, seed=1), Paged((1, 1), (2, 11), rows=2, seed=2)
    segments = first.segments()
    segments.meta = backend.prepare("mqa_decode", segments, first.cache.geometry)
    out, lse = other.outputs()
    backend.mqa(other.q_THX, other.cache, segments, SCALE, out, lse)
    assert error((out, lse), other.expected()) > TOLERANCE


def test_rows_of_padding_come_back_as_nothing(build):
    call = Paged((1, 1), (9, 4), rows=5)
    backend, segments = build(cuda_graph="decode"), call.segments()
    out, lse = refresh(backend, segments, call)
    assert (int(out[2:].count_nonzero()), float(lse[2:].max())) == (0, -torch.inf)


def test_graph_steps_of_two_sizes_do_not_share_a_plan(build):
    backend = build(cuda_graph="decode")
    calls = [Paged((1, 1), (9, 4), rows=2), Paged((1, 1, 1), (9, 4, 2), rows=3)]
    plans = [backend.prepare("mqa_decode", call.segments(), call.cache.geometry) for call in calls]
    assert plans[0].launches[0][1] is not plans[1].launches[0][1]


def test_an_ordinary_step_of_a_graph_layer_is_planned_afresh(build):
    backend, call = build(cuda_graph="decode"), Paged((9, 7), (9, 8))
    plans = [backend.prepare("mqa_prefill", call.segments(), call.cache.geometry) for _ in range(2)]
    assert plans[0].launches[0][1] is not plans[1].launches[0][1]


def test_more_tokens_than_a_graph_has_room_for_are_an_error(build):
    backend, call = build(cuda_graph="decode", max_query_len=1), Paged((1, 1), (9, 4), rows=2)
    segments = call.segments()
    segments.meta = backend.prepare("mqa_decode", segments, call.cache.geometry)
    segments.query_lens = (2, 1)
    with pytest.raises(
        ContractError, match="needs 3 rows in 2 pieces, but its graph has room for 2 rows in 2"
    ):
        backend.prepare("mqa_decode", segments, call.cache.geometry)


def test_without_a_graph_every_step_gets_its_own_plan(build):
    backend, call = build(), Paged((1, 1), (9, 4))
    plans = [backend.prepare("mqa_decode", call.segments(), call.cache.geometry) for _ in range(2)]
    assert plans[0].launches[0][1] is not plans[1].launches[0][1]
