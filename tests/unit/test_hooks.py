"""Hooks: what a plugin may replace, wrap or add, and what it is told when it gets one wrong."""

from __future__ import annotations

from typing import Any

import pluggy
import pytest
import torch
from torch import Tensor, nn

from mla_core import MLA, hookimpl
from mla_core.config import GateConfig
from mla_core.errors import ContractError, HookError
from mla_core.hooks import STAGES, HookSpecs
from mla_core.stages.gate import gate as core_gate
from mla_core.stages.output import AttentionOutput
from mla_core.stages.project import project as core_project
from mla_core.stages.project_out import project_out as core_project_out
from tests import fakes
from tests.fakes import Counting, registered
from tests.support import SCENARIOS, TOLERANCE, World, build, random_weights, relative_error, tiny_config

GATED = tiny_config(gate=GateConfig(kind="per_head"))
MIXED = SCENARIOS["mixed"]


def run_mixed(kind: type, spec: str = "hooked", config=GATED, **changes: Any) -> tuple[World, float]:
    """The mixed scenario on a layer with a plugin: (world, error against the oracle)."""
    with registered("hooked", kind, **changes):
        world = MIXED.world(config, weights=random_weights(config), backend=spec)
        return world, world.errors(MIXED.steps)


class OwnOutput(Counting):
    @hookimpl
    def create_output(self, layer: MLA, hidden: Tensor, batch: Any) -> Tensor:
        self.calls["create_output"] += 1
        self.buffer = torch.full((batch.num_rows, layer.num_heads * layer.config.v_head_dim), torch.nan)
        return self.buffer


def test_create_output_supplies_the_buffer_that_attention_fills():
    world, error = run_mixed(OwnOutput)
    plugin = world.layer.kernels.mqa
    assert error < TOLERANCE[torch.float32]
    assert plugin.calls["create_output"] == len(MIXED.steps)
    assert plugin.buffer.isfinite().all()


class DoublingProject(Counting):
    @hookimpl
    def project(self, layer: MLA, hidden: Tensor, batch: Any) -> Any:
        self.calls["project"] += 1
        return core_project(layer, 2 * hidden, batch)


def test_project_replaces_the_projection_of_the_new_tokens():
    with registered("hooked", DoublingProject):
        layer = build(GATED, random_weights(GATED), backend="hooked")
        out, _ = attention_of(layer)
    expected, _ = attention_of(build(GATED, random_weights(GATED)), factor=2)
    torch.testing.assert_close(out, expected)
    assert layer.kernels.mqa.calls["project"] == 1


