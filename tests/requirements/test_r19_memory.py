"""R19: prefill over a cached prefix stays within the workspace, and the plan says how many bytes that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mla_core import MLA, Batch
from tests import fakes
from tests.support import build, random_hidden, tiny_config

CHUNK = 1024
# Longer than one token, so that it is prefill, and short, so that its own memory hardly counts.
NEW = 2
PAGE = 64


def dims(heads: int, latent: int, nope: int, rope: int, value: int) -> dict[str, int]:
    return {
        "hidden_size": 8,
        "q_lora_rank": 8,
        "num_heads": heads,
        "kv_lora_rank": latent,
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
    }


SHAPES = {
    "deepseek": dims(8, 64, 32, 16, 32),
    "glm": dims(4, 64, 48, 16, 64),
    "one_head": dims(1, 512, 128, 64, 128),
}


class NoScratch(fakes.Counting):
    """Its expanded kernel takes no memory at all; the core's is what is left to measure."""

    def mha(self, q: Any, k: Any, v: Any, segments: Any, scale: float, out: Any, lse: Any) -> None:
        out.zero_()
        if lse is not None:
            lse.zero_()


class Hoarder(NoScratch):
    """Keeps the keys and values of every chunk."""

    def mha(self, q: Any, k: Any, v: Any, *rest: Any) -> None:
        self.kept = [*getattr(self, "kept", []), k, v]
        super().mha(q, k, v, *rest)


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    layouts = dict.fromkeys(("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_ds_mla"), fakes.ANY)
    layouts["nvfp4"] = fakes.IntSet.exact(64)
    with (
        fakes.registered("no_scratch", NoScratch, layouts=layouts),
        fakes.registered("hoarder", Hoarder, layouts=layouts),
    ):
        yield


def peak(run: Callable[[], object]) -> int:
    """Most bytes that were allocated at once during a call, those of kernels included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert events, "the profiler saw no allocation"
    live = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def step_peak(layer: MLA, context: int) -> int:
    pages = -(-(context + NEW) // PAGE)
    step = layer.prepare(
        Batch.build([NEW], [context], [list(range(pages))], PAGE), layer.new_cache(pages, PAGE)
    )
    hidden_TD = random_hidden(NEW, layer.config, 0, layer.dtype)
    return peak(lambda: layer(hidden_TD, step))


def growth(layer: MLA, context: int) -> int:
    """What a cached prefix adds to a step's memory."""
    return step_peak(layer, context) - step_peak(layer, 0)


def layer_of(shape: str, **options: Any) -> MLA:
    return build(tiny_config(**SHAPES[shape]), **{"workspace_tokens": CHUNK, **options})


CASES = [
    *[(shape, dtype, "auto") for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)],
    ("deepseek", torch.bfloat16, "fp8_e4m3"),
    ("deepseek", torch.float32, "nvfp4"),
    ("one_head", torch.bfloat16, "fp8_ds_mla"),
    ("one_head", torch.bfloat16, "nvfp4"),
]


@pytest.mark.parametrize("backend", ["no_scratch", "vanilla"])
@pytest.mark.parametrize(("shape", "dtype", "cache"), CASES)
def test_the_stated_bytes_cover_the_measured_peak_and_at_most_half_as_much_again(
    shape, dtype, cache, backend
):
    layer = layer_of(shape, dtype=dtype, cache=cache, backend=backend)
    measured, stated = growth(layer, 2 * CHUNK), layer.plan.workspace_bytes
    assert measured <= stated <= 1.5 * measured, (measured, stated, stated / measured)


def test_keys_and_values_of_two_chunks_at_once_would_be_noticed():
    layer = layer_of("deepseek", backend="hoarder")
    assert growth(layer, 2 * CHUNK) > 1.2 * layer.plan.workspace_bytes


@pytest.mark.parametrize("backend", ["no_scratch", "vanilla"])
def test_the_peak_does_not_depend_on_the_length_of_the_context(backend):
    layer = layer_of("deepseek", backend=backend)
    assert growth(layer, 4 * CHUNK) == pytest.approx(growth(layer, CHUNK), rel=0.01)


def test_a_workspace_as_long_as_the_context_would_let_the_peak_grow_with_it():
    small, large = layer_of("deepseek"), layer_of("deepseek", workspace_tokens=4 * CHUNK)
    assert growth(large, 4 * CHUNK) > 3 * growth(small, 4 * CHUNK)


def test_the_stated_bytes_follow_the_workspace():
    half, whole = (layer_of("deepseek", workspace_tokens=tokens) for tokens in (CHUNK // 2, CHUNK))
    assert whole.plan.workspace_bytes == 2 * half.plan.workspace_bytes
