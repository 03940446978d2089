"""Binding a plan: owners take over their stages, and each kernel goes to the backend the plan names."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
import torch

from mla_core import MLA
from mla_core.config import GateConfig, RopeConfig
from tests import fakes
from tests.fakes import Counting, registered
from tests.support import SCENARIOS, TOLERANCE, build, random_weights, tiny_config

GATED = tiny_config(gate=GateConfig(kind="elementwise"))
ROPE = {"owns": {"rope", "append"}, "rope_styles": {"interleaved", "half_split", "none"}}
OWNERS: dict[str, tuple[type, dict[str, Any]]] = {
    "append": (fakes.AppendOwner, {"owns": {"append"}}),
    "rope_append": (fakes.RopeOwner, ROPE),
    "v_up": (fakes.ValueUpOwner, {"owns": {"v_up"}}),
    "gate": (fakes.GateOwner, {"owns": {"gate"}}),
}


def run(scenario: str, spec: str, config=GATED, **kinds: tuple[type, dict[str, Any]]) -> tuple[MLA, float]:
    """A scenario on a layer with some fakes registered: (layer, error against the oracle)."""
    with ExitStack() as stack:
        for name, (kind, changes) in kinds.items():
            stack.enter_context(registered(name, kind, **changes))
        world = SCENARIOS[scenario].world(config, weights=random_weights(config), backend=spec)
        return world.layer, world.errors(SCENARIOS[scenario].steps)


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("scenario", ["chunked_prefill", "absorbed_context", "decode", "mixed"])
def test_an_owner_of_a_stage_gives_the_oracles_result_in_every_phase(scenario, owner):
    layer, error = run(scenario, "mine", mine=OWNERS[owner])
    assert error < TOLERANCE[torch.float32]
    # Expanded prefill has no latent output to multiply.
    never = owner == "v_up" and scenario == "chunked_prefill"
    assert (layer.kernels.mqa.calls[owner] == 0) == never


@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("spec", ["prefill=mine;decode=vanilla", "prefill=vanilla;decode=mine"])
def test_an_owner_that_serves_one_phase_owns_its_stage_for_all_tokens(spec, owner):
    layer, error = run("mixed", spec, mine=OWNERS[owner])
    mine = layer.kernels.mqa if spec.endswith("mine") else layer.kernels.mha
    assert error < TOLERANCE[torch.float32]
    if owner != "v_up":
        assert mine.calls[owner] == len(SCENARIOS["mixed"].steps)


def test_v_up_is_owned_kernel_by_kernel():
    layer, error = run("absorbed_context", "prefill=mine;decode=vanilla", mine=OWNERS["v_up"])
    assert error < TOLERANCE[torch.float32]
    assert (layer.kernels.owns_v_up("mqa_prefill"), layer.kernels.owns_v_up("mqa")) == (True, False)


def test_two_owners_of_v_up_each_serve_their_own_kernel():
    fakes_by_name = {"one": OWNERS["v_up"], "other": OWNERS["v_up"]}
    config = SCENARIOS["decode"]
    with ExitStack() as stack:
        for name, (kind, changes) in fakes_by_name.items():
            stack.enter_context(registered(name, kind, **changes))
        world = config.world(
            GATED, weights=random_weights(GATED), backend="prefill=one;decode=other", prefill_form="absorb"
        )
        assert world.errors(config.steps) < TOLERANCE[torch.float32]
    assert world.layer.kernels.mqa_prefill.calls["v_up"] > 0
    assert world.layer.kernels.mqa.calls["v_up"] > 0


def test_the_decode_backend_wins_a_stage_that_both_own():
    layer, error = run("mixed", "prefill=one;decode=other", one=OWNERS["append"], other=OWNERS["append"])
    assert error < TOLERANCE[torch.float32]
    assert layer.plan.choices["append"] == "other"
    assert (layer.kernels.mha.calls["append"], layer.kernels.mqa.calls["append"]) == (0, 3)


@pytest.mark.parametrize(
    "rope", [RopeConfig(style="half_split"), RopeConfig(style="none")], ids=["half_split", "none"]
)
def test_an_owner_of_rope_gets_the_models_style_and_nothing_when_nothing_rotates(rope):
    config = tiny_config(rope=rope)
    layer, error = run("mixed", "mine", config, mine=OWNERS["rope_append"])
    assert error < TOLERANCE[torch.float32]
    assert layer.kernels.mqa.calls["rope_append"] == 3


class TwiceRotating(fakes.RopeOwner):
    def rope_append(self, *arguments: Any) -> None:
        super().rope_append(*arguments)
        super().rope_append(*arguments)


def test_an_owner_that_rotates_twice_is_noticed():
    _, error = run("mixed", "mine", mine=(TwiceRotating, ROPE))
    assert error > 1e-2


class Forgetful(fakes.AppendOwner):
    def append(self, *arguments: Any) -> None:
        """Stores nothing."""


def test_an_owner_that_does_not_store_is_noticed():
    _, error = run("mixed", "mine", mine=(Forgetful, {"owns": {"append"}}))
    assert error > 1e-2


def test_stages_nobody_owns_stay_with_the_core():
    layer = build(tiny_config())
    assert {layer.plan.choices[stage] for stage in ("append", "rope", "v_up", "gate")} == {"core"}


class Learner(Counting):
    seen: ClassVar[list[Any]] = []

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.seen.append(context)


def test_a_backend_learns_what_it_was_chosen_for():
    Learner.seen.clear()
    config = tiny_config(softmax_scale_override=0.25)
    with registered("mine", Learner):
        MLA(config, backend="prefill=vanilla;decode=mine", dtype=torch.float32, max_decode_query_len=3)
    (context,) = Learner.seen
    assert context.kernels == {"mqa_decode"}
    assert (context.softmax_scale, context.dtype, str(context.device)) == (0.25, torch.float32, "cpu")
    assert (context.request.heads, context.request.max_query_len) == (3, 3)
