"""Rows for the new tokens that were computed elsewhere, given to a layer instead of its own."""

from __future__ import annotations

import pytest
import torch

from mla_core.errors import ContractError
from mla_core.stages.project import project
from tests.support import SCENARIOS, TOLERANCE, build, random_weights, relative_error, tiny_config

CONFIG = tiny_config(latent_scale=1.3)
OWN = random_weights(CONFIG)
# A layer whose kv_a_proj computes other rows, and which is right only with the given ones.
OTHER = OWN | {
    name: random_weights(CONFIG, seed=1)[name]
    for name in ("kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight")
}
PATHS = ("chunked_prefill", "absorbed_context", "decode", "mixed")


def error(path: str, *, give: bool) -> float:
    """Of a layer with wrong kv_a weights, whose rows come from a layer with the right ones."""
    scenario = SCENARIOS[path]
    world = scenario.world(CONFIG, weights=OWN)
    right, wrong, worst = world.layer, build(CONFIG, OTHER, **scenario.options), 0.0
    for counts in scenario.steps:
        batch, hidden_TD = world.batch(counts), world.hidden(counts)
        elsewhere = project(right, hidden_TD, batch)
        rows_TX = torch.cat([elsewhere.latent_TL, elsewhere.k_rope_TR], dim=1)
        step = wrong.prepare(batch, world.cache)
        out_TD = wrong(hidden_TD, step, latent_TX=rows_TX if give else None)
        starts = [world.requests[request].done for request, _ in counts]
        for (request, count), start, out in zip(counts, starts, world._advance(counts, out_TD), strict=True):
            expected = world.expected(request).hidden_SD[start : start + count]
            worst = max(worst, relative_error(out, expected))
    return worst


@pytest.mark.parametrize("path", PATHS)
def test_given_latents_replace_those_of_the_layer(path):
    assert error(path, give=True) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("path", PATHS)
def test_without_given_latents_the_layer_uses_its_own(path):
    assert error(path, give=False) > 100 * TOLERANCE[torch.float32]


def test_given_latents_are_not_written():
    world = SCENARIOS["context"].world(CONFIG, weights=OWN)
    rows_TX = torch.randn(5, CONFIG.latent_width)
    before = rows_TX.clone()
    counts = [(0, 5)]
    world.layer(
        world.hidden(counts), world.layer.prepare(world.batch(counts), world.cache), latent_TX=rows_TX
    )
    assert torch.equal(rows_TX, before)


@pytest.mark.parametrize(
    ("rows", "width", "dtype"), [(4, 20, torch.float32), (5, 19, torch.float32), (5, 20, torch.float16)]
)
def test_given_latents_that_do_not_fit_are_refused_with_both_shapes(rows, width, dtype):
    world = SCENARIOS["context"].world(CONFIG, weights=OWN)
    step = world.layer.prepare(world.batch([(0, 5)]), world.cache)
    wanted = rf"latent_TX must be \[5, 20\] of torch.float32.*got \[{rows}, {width}\] of {dtype}"
    with pytest.raises(ContractError, match=wanted):
        world.layer(world.hidden([(0, 5)]), step, latent_TX=torch.zeros(rows, width, dtype=dtype))
