"""The hook points of a layer, as pluggy specifications.

Each is resolved once, when a layer is built: the first implementation wins and becomes a plain callable;
pluggy never runs in `forward`. An implementation always returns its result; one that cannot serve a layer
says so when the layer is built. The three weight hooks are different: every implementation runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy
from torch import Tensor

if TYPE_CHECKING:
    from mla_core.batch import Batch
    from mla_core.layer import MLA
    from mla_core.stages.attend import AttentionOutput
    from mla_core.stages.project import Projected
    from mla_core.step import Step

__all__ = ["PROJECT", "HookSpecs", "hookimpl"]

PROJECT = "mla_core"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookSpecs:
    """Stage hooks (the first implementation wins) and weight hooks (all run)."""

    @hookspec(firstresult=True)
    def create_output(self, layer: MLA, hidden: Tensor, batch: Batch) -> Tensor:  # type: ignore[empty-body]
        """An uninitialised buffer [T, H*V] for the attention output."""

    @hookspec(firstresult=True)
    def project(self, layer: MLA, hidden: Tensor, batch: Batch) -> Projected:  # type: ignore[empty-body]
        """Queries and normed latents of the new tokens, before rotation."""

    @hookspec(firstresult=True)
    def attend(
        self,
        layer: MLA,
        projected: Projected,
        step: Step,
        output: AttentionOutput,
        inner: Callable[..., None],
    ) -> None:
        """Fill output.values_THV, and output.lse_TH when it is there; `inner(layer, projected, step,
        output)` is the next one in.
        """

    @hookspec(firstresult=True)
    def gate(self, layer: MLA, output: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[empty-body]
        """The gated attention output [T, H, V], from the layer's own input [T, D]."""

    @hookspec(firstresult=True)
    def project_out(self, layer: MLA, output: Tensor, batch: Batch) -> Tensor:  # type: ignore[empty-body]
        """Hidden states [T, D] from the attention output [T, H, V]."""

    @hookspec
    def create_weights(self, layer: MLA) -> None:
        """Add parameters of the plugin's own to the layer."""

    @hookspec
    def load_weights(self, layer: MLA, weights: Mapping[str, Tensor]) -> set[str]:  # type: ignore[empty-body]
        """Take the plugin's tensors from a checkpoint (names without prefix); returns the names taken."""

    @hookspec
    def prepare_weights(self, layer: MLA) -> None:
        """Refresh everything derived from weights, in place; runs after every load."""


STAGES = ("create_output", "project", "attend", "gate", "project_out")


def implementations(manager: pluggy.PluginManager, name: str) -> list[Any]:
    """Hook implementations of one name, the winning one first."""
    caller = getattr(manager.hook, name)
    return list(reversed(caller.get_hookimpls()))
