"""R18: plugins come and go without disturbing each other, other models or other processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle

import pytest
import torch

from mla_core import MLA, registry
from mla_core.config import RopeConfig
from mla_core.errors import DuplicateBackend, UnknownBackend
from tests import fakes
from tests.fakes import Counting, registered
from tests.support import SCENARIOS, TOLERANCE, World, build, random_weights, tiny_config


def test_two_models_with_the_same_layer_index_share_no_state():
    """A target and a draft model, step by step in turn."""
    small, large = tiny_config(), tiny_config(num_heads=5, kv_lora_rank=24, rope=RopeConfig(theta=77.0))
    worlds = [
        World(build(config, random_weights(config)), [9], weights=random_weights(config))
        for config in (small, large)
    ]
    for count in (4, 1, 3, 1):
        assert [world.error([(0, count)]) < TOLERANCE[torch.float32] for world in worlds] == [True, True]


def test_two_models_of_one_shape_keep_their_own_weights_and_caches():
    weights = [random_weights(tiny_config(), seed) for seed in (0, 1)]
    worlds = [World(build(tiny_config(), known), [9], weights=known) for known in weights]
    for count in (4, 1, 3, 1):
        assert max(world.error([(0, count)]) for world in worlds) < TOLERANCE[torch.float32]
    worlds[0].layer.load_hf(random_weights(tiny_config(), 2))
    assert worlds[1].layer.weights_version == 1


def test_another_models_weights_are_noticed():
    weights = [random_weights(tiny_config(), seed) for seed in (0, 1)]
    world = World(build(tiny_config(), weights[0]), [9], weights=weights[0])
    world.layer = build(tiny_config(), weights[1])
    assert world.error([(0, 9)]) > 0.1


def test_every_layer_has_a_backend_instance_of_its_own():
    with registered("counting", Counting):
        first, second = (build(tiny_config(), backend="counting") for _ in range(2))
        world = World(first, [4])
    world.outputs([(0, 4)])
    assert first.kernels.mqa is not second.kernels.mqa
    assert (first.kernels.mqa.calls["mha"], second.kernels.mqa.calls["mha"]) == (1, 0)


def test_one_backend_serves_both_phases_with_one_instance():
    layer = build(tiny_config())
    assert layer.kernels.mqa is layer.kernels.mha


def test_registration_after_first_use_takes_effect():
    build(tiny_config())
    with registered("late", Counting):
        assert MLA(tiny_config(), backend="late", dtype=torch.float32).plan.choices["mqa"] == "late"


def test_a_taken_name_is_an_error_and_changes_no_other_name():
    with registered("taken", Counting):
        before = registry.info("vanilla")
        with pytest.raises(DuplicateBackend, match="'taken'"):
            registry.add(fakes.info("taken", fakes.GateOwner))
        assert registry.load("taken") is Counting
        assert registry.info("vanilla") == before


def test_a_taken_name_may_be_overridden_explicitly():
    with registered("taken", Counting):
        registry.add(fakes.info("taken", fakes.DecodeOnly), override=True)
        assert registry.load("taken") is fakes.DecodeOnly


def test_a_layer_outlives_the_registration_of_its_backend():
    with registered("brief", Counting):
        world = World(build(tiny_config(), backend="brief"), [9])
    with pytest.raises(UnknownBackend):
        registry.info("brief")
    assert world.errors([[(0, 5)], [(0, 1)]]) < TOLERANCE[torch.float32]


def test_a_layer_makes_caches_after_its_backend_was_removed():
    with registered("brief", Counting):
        layer = build(tiny_config(), backend="brief")
    assert layer.new_cache(2, 4).page_size == 4


def test_a_layer_keeps_its_backend_when_the_name_is_overridden():
    with registered("mine", Counting):
        world = World(build(tiny_config(), backend="mine"), [9])
        registry.add(fakes.info("mine", fakes.GateOwner, heads=[128]), override=True)
        assert world.errors([[(0, 5)], [(0, 1)]]) < TOLERANCE[torch.float32]
        assert type(world.layer.kernels.mqa) is Counting


def test_a_broken_plugin_does_not_disturb_a_layer_that_does_not_name_it():
    with registered("broken", Counting):
        registry.add(
            fakes.info("broken", Counting).model_copy(update={"target": "no.such:Thing"}), override=True
        )
        assert SCENARIOS["mixed"].error(tiny_config()) < TOLERANCE[torch.float32]


def decode_error(backend: str, options: dict[str, object]) -> tuple[int, float]:
    """In a worker: build a layer by name and run it."""
    torch.set_num_threads(1)
    layer = build(tiny_config(), backend=backend, **options)
    return os.getpid(), World(layer, [9]).errors([[(0, 5)], [(0, 3)], [(0, 1)]])


def unpickled_error(data: bytes) -> tuple[int, float]:
    """In a worker: take a layer that another process built, and run it."""
    torch.set_num_threads(1)
    return os.getpid(), World(pickle.loads(data), [9]).errors([[(0, 5)], [(0, 3)], [(0, 1)]])


@pytest.fixture(scope="module")
def spawned():
    """One worker process that was spawned, not forked."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        yield pool


@pytest.mark.parametrize("backend", ["vanilla", "auto"])
def test_a_spawned_worker_builds_a_layer_by_name(spawned, backend):
    worker, error = spawned.apply(decode_error, (backend, {"workspace_tokens": 3}))
    assert worker != os.getpid()
    assert error < TOLERANCE[torch.float32]


def test_a_spawned_worker_takes_over_a_pickled_layer(spawned):
    worker, error = spawned.apply(unpickled_error, (pickle.dumps(build(tiny_config())),))
    assert worker != os.getpid()
    assert error < TOLERANCE[torch.float32]


def test_a_spawned_worker_reports_a_refusal_as_our_own_error(spawned):
    with pytest.raises(UnknownBackend, match="unknown backend 'nowhere'"):
        spawned.apply(decode_error, ("nowhere", {}))
