"""Turns a plan into a frozen program: kernels loaded, hooks resolved, stages as plain callables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy
from torch import Tensor

from mla_core.backend import Backend, LayerContext
from mla_core.capabilities import Capabilities
from mla_core.errors import ContractError, HookError
from mla_core.hooks import PROJECT, HookSpecs, hookimpl, implementations
from mla_core.stages.append import append
from mla_core.stages.attend import attend
from mla_core.stages.gate import gate
from mla_core.stages.output import create_output
from mla_core.stages.project import project
from mla_core.stages.project_out import project_out
from mla_core.stages.rope import rope

if TYPE_CHECKING:
    from mla_core.batch import Batch
    from mla_core.layer import MLA
    from mla_core.plan import Plan
    from mla_core.registry import Registry
    from mla_core.stages.output import AttentionOutput
    from mla_core.stages.project import Projected
    from mla_core.step import Step

__all__ = ["Kernels", "Program", "bind"]

# Kernel of a plan to the method that a backend must have for it.
_METHODS = {"mha": "mha", "mqa": "mqa", "mqa_prefill": "mqa", "append": "append"}


@dataclass(frozen=True)
class Kernels:
    """The backend that serves each kernel of one layer; None when the plan does not use it."""

    mha: Backend | None
    mqa: Backend
    mqa_prefill: Backend | None
    # Names of the kernels whose backend multiplies by W_uv itself.
    v_up_owners: frozenset[str]
    # What each chosen backend declared when the layer was built; the registry may change afterwards.
    offered: Mapping[str, Capabilities]

    def of(self, kernel: str) -> Any:
        return getattr(self, kernel)

    def owns_v_up(self, kernel: str) -> bool:
        return kernel in self.v_up_owners


@dataclass(frozen=True)
class Program:
    """A layer's stages, resolved."""

    create_output: Callable[[MLA, Tensor, Batch], Tensor]
    project: Callable[[MLA, Tensor, Batch], Projected]
    rope: Callable[[MLA, Projected, Step], None]
    append: Callable[[MLA, Projected, Step], None]
    attend: Callable[[MLA, Projected, Step, AttentionOutput], None]
    gate: Callable[[MLA, Tensor, Tensor], Tensor]
    project_out: Callable[[MLA, Tensor, Batch], Tensor]
    create_weights: Callable[[MLA], None]
    load_weights: Callable[[MLA, Mapping[str, Tensor]], set[str]]
    prepare_weights: Callable[[MLA], None]


class _Defaults:
    """The core's own stages, behind every plugin."""

    create_output = staticmethod(hookimpl(create_output))
    project = staticmethod(hookimpl(project))
    attend = staticmethod(hookimpl(attend))
    gate = staticmethod(hookimpl(gate))
    project_out = staticmethod(hookimpl(project_out))


def bind(plan: Plan, registry: Registry, context: Callable[[str], LayerContext]) -> tuple[Kernels, Program]:
    """Load the chosen backends and resolve every hook once.

    `context(name)` is what one backend's constructor gets. Raises UnsupportedError when a constructor
    refuses, ContractError when a backend lacks a kernel it declares, HookError for a hook with a wrong name
    or arguments.
    """
    offered = {name: registry.info(name).capabilities for name in _chosen(plan)}
    backends = {name: _build(name, registry, context) for name in offered}
    _check_methods(plan, backends)
    manager = _manager(backends)
    return _kernels(plan, backends, offered), _program(plan, backends, manager)


def _check_methods(plan: Plan, backends: Mapping[str, Any]) -> None:
    """Has every chosen backend the methods of the kernels and stages it was chosen for?"""
    for kernel, name in plan.choices.items():
        method = _METHODS.get(kernel)
        if method == "append" and plan.choices["rope"] != "core":
            method = "rope_append"
        if method and name != "core" and not callable(getattr(backends[name], method, None)):
            raise ContractError(
                f"backend {name!r} was chosen for {kernel} but its class has no method {method}"
            )


def _chosen(plan: Plan) -> list[str]:
    """Backends in use, the decode backend last so that its hooks win."""
    names = dict.fromkeys(
        plan.choices[kernel] for kernel in ("mha", "mqa_prefill", "mqa") if kernel in plan.choices
    )
    return sorted(names, key=lambda name: name == plan.choices["mqa"])


def _build(name: str, registry: Registry, context: Callable[[str], LayerContext]) -> Any:
    return registry.load(name)(context(name))


def _kernels(plan: Plan, backends: Mapping[str, Any], offered: Mapping[str, Capabilities]) -> Kernels:
    """v_up is owned kernel by kernel: two backends may serve the two phases, and only one own it."""
    served = {
        kernel: backends.get(plan.choices.get(kernel, "core")) for kernel in ("mha", "mqa", "mqa_prefill")
    }
    absorbed = {kernel: plan.choices[kernel] for kernel in ("mqa", "mqa_prefill") if kernel in plan.choices}
    owners = [kernel for kernel, name in absorbed.items() if "v_up" in offered[name].owns]
    return Kernels(**served, v_up_owners=frozenset(owners), offered=offered)


