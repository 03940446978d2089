"""The backend as a layer meets it: refusals when it is built, and whole layers over a fake FlashInfer."""

from __future__ import annotations

import sys

import pytest
import torch

from mla_core import MLA, Batch, DeviceInfo, MLAConfig, UnsupportedError, registry
from mla_core.errors import BrokenPlugin
from mla_core.registry import Registry
from mla_flashinfer.manifest import INFO
from plugins.flashinfer.tests.calls import context
from tests import support

CONFIG = MLAConfig(
    hidden_size=48,
    num_heads=3,
    q_lora_rank=24,
    kv_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
STEPS = ([(0, 9), (1, 5)], [(2, 7), (0, 1)], [(1, 2), (0, 3), (2, 1)])


@pytest.fixture
def listed(monkeypatch):
    """A registry with this backend beside the installed ones, which takes the CPU for a Hopper GPU."""
    known = Registry(environ={})
    known.add(INFO, override=True)
    monkeypatch.setattr(registry, "_default", known)
    hopper = DeviceInfo(kind="cuda", arch="sm_90a")
    monkeypatch.setattr("mla_core.layer.device_info", lambda device: hopper)
    return known


def layer_error(backend: str) -> float:
    """The worst request's error over prefill, a chunked prefix, decode and verification."""
    options = {"backend": backend, "dtype": torch.bfloat16, "workspace_tokens": 4, "max_decode_query_len": 3}
    world = support.World(support.build(CONFIG, **options), (13, 7, 8))
    return world.errors(STEPS)


def test_a_backend_built_for_a_device_it_does_not_serve_refuses(fake):
    with pytest.raises(UnsupportedError) as refusal:
        fake.backend.FlashInfer(context(device="cpu"))
    assert [reason.field for reason in refusal.value.reasons] == ["device"]


def test_a_backend_refuses_where_kernels_cannot_be_compiled(fake, toolkit):
    toolkit.unlink()
    with pytest.raises(UnsupportedError) as refusal:
        fake.backend.FlashInfer(context())
    assert [reason.field for reason in refusal.value.reasons] == ["nvcc"]


def test_the_option_decides_the_implementation(fake):
    assert fake.backend.FlashInfer(context()).engine == "fa3"
    assert fake.backend.FlashInfer(context(options={"impl": "fa2"})).engine == "fa2"


def test_an_implementation_the_device_lacks_is_refused_when_the_backend_is_built(fake):
    with pytest.raises(UnsupportedError, match="impl=fa3"):
        fake.backend.FlashInfer(context(device="cuda:sm_80", options={"impl": "fa3"}))


@pytest.mark.parametrize(
    "backend",
    [
        "flashinfer",
        "flashinfer[impl=fa2]",
        "prefill=flashinfer;decode=vanilla",
        "prefill=vanilla;decode=flashinfer",
    ],
)
def test_a_whole_layer_gives_the_right_hidden_states(fake, listed, backend):
    assert layer_error(backend) < support.TOLERANCE[torch.bfloat16]
    assert fake.calls["run paged"] + fake.calls["run ragged"] > 0


def test_a_layer_whose_absorbed_prefill_runs_here_is_right(fake, listed):
    options = {"backend": "flashinfer", "dtype": torch.bfloat16, "prefill_form": "absorb"}
    world = support.World(support.build(CONFIG, **options), (13, 7, 8))
    assert world.errors(STEPS[:1]) < support.TOLERANCE[torch.bfloat16]


def test_a_refreshed_graph_step_of_a_layer_gives_the_rows_of_an_ordinary_one(fake, listed):
    options = {"dtype": torch.bfloat16, "max_decode_query_len": 2}
    graph = support.build(CONFIG, backend="flashinfer", cuda_graph="decode", **options)
    plain = support.build(CONFIG, backend="vanilla", **options)
    caches = [layer.new_cache(9, 4) for layer in (graph, plain)]
    for cache in caches:
        cache.data.normal_(generator=torch.Generator().manual_seed(1))
    table = torch.tensor([[3, 1, 7], [0, 8, 2], [5, 4, 6]])
    step = None
    for queries, contexts in (([1, 1], [3, 7]), ([1, 2, 1], [9, 3, 5]), ([2], [6])):
        padded = Batch.build(queries, contexts, table[: len(queries)], 4, max_tokens=5, max_requests=3)
        if step is None:
            step = graph.prepare(padded, caches[0], graph=True)
        else:
            graph.refresh(step, padded)
        live = sum(queries)
        hidden = support.random_hidden(5, CONFIG, seed=live, dtype=torch.bfloat16)
        hidden[live:] = torch.nan
        actual = graph(hidden, step)
        batch = Batch.build(queries, contexts, table[: len(queries)], 4)
        expected = plain(hidden[:live], plain.prepare(batch, caches[1]))
        assert support.relative_error(actual[:live], expected) < support.TOLERANCE[torch.bfloat16]
        assert int(actual[live:].count_nonzero()) == 0
    assert fake.calls["paged fa3"] == 1


def test_another_softmax_scale_is_noticed(fake, listed):
    options = {"backend": "flashinfer", "dtype": torch.bfloat16}
    layer = support.build(CONFIG.model_copy(update={"softmax_scale_override": 0.2}), **options)
    world = support.World(layer, (13, 7, 8))
    world.config = CONFIG
    assert world.errors(STEPS[:1]) > support.TOLERANCE[torch.bfloat16]


def test_a_flashinfer_that_does_not_import_is_broken_when_named(monkeypatch, versions, toolkit, listed):
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    for module in ("backend", "library", "paged", "ragged"):
        monkeypatch.delitem(sys.modules, f"mla_flashinfer.{module}", raising=False)
    with pytest.raises(BrokenPlugin, match=r"flashinfer\.mla"):
        MLA(CONFIG, backend="flashinfer")


def test_a_flashinfer_that_does_not_import_harms_no_other_backend(monkeypatch, versions, toolkit, listed):
    monkeypatch.setitem(sys.modules, "flashinfer.mla", None)
    layer = MLA(CONFIG, backend="vanilla", dtype=torch.float32)
    assert layer.plan.choices["mqa"] == "vanilla"
    assert listed.info("flashinfer").name == "flashinfer"


def test_without_a_compiler_the_next_backend_of_a_chain_serves(fake, listed, toolkit):
    toolkit.unlink()
    layer = MLA(CONFIG, backend="flashinfer|vanilla")
    assert layer.plan.choices["mqa"] == "vanilla"
    refused = [row for row in layer.plan.rejected if row.backend == "flashinfer"]
    assert "nvcc" in {reason.field for row in refused for reason in row.reasons}
