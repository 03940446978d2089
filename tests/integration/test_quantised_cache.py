"""The layer over a quantised cache, on every path.

The oracle sees what the cache holds, decoded from its bytes apart from the package, so the tolerance is that
of the arithmetic and not that of the format. Memory that no token owns is NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from mla_core import MLA, LatentCache, MLAConfig, Scales, UnsupportedError
from mla_core.errors import CacheError
from mla_core.reference import cached_layer
from tests.byte_rows import cached_rows
from tests.support import TOLERANCE, Counts, World, build, relative_error, tiny_config

# Layout to the widths, the page size, the unit that lengths are counted in, and scales other than 1.
GROUPED = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
DEEPSEEK = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
CASES = {
    "fp8_e4m3": (GROUPED, 4, 1, {"k_scale": 0.011}),
    "fp8_ds_mla": (DEEPSEEK, 4, 1, {}),
    "nvfp4": (GROUPED, 64, 12, {"global_scale": 0.0037}),
    "nvfp4_rope_bf16": (GROUPED, 64, 12, {"global_scale": 0.0037}),
}
# Relative size of the error that each layout makes of random rows: from, to.
FORMAT_ERROR = {
    "fp8_e4m3": (0.01, 0.04),
    "fp8_ds_mla": (0.01, 0.04),
    "nvfp4": (0.05, 0.13),
    "nvfp4_rope_bf16": (0.04, 0.13),
}

# Each path's steps: (request, units of new tokens); 1, 2 and 4 in a row of their own are tokens.
LENGTHS = (22, 14, 9)
PATHS = {
    "prefill": ([[(0, 13)]], {}),
    "chunked_prefill": ([[(0, 9), (1, 5)], [(1, 5), (0, 8)]], {"workspace_tokens": 4}),
    "absorbed_prefill": ([[(0, 9), (1, 5)], [(1, 5), (0, 8)]], {"prefill_form": "absorb"}),
    "decode": ([[(0, 9), (1, 5)], [(1, "1"), (0, "1")], [(0, "1"), (1, "1")]], {}),
    "verify": ([[(0, 9), (1, 5)], [(1, "2"), (0, "4")], [(0, "4")]], {"max_decode_query_len": 4}),
    "mixed": (
        [[(1, 5), (2, 7)], [(2, "1"), (0, 9), (1, "3")], [(1, 6), (0, "1")]],
        {"max_decode_query_len": 3, "workspace_tokens": 5},
    ),
}


class QuantisedWorld(World):
    """Requests that advance through a quantised cache, judged step by step on what it holds."""

    def step_error(self, counts: Counts) -> float:
        """Advance in one step; the worst request's error against the oracle that reads the cache's bytes."""
        before = [(request, self.requests[request].done) for request, _ in counts]
        cached = [self.rows(request, 0, done) for request, done in before]
        outs = self.outputs(counts)
        return max(
            self._judge(request, done, rows, out)
            for (request, done), rows, out in zip(before, cached, outs, strict=True)
        )

    def rows(self, request: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Tokens [start, end) of a request as the cache holds them."""
        latent, rope = cached_rows(self.cache, self.requests[request].pages, end)
        return latent[start:], rope[start:]

    def _judge(self, request: int, start: int, cached: tuple[Tensor, Tensor], out_TD: Tensor) -> float:
        end = start + len(out_TD)
        own = self.rows(request, start, end) if self._reads_back(len(out_TD)) else None
        hidden = self.requests[request].hidden_SD[start:end]
        expected = cached_layer(self.layer.config, self.weights, hidden, *cached, start, own_rows=own)
        return relative_error(out_TD, expected.hidden_SD)

    def _reads_back(self, tokens: int) -> bool:
        """Absorbed attention reads new tokens from the cache, expanded attention sees them as they are."""
        absorbed_prefill = self.layer.request.prefill_form == "absorb"
        return absorbed_prefill or tokens <= self.layer.max_decode_query_len


def config_of(layout_id: str) -> MLAConfig:
    return tiny_config(**CASES[layout_id][0])


