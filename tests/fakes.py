"""Backends of pure torch that own stages, implement hooks or break rules; registered only while a test runs.

They compute as the vanilla backend does, and count their calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mla_core import BackendInfo, Capabilities, IntSet, LayerContext, RopeInputs, hookimpl, registry
from mla_core.stages.rope import rotate
from mla_vanilla.backend import Vanilla

ANY = IntSet.range(1)
EVERYTHING: dict[str, Any] = {
    "devices": {"cpu"},
    "kernels": {"mha_prefill", "mqa_decode", "mqa_prefill"},
    "dtypes": {"float32", "float16", "bfloat16"},
    "layouts": {"fp32": ANY, "fp16": ANY, "bf16": ANY},
    "query_len": {"single", "uniform", "varlen"},
    "heads": ANY,
    "latent": ANY,
    "nope": ANY,
    "rope": IntSet.range(0),
    "value": ANY,
    "returns": {"lse"},
}


def declared(**changes: Any) -> Capabilities:
    """All that the fakes can do, with changes."""
    return Capabilities(**{**EVERYTHING, **changes})


def info(name: str, kind: type, *, priority: int = -1000, **changes: Any) -> BackendInfo:
    target = f"{kind.__module__}:{kind.__qualname__}"
    return BackendInfo(name=name, target=target, priority=priority, capabilities=declared(**changes))


@contextmanager
def registered(name: str, kind: type, **changes: Any) -> Iterator[BackendInfo]:
    """A backend class under a name, for the time of a `with` block."""
    backend = info(name, kind, **changes)
    registry.add(backend)
    try:
        yield backend
    finally:
        registry.remove(name)


class Counting(Vanilla):
    """The vanilla backend that counts its calls and checks what it is given."""

    def __init__(self, context: LayerContext) -> None:
        # Vanilla refuses what it does not declare itself, and it owns no append.
        super().__init__(replace(context, kernels=context.kernels - {"append"}))
        self.calls: Counter[str] = Counter()

    def prepare(self, kernel: str, *arguments: Any) -> Any:
        self.calls[f"prepare {kernel}"] += 1
        return super().prepare(kernel, *arguments)

    def mha(self, *arguments: Any) -> None:
        self.calls["mha"] += 1
        super().mha(*arguments)

    def mqa(self, *arguments: Any) -> None:
        self.calls["mqa"] += 1
        super().mqa(*arguments)


class AppendOwner(Counting):
    def append(self, cache: Any, targets: Any, latent_TL: Tensor, k_rope_TR: Tensor) -> None:
        self.calls["append"] += 1
        cache.write_targets(targets, latent_TL, k_rope_TR)


class RopeOwner(Counting):
    def rope_append(
        self,
        cache: Any,
        targets: Any,
        q_rope_THR: Tensor,
        latent_TL: Tensor,
        k_rope_TR: Tensor,
        rope: RopeInputs | None,
    ) -> None:
        self.calls["rope_append"] += 1
        if rope is not None:
            rotate(q_rope_THR, rope)
            rotate(k_rope_TR.unsqueeze(1), rope)
        cache.write_targets(targets, latent_TL, k_rope_TR)


class ValueUpOwner(Counting):
    """Its absorbed kernels return values [T, H, V]."""

    @hookimpl
    def prepare_weights(self, layer: Any) -> None:
        self.w_uv_HLV = layer.w_uv_HLV

    def mqa(self, q: Tensor, cache: Any, segments: Any, scale: float, out_THV: Tensor, lse: Any) -> None:
        latent_THL = out_THV.new_empty(*out_THV.shape[:2], self.latent)
        super().mqa(q, cache, segments, scale, latent_THL, lse)
        self.calls["v_up"] += 1
        out_THV.copy_(torch.einsum("thl,hlv->thv", latent_THL, self.w_uv_HLV))


class GateOwner(Counting):
    @hookimpl
    def gate(self, layer: Any, output: Tensor, hidden: Tensor) -> Tensor:
        self.calls["gate"] += 1
        gates = torch.sigmoid(layer.gate_proj(hidden).float()).unflatten(1, (output.shape[1], -1))
        return (output * gates).to(output.dtype)


class PrefillOnly:
    """One kernel and nothing else."""

    def __init__(self, context: LayerContext) -> None:
        self._inside = Counting(context)
        self.calls = self._inside.calls

    def prepare(self, *arguments: Any) -> Any:
        return self._inside.prepare(*arguments)

    def mha(self, *arguments: Any) -> None:
        self._inside.mha(*arguments)


class DecodeOnly:
    """One kernel and nothing else."""

    def __init__(self, context: LayerContext) -> None:
        self._inside = Counting(context)
        self.calls = self._inside.calls

    def prepare(self, *arguments: Any) -> Any:
        return self._inside.prepare(*arguments)

    def mqa(self, *arguments: Any) -> None:
        self._inside.mqa(*arguments)