def attention_of(layer: MLA, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Attention values of five tokens of one request."""
    world = World(layer, [5], weights=random_weights(layer.config))
    world.requests[0].hidden_SD *= factor
    return world.attention([(0, 5)])[0]


class WrappingAttend(Counting):
    @hookimpl
    def attend(self, layer: MLA, projected: Any, step: Any, output: AttentionOutput, inner: Any) -> None:
        self.calls["attend"] += 1
        inner(layer, projected, step, output)
        output.values_THV.mul_(3)


def test_attend_wraps_the_cores_attention_through_inner():
    with registered("hooked", WrappingAttend):
        out, _ = attention_of(build(GATED, random_weights(GATED), backend="hooked"))
    expected, _ = attention_of(build(GATED, random_weights(GATED)))
    torch.testing.assert_close(out, 3 * expected)


class AddingAttend(Counting):
    @hookimpl
    def attend(self, layer: MLA, projected: Any, step: Any, output: AttentionOutput, inner: Any) -> None:
        inner(layer, projected, step, output)
        output.values_THV.add_(1)


def test_attend_of_the_decode_backend_wraps_that_of_the_prefill_backend():
    with registered("adds", AddingAttend), registered("triples", WrappingAttend):
        plain, _ = attention_of(build(GATED, random_weights(GATED)))
        for spec, expected in (
            ("prefill=adds;decode=triples", 3 * (plain + 1)),
            ("prefill=triples;decode=adds", 3 * plain + 1),
        ):
            out, _ = attention_of(build(GATED, random_weights(GATED), backend=spec))
            torch.testing.assert_close(out, expected, msg=spec)


class ReplacingAttend(Counting):
    @hookimpl
    def attend(self, output: AttentionOutput) -> None:
        output.values_THV.fill_(7.0)


def test_attend_may_do_without_the_core_and_name_only_the_arguments_it_needs():
    with registered("hooked", ReplacingAttend):
        world = World(build(tiny_config(), backend="hooked"), [5])
        batch = world.batch([(0, 5)])
        values, _ = world.layer.attention(world.hidden([(0, 5)]), world.layer.prepare(batch, world.cache))
    assert torch.equal(values, torch.full((5, 3, 6), 7.0))


class LeakyGate(Counting):
    @hookimpl
    def gate(self, layer: MLA, output: Tensor, hidden: Tensor) -> Tensor:
        self.calls["gate"] += 1
        return 2 * core_gate(layer, output, hidden)


def test_gate_replaces_the_gate_between_attention_and_output_projection():
    world, _ = run_mixed(LeakyGate)
    assert world.layer.kernels.mqa.calls["gate"] == len(MIXED.steps)
    assert hidden_out("hooked", LeakyGate) == pytest.approx(2 * hidden_out("hooked", Counting), rel=1e-5)


class NegatedOut(Counting):
    @hookimpl
    def project_out(self, layer: MLA, output: Tensor, batch: Any) -> Tensor:
        self.calls["project_out"] += 1
        return -core_project_out(layer, output, batch)


def test_project_out_replaces_the_output_projection():
    world, _ = run_mixed(NegatedOut)
    assert world.layer.kernels.mqa.calls["project_out"] == len(MIXED.steps)
    assert hidden_out("hooked", NegatedOut) == pytest.approx(-hidden_out("hooked", Counting), rel=1e-5)


def hidden_out(name: str, kind: type) -> float:
    """One number of a layer's result."""
    with registered(name, kind):
        world = World(build(GATED, random_weights(GATED), backend=name), [5], weights=random_weights(GATED))
        return float(world.outputs([(0, 5)])[0][2, 3])


class OwnWeights(Counting):
    """A parameter of its own that scales the gate's output, and its square as a derived value."""

    @hookimpl
    def create_weights(self, layer: MLA) -> None:
        layer.gain = nn.Parameter(torch.full((1,), torch.nan), requires_grad=False)
        layer.register_buffer("gain_squared", torch.full((1,), torch.nan), persistent=False)

    @hookimpl
    def load_weights(self, layer: MLA, weights: dict[str, Tensor]) -> set[str]:
        if "gain" in weights:
            layer.gain.copy_(weights["gain"])
        return {"gain"} & weights.keys()

    @hookimpl
    def prepare_weights(self, layer: MLA) -> None:
        self.calls["prepare_weights"] += 1
        layer.gain_squared.copy_(layer.gain.square())

    @hookimpl
    def gate(self, layer: MLA, output: Tensor, hidden: Tensor) -> Tensor:
        return core_gate(layer, output, hidden) * layer.gain_squared


def loaded_with_gain(gain: float) -> MLA:
    return build(GATED, {**random_weights(GATED), "gain": torch.tensor([gain])}, backend="hooked")


def test_create_weights_adds_parameters_and_load_weights_fills_them():
    with registered("hooked", OwnWeights):
        layer = loaded_with_gain(3.0)
    assert "gain" in dict(layer.named_parameters())
    assert layer.gain.item() == 3.0


def test_prepare_weights_runs_after_every_load_and_partial_reload_in_place():
    with registered("hooked", OwnWeights):
        layer = loaded_with_gain(3.0)
        assert layer.gain_squared.item() == 9.0
        where = layer.gain_squared.data_ptr()
        layer.load_hf({"gain": torch.tensor([5.0])}, partial=True)
        assert (layer.gain_squared.item(), layer.gain_squared.data_ptr()) == (25.0, where)
        layer.load_state_dict(loaded_with_gain(2.0).state_dict())
        assert (layer.gain_squared.item(), layer.gain_squared.data_ptr()) == (4.0, where)


def test_a_plugins_tensor_is_unexpected_when_the_plugin_is_not_there():
    with pytest.raises(Exception, match=r"unexpected gain \[1\]"):
        build(GATED, {**random_weights(GATED), "gain": torch.ones(1)})


class PreparesWithoutArguments(Counting):
    @hookimpl
    def prepare_weights(self) -> None:
        self.calls["prepare_weights"] += 1


def test_a_hook_may_take_no_argument_at_all():
    with registered("hooked", PreparesWithoutArguments):
        layer = build(GATED, random_weights(GATED), backend="hooked")
    assert layer.kernels.mqa.calls["prepare_weights"] == 1


class ForgetsNames(Counting):
    @hookimpl
    def load_weights(self, layer: MLA) -> None:
        """Returns nothing although it must say what it took."""


def test_a_load_hook_that_returns_no_names_is_named():
    with (
        registered("hooked", ForgetsNames),
        pytest.raises(ContractError, match=r"load_weights of plugin 'hooked' .*got None"),
    ):
        build(GATED, random_weights(GATED), backend="hooked")


class Typo(Counting):
    @hookimpl
    def projet(self, layer: MLA, hidden: Tensor, batch: Any) -> Any:
        """Misspelt."""


class UnknownArgument(Counting):
    @hookimpl
    def gate(self, layer: MLA, outputs: Tensor) -> Tensor:
        """`outputs` should be `output`."""


class OldWrapper(Counting):
    @hookimpl(hookwrapper=True)
    def project_out(self, layer: MLA, output: Tensor, batch: Any) -> Any:
        yield


class NewWrapper(Counting):
    @hookimpl(wrapper=True)
    def project_out(self, layer: MLA, output: Tensor, batch: Any) -> Any:
        return (yield)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Typo, "plugin 'hooked'.*projet"),
        (UnknownArgument, "plugin 'hooked'.*outputs"),
        (OldWrapper, "plugin 'hooked' wraps project_out; wrappers do not run here"),
        (NewWrapper, "plugin 'hooked' wraps project_out; wrappers do not run here"),
    ],
)
def test_a_hook_that_does_not_fit_is_an_error_that_names_the_plugin(kind, message):
    with registered("hooked", kind), pytest.raises(HookError, match=f"(?s){message}"):
        MLA(tiny_config(), backend="hooked", dtype=torch.float32)


