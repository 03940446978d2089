"""How a layer is built: arguments by name, the norms' epsilon, and replicas that share the requests."""

from __future__ import annotations

import inspect

import pytest
import torch

from mla_core import MLA, Batch, hookimpl
from tests import fakes
from tests.support import TOLERANCE, World, build, random_weights, relative_error, tiny_config

STEPS = [[(0, 5), (1, 3)], [(1, 1), (0, 2)], [(0, 1), (1, 1)]]
LENGTHS = [8, 5]


def test_everything_but_the_config_is_given_by_name():
    _, config, *others = inspect.signature(MLA.__init__).parameters.values()
    assert config.name == "config"
    assert {parameter.kind for parameter in others} == {inspect.Parameter.KEYWORD_ONLY}


def error_on_tiny_inputs(of_the_layer: float, of_the_model: float) -> float:
    """A layer with one epsilon against the oracle with another, where latents are as small as the epsilon."""
    models = [tiny_config(latent_norm_eps=epsilon) for epsilon in (of_the_layer, of_the_model)]
    world = World(build(models[0]), LENGTHS)
    world.config = models[1]
    for request in world.requests:
        request.hidden_SD = request.hidden_SD * 1e-3
    return world.errors(STEPS)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-5])
def test_both_latent_norms_use_the_configs_epsilon(epsilon):
    assert error_on_tiny_inputs(epsilon, epsilon) < TOLERANCE[torch.float32]


def test_another_epsilon_would_be_noticed():
    assert error_on_tiny_inputs(1e-5, 1e-6) > 0.1


def solo(weights: dict[str, torch.Tensor], hidden_SD: torch.Tensor) -> torch.Tensor:
    """One request on a replica of its own: a whole layer and a cache that nobody else sees."""
    replica = build(tiny_config(), weights)
    batch = Batch.build([len(hidden_SD)], [0], [[0, 1]], 4)
    return replica(hidden_SD, replica.prepare(batch, replica.new_cache(2, 4)))


def test_replicas_that_share_the_requests_give_what_one_layer_gives():
    weights = random_weights(tiny_config())
    world = World(build(tiny_config(), weights), LENGTHS, weights=weights)
    together = world.outputs([(0, 8), (1, 5)])
    for request, out_TD in enumerate(together):
        alone = solo(weights, world.requests[request].hidden_SD)
        assert relative_error(alone, out_TD.double()) < TOLERANCE[torch.float32]


def test_a_replica_holds_every_head():
    assert build(tiny_config()).num_heads == tiny_config().num_heads


def test_a_replica_with_other_weights_would_be_noticed():
    weights, others = (random_weights(tiny_config(), seed=seed) for seed in (0, 1))
    world = World(build(tiny_config(), weights), LENGTHS, weights=weights)
    together = world.outputs([(0, 8)])[0]
    assert relative_error(solo(others, world.requests[0].hidden_SD), together.double()) > 0.1


class Reader(fakes.Counting):
    """Notes what it finds on the layer when its weights are created."""

    @hookimpl
    def create_weights(self, layer: MLA) -> None:
        self.found = (layer.config, layer.softmax_scale, layer.layer_idx, layer.plan.choices["mqa"])


def test_a_hook_finds_config_scale_index_and_plan_on_its_layer():
    config = tiny_config()
    with fakes.registered("reader", Reader):
        layer = MLA(config, backend="reader", dtype=torch.float32, layer_idx=3)
    assert layer.kernels.mqa.found == (config, (10 + 4) ** -0.5, 3, "reader")
