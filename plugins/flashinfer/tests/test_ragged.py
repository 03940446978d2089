"""Expanded attention: what is planned and called, and that the answers are right, over a fake FlashInfer."""

from __future__ import annotations

import pytest
import torch

from mla_core.errors import ContractError
from plugins.flashinfer.tests import fake_flashinfer
from plugins.flashinfer.tests.calls import SCALE, TOLERANCE, Ragged, context, error


@pytest.fixture
def backend(fake):
    return fake.backend.FlashInfer(context(kernels={"mha_prefill"}))


@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [
        ((5, 1, 4), (5, 1, 4), True),
        ((5, 1, 4), (7, 9, 4), True),
        ((3, 5), (7, 2), False),
        ((4, 2), (2, 3), True),
        ((3, 2, 4), (4, 0, 5), False),
        ((0, 3, 0, 2, 0), (0, 3, 4, 5, 0), True),
        ((2, 3), (0, 3), True),
    ],
)
def test_packed_requests_give_the_right_rows(backend, queries, keys, causal):
    call = Ragged(queries, keys, causal=causal)
    assert error(call.run(backend), call.expected()) < TOLERANCE


def test_a_mask_that_is_not_there_is_noticed(backend):
    call = Ragged((5, 4), (5, 6))
    expected = call.expected()
    call.causal = False
    assert error(call.run(backend), expected) > TOLERANCE


def test_an_lse_in_base_two_is_noticed(backend, monkeypatch):
    call = Ragged((5, 4), (5, 6))
    honest = fake_flashinfer.RaggedWrapper.run

    def binary(self, *tensors, **options):
        honest(self, *tensors, **{**options, "lse_base": "log2"})

    monkeypatch.setattr(fake_flashinfer.RaggedWrapper, "run", binary)
    assert error(call.run(backend), call.expected()) > TOLERANCE


def test_rows_that_see_nothing_at_all_need_no_kernel(backend, fake):
    out, lse = Ragged((2, 1), (0, 0), causal=False).run(backend)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))
    assert fake.calls["run ragged"] == 0


@pytest.mark.parametrize(("queries", "keys"), [((), ()), ((0, 0), (0, 3))])
def test_nothing_to_do_calls_nothing(backend, fake, queries, keys):
    out, _ = Ragged(queries, keys).run(backend)
    assert (len(out), fake.calls["plan ragged"]) == (0, 0)


def test_the_plan_is_made_once_a_step_and_used_by_every_layer(backend, fake):
    call = Ragged((5, 1), (5, 3))
    segments = call.segments()
    segments.meta = backend.prepare("mha_prefill", segments, None)
    for _ in range(3):
        out, lse = call.outputs()
        backend.mha(call.q_THE, call.k_SHE, call.v_SHV, segments, SCALE, out, lse)
    assert (fake.calls["plan ragged"], fake.calls["run ragged"]) == (1, 3)


def test_output_is_right_without_lse(backend):
    call = Ragged((5, 1), (5, 3))
    segments, (out, _) = call.segments(), call.outputs()
    segments.meta = backend.prepare("mha_prefill", segments, None)
    backend.mha(call.q_THE, call.k_SHE, call.v_SHV, segments, SCALE, out, None)
    expected = call.expected()
    assert error((out, expected[1]), expected) < TOLERANCE


def test_strided_tensors_are_handled(backend):
    call = Ragged((5, 1), (5, 3))
    segments = call.segments()
    segments.meta = backend.prepare("mha_prefill", segments, None)

    def spread(x):
        wide = torch.full((2 * x.shape[0], x.shape[1] + 2, x.shape[2] + 5), torch.nan).bfloat16()
        return wide[1::2, 1:-1, 3:-2].copy_(x)

    out, lse = spread(call.outputs()[0]), torch.full((6, 8), torch.nan)[:, ::2]
    backend.mha(spread(call.q_THE), spread(call.k_SHE), spread(call.v_SHV), segments, SCALE, out, lse)
    assert error((out, lse), call.expected()) < TOLERANCE


def test_values_beside_their_keys_are_read_in_place(backend):
    call = Ragged((5, 1), (5, 3))
    both = torch.cat([torch.full_like(call.v_SHV, torch.nan), call.v_SHV], dim=-1)
    call.v_SHV = both[..., call.v_SHV.shape[2] :]
    assert error(call.run(backend), call.expected()) < TOLERANCE


def test_another_softmax_scale_than_planned_is_an_error(backend):
    call = Ragged((5,), (5,))
    segments, (out, lse) = call.segments(), call.outputs()
    segments.meta = backend.prepare("mha_prefill", segments, None)
    with pytest.raises(ContractError, match="softmax scale"):
        backend.mha(call.q_THE, call.k_SHE, call.v_SHV, segments, 2 * SCALE, out, lse)


def test_a_plan_is_kept_while_its_host_memory_is_being_copied(backend, monkeypatch):
    monkeypatch.setattr(fake_flashinfer.Event, "query", lambda self: False)
    call = Ragged((5,), (5,))
    plans = [backend.prepare("mha_prefill", call.segments(), None) for _ in range(3)]
    kept = [wrapper for _, wrapper in backend._ragged._copying]
    assert kept == [plan.wrapper for plan in plans]


def test_a_plan_whose_copy_has_ended_is_let_go(backend):
    call = Ragged((5,), (5,))
    plans = [backend.prepare("mha_prefill", call.segments(), None) for _ in range(3)]
    assert [wrapper for _, wrapper in backend._ragged._copying] == [plans[-1].wrapper]