def test_pluggy_does_not_run_during_forward(monkeypatch):
    with registered("hooked", WrappingAttend):
        world = World(build(GATED, random_weights(GATED), backend="hooked"), [9])
    called = []
    honest = pluggy.HookCaller.__call__

    def spying(caller: Any, **arguments: Any) -> Any:
        called.append(caller.name)
        return honest(caller, **arguments)

    monkeypatch.setattr(pluggy.HookCaller, "__call__", spying)
    world.outputs([(0, 5)])
    world.outputs([(0, 1)])
    # pytest has hooks of its own.
    assert {name for name in called if not name.startswith("pytest")} == set()


def test_a_plugin_that_is_not_chosen_takes_no_part():
    with registered("hooked", NegatedOut):
        assert MIXED.error(GATED, weights=random_weights(GATED)) < TOLERANCE[torch.float32]


def test_every_stage_hook_runs_the_first_implementation_only_and_every_weight_hook_runs_all():
    specified = {name for name in vars(HookSpecs) if not name.startswith("_")}
    first = {name for name in specified if getattr(HookSpecs, name).mla_core_spec["firstresult"]}
    assert first == set(STAGES)
    assert specified - first == {"create_weights", "load_weights", "prepare_weights"}


@pytest.mark.parametrize(
    ("stage", "kind", "changes"),
    [
        ("append", fakes.AppendOwner, {"owns": {"append"}}),
        ("rope_append", fakes.RopeOwner, {"owns": {"rope", "append"}, "rope_styles": {"interleaved"}}),
        ("gate", fakes.GateOwner, {"owns": {"gate"}}),
    ],
)
def test_an_owned_stage_happens_exactly_once_a_step_and_gives_the_oracles_result(stage, kind, changes):
    world, error = run_mixed(kind, **changes)
    assert error < TOLERANCE[torch.float32]
    assert world.layer.kernels.mqa.calls[stage] == len(MIXED.steps)


def test_an_owned_v_up_happens_once_for_every_absorbed_part():
    world, error = run_mixed(fakes.ValueUpOwner, owns={"v_up"})
    plugin = world.layer.kernels.mqa
    assert error < TOLERANCE[torch.float32]
    assert plugin.calls["v_up"] == plugin.calls["mqa"] > 0


def test_relative_error_between_two_plugins_is_not_vacuous():
    with registered("hooked", AddingAttend):
        out, _ = attention_of(build(GATED, random_weights(GATED), backend="hooked"))
    assert relative_error(out, attention_of(build(GATED, random_weights(GATED)))[0]) > 0.1