def _manager(backends: Mapping[str, Any]) -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    for name, plugin in [("core", _Defaults()), *backends.items()]:
        _register(manager, plugin, name)
    return manager


def _register(manager: pluggy.PluginManager, plugin: Any, name: str) -> None:
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise HookError(f"plugin {name!r} has a hook that does not fit mla_core's: {error}") from error


def _program(plan: Plan, backends: Mapping[str, Any], manager: pluggy.PluginManager) -> Program:
    rope_owner, append_owner = plan.choices["rope"], plan.choices["append"]
    return Program(
        create_output=_stage(manager, "create_output"),
        project=_stage(manager, "project"),
        rope=rope if rope_owner == "core" else _nothing,
        append=_append(backends, rope_owner, append_owner),
        attend=_attend(manager),
        gate=_gate(manager, plan.choices["gate"]),
        project_out=_stage(manager, "project_out"),
        create_weights=_every(manager, "create_weights"),
        load_weights=_loaders(manager),
        prepare_weights=_every(manager, "prepare_weights"),
    )


def _stage(manager: pluggy.PluginManager, name: str) -> Callable[..., Any]:
    """The winning implementation of one stage."""
    return _callable(implementations(manager, name)[0], manager, name)


def _attend(manager: pluggy.PluginManager) -> Callable[..., None]:
    """All implementations of attend, each wrapping the next through `inner`."""
    *outer, default = implementations(manager, "attend")
    inner = default.function
    for implementation in reversed(outer):
        inner = _wrapped(_callable(implementation, manager, "attend"), inner)
    return inner


def _wrapped(outer: Callable[..., None], inner: Callable[..., None]) -> Callable[..., None]:
    def attend_through(layer: MLA, projected: Projected, step: Step, output: AttentionOutput) -> None:
        outer(layer, projected, step, output, inner)

    return attend_through


def _gate(manager: pluggy.PluginManager, owner: str) -> Callable[..., Any]:
    winner = implementations(manager, "gate")[0]
    if owner != "core" and winner.plugin_name != owner:
        raise ContractError(
            f"backend {owner!r} declares that it owns the gate, but has no hook implementation of it"
        )
    return _callable(winner, manager, "gate")


def _append(backends: Mapping[str, Any], rope_owner: str, append_owner: str) -> Callable[..., None]:
    if append_owner == "core":
        return append
    backend = backends[append_owner]
    if rope_owner == "core":

        def owned_append(layer: MLA, projected: Projected, step: Step) -> None:
            backend.append(step.cache_of(layer), step.targets, projected.latent_TL, projected.k_rope_TR)

        return owned_append

    def owned_rope_append(layer: MLA, projected: Projected, step: Step) -> None:
        q_rope_THR = projected.query_THE[..., layer.config.qk_nope_head_dim :]
        rows = (projected.latent_TL, projected.k_rope_TR)
        backend.rope_append(step.cache_of(layer), step.targets, q_rope_THR, *rows, step.rope)

    return owned_rope_append


def _nothing(layer: MLA, projected: Projected, step: Step) -> None:
    """A stage that another one has taken over."""


def _every(manager: pluggy.PluginManager, name: str) -> Callable[[MLA], None]:
    calls = [_callable(found, manager, name) for found in implementations(manager, name)]

    def run(layer: MLA) -> None:
        for call in calls:
            call(layer)

    return run


def _loaders(manager: pluggy.PluginManager) -> Callable[[MLA, Mapping[str, Tensor]], set[str]]:
    found = implementations(manager, "load_weights")
    calls = {each.plugin_name: _callable(each, manager, "load_weights") for each in found}

    def load(layer: MLA, weights: Mapping[str, Tensor]) -> set[str]:
        taken: set[str] = set()
        for plugin, call in calls.items():
            names = call(layer, weights)
            if not isinstance(names, (set, frozenset)):
                raise ContractError(
                    f"load_weights of plugin {plugin!r} must return the set of names it took, got {names!r}"
                )
            taken |= names
        return taken

    return load


def _callable(implementation: Any, manager: pluggy.PluginManager, name: str) -> Callable[..., Any]:
    """A plain callable with the specification's arguments, in its order, for an implementation that may
    take fewer.
    """
    if implementation.hookwrapper or implementation.wrapper:
        raise HookError(
            f"plugin {implementation.plugin_name!r} wraps {name}; wrappers do not run here, "
            "implement the hook itself (attend gets `inner` to wrap)"
        )
    specified = getattr(manager.hook, name).spec.argnames
    if tuple(implementation.argnames) == tuple(specified):
        return implementation.function
    taken = [specified.index(argument) for argument in implementation.argnames]
    function = implementation.function
    return lambda *arguments: function(*[arguments[index] for index in taken])