def world(layout_id: str, path: str, dtype: torch.dtype = torch.float32, **scales: float) -> QuantisedWorld:
    _, page_size, unit, usual = CASES[layout_id]
    options = dict(PATHS[path][1])
    if "workspace_tokens" in options:
        options["workspace_tokens"] *= unit
    layer = build(config_of(layout_id), cache=layout_id, dtype=dtype, **options)

    def hostile_cache(layer: MLA, num_pages: int, page_size: int) -> LatentCache:
        cache = layer.new_cache(num_pages, page_size, **(scales or usual))
        cache.data.view(torch.uint8).fill_(0xFF)
        return cache

    lengths = [length * unit for length in LENGTHS]
    return QuantisedWorld(layer, lengths, page_size=page_size, make_cache=hostile_cache)


def steps(layout_id: str, path: str) -> list[Counts]:
    unit = CASES[layout_id][2]
    return [
        [(request, int(new) if isinstance(new, str) else new * unit) for request, new in step]
        for step in PATHS[path][0]
    ]


def worst(world: QuantisedWorld, steps: Sequence[Counts]) -> float:
    return max(world.step_error(counts) for counts in steps)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout_id", CASES)
def test_outputs_are_those_of_the_oracle_on_the_decoded_cache(layout_id, path):
    assert worst(world(layout_id, path), steps(layout_id, path)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout_id", CASES)
def test_sixteen_bit_layers_read_the_same_cache(layout_id, dtype):
    assert worst(world(layout_id, "mixed", dtype), steps(layout_id, "mixed")) <= TOLERANCE[dtype]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("k_scale", [1.0, 0.37, 2.0**-9])
def test_the_descale_acts_on_scores_and_values_of_every_path(path, k_scale):
    assert worst(world("fp8_e4m3", path, k_scale=k_scale), steps("fp8_e4m3", path)) <= 1e-5


@pytest.mark.parametrize("path", [path for path in PATHS if path != "prefill"])
@pytest.mark.parametrize(
    ("layout_id", "scale"), [("fp8_e4m3", "k_scale"), ("nvfp4", "global_scale"), ("nvfp4", "page")]
)
def test_a_reader_that_is_one_percent_or_one_page_off_is_noticed(layout_id, scale, path):
    off = world(layout_id, path)
    first, *later = steps(layout_id, path)
    off.step_error(first)
    if scale == "page":
        off.distort = lambda table: table.roll(1, dims=1).clamp(0, off.cache.num_pages - 1)
    else:
        wrong = 1.01 * getattr(off.cache.scales, scale)
        honest, off.cache.scales = off.cache.scales, dataclasses.replace(off.cache.scales, **{scale: wrong})
        off.rows = lambda *where: _with_scales(off, honest, where)
    assert worst(off, later) > 100 * TOLERANCE[torch.float32]


def _with_scales(world: QuantisedWorld, scales: Scales, where: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """What the bytes mean under the scales they were written with."""
    current, world.cache.scales = world.cache.scales, scales
    rows = QuantisedWorld.rows(world, *where)
    world.cache.scales = current
    return rows


@pytest.mark.parametrize("layout_id", CASES)
def test_an_oracle_that_sees_exact_rows_is_further_away(layout_id):
    """The oracle's rows matter: what the format loses is far above the tolerance."""
    loose = world(layout_id, "decode")
    loose._reads_back = lambda tokens: False
    assert worst(loose, steps(layout_id, "decode")) > 100 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("layout_id", CASES)
def test_the_cache_holds_the_exact_rows_up_to_the_formats_error(layout_id):
    filled = world(layout_id, "prefill")
    (counts,) = steps(layout_id, "prefill")
    filled.outputs(counts)
    exact = filled.expected(0)
    tokens = counts[0][1]
    stored = torch.cat(filled.rows(0, 0, tokens), dim=1)
    rows = torch.cat([exact.latent_SL[:tokens], exact.k_rope_SR[:tokens]], dim=1)
    low, high = FORMAT_ERROR[layout_id]
    assert low <= float((stored - rows).norm() / rows.norm()) <= high


@pytest.mark.parametrize("path", ["chunked_prefill", "decode"])
def test_a_scale_too_small_saturates_and_stays_finite(path):
    clipped = world("fp8_e4m3", path, k_scale=2.0**-9)
    error = worst(clipped, steps("fp8_e4m3", path))
    latent, rope = clipped.rows(0, 0, clipped.requests[0].done)
    largest = 448 * 2.0**-9
    assert max(latent.abs().max(), rope.abs().max()) == largest, "nothing was clipped"
    assert error <= TOLERANCE[torch.float32]


def test_a_scale_leaves_an_unquantised_cache_alone():
    def outputs(k_scale: float) -> Tensor:
        config = tiny_config()
        layer = build(config, cache="bf16")
        requests = World(
            layer, [9], make_cache=lambda layer, pages, size: layer.new_cache(pages, size, k_scale=k_scale)
        )
        return torch.cat([requests.outputs(counts)[0] for counts in ([(0, 5)], [(0, 3)], [(0, 1)])])

    assert torch.equal(outputs(0.05), outputs(1.0))


def test_calibrated_scales_bring_the_fp8_cache_closest_to_the_exact_one():
    def error(k_scale: float) -> float:
        filled = world("fp8_e4m3", "prefill", k_scale=k_scale)
        filled.outputs([(0, 13)])
        exact = filled.expected(0)
        stored = torch.cat(filled.rows(0, 0, 13), dim=1)
        rows = torch.cat([exact.latent_SL[:13], exact.k_rope_SR[:13]], dim=1)
        return float((stored - rows).norm() / rows.norm())

    exact = world("fp8_e4m3", "prefill").expected(0)
    layout = world("fp8_e4m3", "prefill").layer.layout
    calibrated = layout.calibrate(exact.latent_SL, exact.k_rope_SR).k_scale
    assert error(calibrated) <= 0.04
    assert error(calibrated / 4) > 2 * error(calibrated), "clipping must cost"


def test_a_pool_gives_every_layer_the_scales_it_was_made_with():
    layer = build(config_of("fp8_e4m3"), cache="fp8_e4m3")
    pool = layer.new_pool(2, 3, 4, k_scale=0.25)
    assert [pool.layer(index).scales.k_scale for index in range(2)] == [0.25, 0.25]


def test_scales_of_none_mean_one():
    layer = build(config_of("nvfp4"), cache="nvfp4")
    assert layer.new_cache(2, 64, k_scale=None, global_scale=None).scales == Scales()


def test_a_value_scale_of_its_own_is_refused():
    layer = build(config_of("fp8_e4m3"), cache="fp8_e4m3")
    with pytest.raises(CacheError, match=r"v_scale=0\.5 differs from k_scale=1\.0"):
        layer.new_cache(2, 4, v_scale=0.5)


@pytest.mark.parametrize("layout_id", ["fp8_ds_mla", "nvfp4"])
def test_widths_that_a_layout_cannot_hold_are_refused_before_weights(layout_id):
    with pytest.raises(CacheError, match=rf"layout '{layout_id}' .*layouts that fit: .*fp8_e4m3"):
        MLA(tiny_config(), backend="vanilla", cache=layout_id)


def test_another_page_size_for_nvfp4_is_refused_with_the_backend_and_what_works():
    layer = build(config_of("nvfp4"), cache="nvfp4")
    with pytest.raises(UnsupportedError, match=r"'vanilla'[^$]*16[^$]*64"):
        layer.new_cache(2, 16)


def test_a_layer_reads_no_cache_of_another_layout():
    layer = build(config_of("fp8_e4m3"), cache="fp8_e4m3")
    other = build(config_of("fp8_e4m3"), cache="bf16").new_cache(2, 4)
    requests = World(layer, [4])
    with pytest.raises(CacheError, match=r"'bf16'.*'fp8_e4m3'"):
        layer.prepare(requests.batch([(0, 4)]), other)
