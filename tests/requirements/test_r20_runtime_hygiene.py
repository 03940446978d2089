"""R20: inputs may be views and stay as they are; threads, layers and processes do not meet by accident."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import mla_vanilla.attention
from mla_core import MLA, Batch, LatentCache, MhaSegments
from mla_core.config import GateConfig
from mla_core.errors import BatchError, CacheError, ContractError
from mla_core.reference import attention_layer
from tests.support import (
    SCENARIOS,
    TOLERANCE,
    World,
    build,
    poisoned_cache,
    random_hidden,
    random_weights,
    relative_error,
    tiny_config,
)

FIELDS = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "positions")


def every_second(x: Tensor) -> Tensor:
    """The same values with strides of 2 in every dim, and nonsense in between."""
    spread = torch.full([2 * size for size in x.shape], 77, dtype=x.dtype)
    view = spread[tuple(slice(0, 2 * size, 2) for size in x.shape)]
    view.copy_(x)
    return view


def column_major(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def inside_larger(x: Tensor) -> Tensor:
    larger = torch.full([size + 3 for size in x.shape], 77, dtype=x.dtype)
    view = larger[tuple(slice(2, 2 + size) for size in x.shape)]
    view.copy_(x)
    return view


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "every_second": every_second,
    "column_major": column_major,
    "inside_larger": inside_larger,
}


def with_views(batch: Batch, view: Callable[[Tensor], Tensor]) -> Batch:
    return Batch(**{name: view(getattr(batch, name)) for name in FIELDS})


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scenario", ["chunked_prefill", "absorbed_context", "mixed"])
def test_hidden_states_and_all_metadata_may_be_strided_views(scenario, view, monkeypatch):
    config = tiny_config(gate=GateConfig(kind="per_head"))
    world = SCENARIOS[scenario].world(config, weights=random_weights(config))
    hidden, batch = world.hidden, world.batch
    monkeypatch.setattr(world, "hidden", lambda *arguments: VIEWS[view](hidden(*arguments)))
    monkeypatch.setattr(world, "batch", lambda *arguments: with_views(batch(*arguments), VIEWS[view]))
    assert world.errors(SCENARIOS[scenario].steps) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", ["hidden", "slot_mapping", "positions", "block_table"])
def test_a_misread_view_is_noticed(name, monkeypatch):
    """What a kernel would see that ignored a stride: each value twice, half of them never."""
    world = SCENARIOS["cached_prefix"].world(tiny_config())
    hidden, batch = world.hidden, world.batch

    def misread(x: Tensor) -> Tensor:
        return x.flatten().repeat_interleave(2)[: x.numel()].view(x.shape)

    def misread_field(*arguments: Any) -> Batch:
        honest = batch(*arguments)
        fields = {field: getattr(honest, field) for field in FIELDS}
        return Batch(**fields | {name: misread(fields[name])})

    if name == "hidden":
        monkeypatch.setattr(world, "hidden", lambda *arguments: misread(hidden(*arguments)))
    else:
        monkeypatch.setattr(world, "batch", misread_field)
    assert world.errors(SCENARIOS["cached_prefix"].steps) > 1e-2


@pytest.mark.parametrize("view", ["every_second", "inside_larger"])
def test_the_views_of_these_tests_are_views_and_hold_the_same_values(view):
    x = torch.arange(6).reshape(2, 3)
    assert torch.equal(VIEWS[view](x), x)
    assert not VIEWS[view](x).is_contiguous()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_step_writes_into_no_input(scenario):
    config = tiny_config(gate=GateConfig(kind="elementwise"), query_scaling={"beta": 0.3, "floor_scale": 2})
    world = SCENARIOS[scenario].world(config, weights=random_weights(config))
    for counts in SCENARIOS[scenario].steps:
        batch, hidden_TD = world.batch(counts), world.hidden(counts)
        inputs = [hidden_TD, *(getattr(batch, name) for name in FIELDS)]
        before = [x.clone() for x in inputs]
        world.layer(hidden_TD, world.layer.prepare(batch, world.cache))
        assert all(torch.equal(a, b) for a, b in zip(inputs, before, strict=True))
        world.outputs(counts)


def test_running_a_step_again_gives_the_same_bits_and_changes_no_weight():
    world = SCENARIOS["mixed"].world(tiny_config())
    counts = SCENARIOS["mixed"].steps[0]
    weights = {name: value.clone() for name, value in world.layer.state_dict().items()}
    step, hidden_TD = world.layer.prepare(world.batch(counts), world.cache), world.hidden(counts)
    assert torch.equal(world.layer(hidden_TD, step), world.layer(hidden_TD, step))
    assert all(torch.equal(weights[name], value) for name, value in world.layer.state_dict().items())


def test_the_output_is_fresh_memory():
    world = SCENARIOS["context"].world(tiny_config())
    step, hidden_TD = world.layer.prepare(world.batch([(0, 5)]), world.cache), world.hidden([(0, 5)])
    first = world.layer(hidden_TD, step)
    kept = first.clone()
    first.fill_(torch.nan)
    assert torch.equal(world.layer(hidden_TD, step), kept)


def run_alone(layer: MLA, seed: int) -> float:
    """A whole scenario on a cache of its own."""
    return World(layer, SCENARIOS["mixed"].lengths, seed=seed).errors(SCENARIOS["mixed"].steps)


def test_two_layers_run_in_two_threads():
    layers = [build(tiny_config(), **SCENARIOS["mixed"].options) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        errors = list(threads.map(run_alone, layers * 6, range(12)))
    assert max(errors) < TOLERANCE[torch.float32]


def test_one_layer_serves_several_threads_with_caches_of_their_own():
    layer = build(tiny_config(), **SCENARIOS["mixed"].options)
    with ThreadPoolExecutor(4) as threads:
        errors = list(threads.map(run_alone, [layer] * 12, range(12)))
    assert max(errors) < TOLERANCE[torch.float32]


def test_several_threads_may_build_the_first_layer_together():
    with ThreadPoolExecutor(4) as threads:
        layers = list(threads.map(lambda index: build(tiny_config(), layer_idx=index), range(8)))
    assert {layer.signature for layer in layers} == {layers[0].signature}
    assert run_alone(layers[5], 0) < TOLERANCE[torch.float32]


def stack(count: int, **options: Any) -> tuple[list[MLA], list[dict[str, Tensor]]]:
    """Layers of one model with weights of their own."""
    weights = [random_weights(tiny_config(), seed) for seed in range(count)]
    return [build(tiny_config(), known, layer_idx=i, **options) for i, known in enumerate(weights)], weights


def test_layers_of_one_model_share_a_step_through_a_pool():
    """Each layer's output is the next one's input, as in a model without anything else."""
    layers, weights = stack(3, max_decode_query_len=2, workspace_tokens=3)
    world = World(layers[0], [11, 6])
    pool = layers[0].new_pool(3, world.cache.num_pages, 4)
    expected = [request.hidden_SD.double() for request in world.requests]
    for known in weights:
        expected = [attention_layer(tiny_config(), known, hidden).hidden_SD for hidden in expected]
    for counts in ([(0, 7)], [(1, 4), (0, 3)], [(0, 1), (1, 2)]):
        step = layers[1].prepare(world.batch(counts), pool)
        x = world.hidden(counts)
        for layer in layers:
            x = layer(x, step)
        for (request, count), out in zip(counts, x.split([count for _, count in counts]), strict=True):
            start = world.requests[request].done
            assert relative_error(out, expected[request][start : start + count]) < 1e-4
            world.requests[request].done += count


def test_a_pools_layers_do_not_write_into_each_others_pages():
    layers, _ = stack(2)
    pool = layers[0].new_pool(2, 4, 4)
    world = World(layers[0], [5])
    layers[0](world.hidden([(0, 5)]), layers[0].prepare(world.batch([(0, 5)]), pool))
    assert pool.layer(0).data.abs().sum() > 0
    assert pool.layer(1).data.abs().sum() == 0


def test_a_step_of_a_layer_built_otherwise_is_refused():
    layer, other = build(tiny_config()), build(tiny_config(), workspace_tokens=5)
    world = World(layer, [5])
    step = other.prepare(world.batch([(0, 5)]), world.cache)
    with pytest.raises(ContractError, match="another plan, config, cache layout or workspace"):
        layer(world.hidden([(0, 5)]), step)


def test_a_step_over_another_layers_cache_is_refused_with_both_indices():
    layers, _ = stack(2)
    world = World(layers[0], [5])
    step = layers[0].prepare(world.batch([(0, 5)]), layers[0].new_cache(5, 4))
    with pytest.raises(CacheError, match=r"made for layer 0, not layer 1.*CachePool"):
        layers[1](world.hidden([(0, 5)]), step)


def test_a_pool_without_the_layer_is_refused_with_what_it_holds():
    layer = build(tiny_config(), layer_idx=4)
    world = World(layer, [5])
    with pytest.raises(CacheError, match=r"holds layers \[0, 1\], not layer 4"):
        layer.prepare(world.batch([(0, 5)]), layer.new_pool(2, 5, 4))


def test_a_cache_for_any_layer_serves_any_layer():
    layer = build(tiny_config(), layer_idx=4)

    def unnamed(layer: MLA, num_pages: int, page_size: int) -> LatentCache:
        return LatentCache.from_tensor(
            poisoned_cache(layer, num_pages, page_size).data, layer.layout, page_size
        )

    world = World(layer, [9], make_cache=unnamed)
    assert world.errors([[(0, 5)], [(0, 1)]]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_layer_runs_in_every_gradient_mode(context):
    with context():
        assert SCENARIOS["mixed"].error(tiny_config()) < TOLERANCE[torch.float32]


def test_hidden_states_that_want_gradients_are_refused():
    world = SCENARIOS["context"].world(tiny_config())
    step = world.layer.prepare(world.batch([(0, 5)]), world.cache)
    with pytest.raises(ContractError, match=r"for inference only.*no_grad"):
        world.layer(world.hidden([(0, 5)]).requires_grad_(), step)
    with torch.no_grad():
        world.layer(world.hidden([(0, 5)]).requires_grad_(), step)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_the_process_does_not_matter(dtype):
    before = torch.get_default_dtype()
    config = tiny_config(query_scaling={"beta": 0.3, "floor_scale": 2})
    world = SCENARIOS["mixed"].world(config, weights=random_weights(config))
    torch.set_default_dtype(dtype)
    try:
        layer = MLA(config, backend="vanilla", dtype=torch.float32, **SCENARIOS["mixed"].options)
        layer.load_hf(world.weights)
        world.layer = layer
        assert world.errors(SCENARIOS["mixed"].steps) < TOLERANCE[torch.float32]
    finally:
        torch.set_default_dtype(before)


def all_in_16_bits(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float) -> Any:
    """The negative control: scores and softmax rounded to the dtype of the queries."""
    scores = q @ k.transpose(1, 2) * scale
    return scores.softmax(dim=-1) @ v, scores.logsumexp(dim=-1).float()


def attention_over_neighbouring_scores(dtype: torch.dtype) -> tuple[float, float]:
    """(output, lse) of one query over two keys with scores 2048 and 2049 and values 0 and 1.

    Both scores are exact sums of exact products, and 16 bits cannot tell them apart.
    """
    q_THE = torch.tensor([[[64.0, 1.0]]], dtype=dtype)
    k_SHE = torch.tensor([[[32.0, 0.0]], [[32.0, 1.0]]], dtype=dtype)
    v_SHV = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]], dtype=dtype)
    out_THV, lse_TH = torch.empty(1, 1, 2, dtype=dtype), torch.empty(1, 1)
    starts = torch.tensor([0, 1]), torch.tensor([0, 2])
    segments = MhaSegments(*starts, (1,), (2,), causal=False)
    layer = build(tiny_config())
    layer.kernels.mha.mha(q_THE, k_SHE, v_SHV, segments, 1.0, out_THV, lse_TH)
    return float(out_THV[0, 0, 0]), float(lse_TH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_scores_softmax_and_lse_of_16_bit_layers_are_float32(dtype, monkeypatch):
    expected = pytest.approx((1 / (1 + math.exp(-1)), 2049 + math.log(1 + math.exp(-1))), abs=2e-3)
    assert attention_over_neighbouring_scores(dtype) == expected
    monkeypatch.setattr(mla_vanilla.attention, "_on_cpu", all_in_16_bits)
    assert attention_over_neighbouring_scores(dtype)[0] == 0.5


@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(4, 40, torch.float32), (5, 41, torch.float32), (5, 40, torch.float16)]
)
def test_hidden_states_that_do_not_fit_the_step_are_refused_with_both_shapes(rows, width, dtype):
    world = SCENARIOS["context"].world(tiny_config())
    step = world.layer.prepare(world.batch([(0, 5)]), world.cache)
    wanted = rf"must be \[5, 40\] of torch.float32.*got \[{rows}, {width}\] of {dtype}"
    with pytest.raises(ContractError, match=wanted):
        world.layer(torch.zeros(rows, width, dtype=dtype), step)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda layer: layer.new_cache(2, 0), CacheError, "page_size must be at least 1, got 0"),
        (lambda layer: layer.new_cache(-1, 4), CacheError, "num_pages >= 0.*got -1"),
        (lambda layer: layer.new_pool(0, 2, 4), CacheError, "at least one layer"),
        (lambda layer: Batch.build([1], [0, 0], [[0]], 4), BatchError, "1 requests but context_lens has 2"),
        (lambda layer: Batch.build([-1], [0], [[0]], 4), BatchError, r"query_lens\[0\] is -1"),
    ],
    ids=["page_size", "num_pages", "layers", "counts", "negative"],
)
def test_errors_name_the_parameter_and_the_value(make, error, message):
    with pytest.raises(error, match=message):
        make(build(tiny_config()))


def test_results_do_not_depend_on_the_number_of_threads_beyond_rounding():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert SCENARIOS["mixed"].error(tiny_config()) < TOLERANCE[torch.float32]
    finally:
        torch.set_num_threads(before)


def test_a_layer_leaves_torchs_random_state_alone():
    hidden_TD = random_hidden(5, tiny_config(), 0)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    layer = build(tiny_config())
    batch = Batch.build([5], [0], [[0, 1]], 4)
    layer(hidden_TD, layer.prepare(batch, layer.new_cache(2, 4)))
    assert torch.equal(torch.rand(1), expected)
