"""Whole layers on the bench: the backend's kernels where it has them, the kit's own where it has none.

Requests run through a poisoned cache with shuffled pages; every new row is compared with the oracle.
Legend: T new tokens, S tokens of a request, D model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mla_core.batch import Batch
from mla_core.config import GateConfig, MLAConfig, RopeConfig
from mla_core.conformance.bench import Bench, Unavailable, Wrong
from mla_core.conformance.fallback import FALLBACK
from mla_core.conformance.scenes import HOSTILE, poison
from mla_core.layer import MLA
from mla_core.reference import attention_layer
from mla_core.weights import expected_shapes

__all__ = ["LayerRun", "Steps", "forms", "random_weights"]

# Steps of a run: in each, (request, new tokens) in the order of the batch.
Steps = Sequence[Sequence[tuple[int, int]]]

_PLAIN = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_HIDDEN, _Q_LORA, _PAGES = 40, 24, 16


def forms(bench: Bench) -> list[str]:
    """The prefill forms that the backend has a kernel for; expanded by the kit's kernels when none."""
    offered = bench.info.capabilities.kernels
    named = {"mha_prefill": "expand", "mqa_prefill": "absorb"}
    return [form for kernel, form in named.items() if kernel in offered] or ["expand"]


def random_weights(config: MLAConfig, seed: int = 0) -> dict[str, Tensor]:
    """Weights under Hugging Face names, of a size at which attention is neither flat nor one spike."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(MLA(config, backend=FALLBACK, dtype=torch.float32))
    return {name: _random(name, shape, generator) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.2 * noise
    # Larger queries: scores then spread over a few units.
    return noise * (3 if name.startswith("q_b") else 1) * shape[-1] ** -0.5


class LayerRun:
    """One layer with weights, a cache, and requests that advance through it."""

    def __init__(
        self, bench: Bench, *, form: str = "expand", gate: str | None = None, **options: Any
    ) -> None:
        asked = bench.layer
        self.bench, self.dtype = bench, getattr(torch, asked.dtype)
        self.config = _config(bench, gate)
        self.page_size = asked.page_size or 16
        self.layer = MLA(
            self.config,
            backend=_spec(bench, form),
            cache=asked.layout,
            dtype=self.dtype,
            device=bench.device,
            prefill_form=form,
            **options,
        )
        self.load(random_weights(self.config))
        self.cache = self.layer.new_cache(_PAGES, self.page_size)
        poison(self.cache.data)
        self.pages = torch.randperm(_PAGES, generator=torch.Generator().manual_seed(5)).tolist()
        self.done: dict[int, int] = {}
        self.tables: dict[int, list[int]] = {}
        self.hidden: dict[int, Tensor] = {}

    def load(self, weights: dict[str, Tensor], *, partial: bool = False) -> None:
        """Load weights, rounded to the layer's dtype first so that the oracle sees the same ones."""
        rounded = {name: value.to(self.dtype) for name, value in weights.items()}
        self.weights = {**(self.weights if partial else {}), **rounded}
        self.layer.load_hf(
            {name: value.to(self.bench.device) for name, value in rounded.items()}, partial=partial
        )

    def check(self, steps: Steps) -> None:
        """Run the steps; every new row is the oracle's, or one with the cell's deliberate fault."""
        plain = _PLAIN[self.bench.layer.dtype]
        if self.bench.layer.layout != plain:
            raise Unavailable(f"layers are compared over a {plain} cache, which is not declared")
        rows: dict[int, list[Tensor]] = {}
        starts = {request: self.done.get(request, 0) for step in steps for request, _ in step}
        for step in steps:
            for (request, _), out in zip(step, self.step(step), strict=True):
                rows.setdefault(request, []).append(out)
        for request, outs in rows.items():
            self._compare(request, starts[request], torch.cat(outs))

    def step(self, counts: Sequence[tuple[int, int]]) -> list[Tensor]:
        """One engine step; each request's new hidden states."""
        batch = self.batch(counts)
        hidden = torch.cat([self._hidden(r)[self.done[r] : self.done[r] + n] for r, n in counts])
        out_TD = self.layer(hidden.to(self.bench.device), self.layer.prepare(batch, self.cache))
        for request, count in counts:
            self.done[request] += count
        return list(out_TD.split([count for _, count in counts]))

    def batch(self, counts: Sequence[tuple[int, int]], **capacity: int) -> Batch:
        """The next step's batch."""
        for request, count in counts:
            self._grow(request, self.done.setdefault(request, 0) + count)
        width = max(len(self.tables[request]) for request, _ in counts) + 2
        table = [[*self.tables[request], *HOSTILE * width][:width] for request, _ in counts]
        contexts = [self.done[request] for request, _ in counts]
        made = torch.tensor(table, dtype=torch.int32)
        return Batch.build(
            [count for _, count in counts],
            contexts,
            made,
            self.page_size,
            device=self.bench.device,
            **capacity,
        )

    def _grow(self, request: int, tokens: int) -> None:
        pages = self.tables.setdefault(request, [])
        while len(pages) * self.page_size < tokens:
            pages.append(self.pages.pop())

    def _hidden(self, request: int) -> Tensor:
        if request not in self.hidden:
            generator = torch.Generator().manual_seed(500 + request)
            self.hidden[request] = torch.randn(40, _HIDDEN, generator=generator).to(self.dtype)
        return self.hidden[request]

    def _compare(self, request: int, start: int, out_TD: Tensor) -> None:
        hidden = self._hidden(request)[: start + len(out_TD)]
        expected = expected_hidden(self.config, self.weights, hidden, self.bench.cell.control)[start:]
        actual = out_TD.double().cpu()
        error = float(((actual - expected).norm() / expected.norm()).nan_to_num(nan=torch.inf))
        allowed = self.bench.tolerance.row
        self.bench.worst = max(self.bench.worst, error / allowed)
        if error > allowed:
            what = f"the layer's output is wrong for request {request}"
            raise Wrong(f"{what}: error {error:.3g}, allowed {allowed:.3g}", error / allowed)


def expected_hidden(
    config: MLAConfig, weights: dict[str, Tensor], hidden_SD: Tensor, control: str | None
) -> Tensor:
    """The oracle's hidden states, or ones with a deliberate fault."""
    positions = torch.arange(len(hidden_SD))
    if control == "scale":
        config = config.model_copy(update={"softmax_scale_override": 1.01 * config.softmax_scale})
    if control == "rope":
        positions = 2 * positions
    if control == "gate":
        ungated = attention_layer(config.model_copy(update={"gate": None}), weights, hidden_SD.double())
        factor = torch.sigmoid(hidden_SD.double() @ weights["g_proj.weight"].double().T).mean(
            -1, keepdim=True
        )
        return ungated.hidden_SD * factor
    return attention_layer(config, weights, hidden_SD.double(), positions=positions).hidden_SD


def _config(bench: Bench, gate: str | None) -> MLAConfig:
    asked = bench.layer
    style = asked.rope_style if asked.rope % 2 == 0 else "none"
    return MLAConfig(
        hidden_size=_HIDDEN,
        num_heads=asked.heads,
        q_lora_rank=_Q_LORA,
        kv_lora_rank=asked.latent,
        qk_nope_head_dim=asked.nope,
        qk_rope_head_dim=asked.rope,
        v_head_dim=asked.value,
        # Small enough that a few positions turn every pair visibly.
        rope=RopeConfig(style=style, theta=100.0),
        gate=None if gate is None else GateConfig(kind=gate),
    )


def _spec(bench: Bench, form: str) -> str:
    offered = bench.info.capabilities.kernels
    prefill = "mha_prefill" if form == "expand" else "mqa_prefill"
    chosen = [str(bench.subject) if kernel in offered else FALLBACK for kernel in (prefill, "mqa_decode")]
    return f"prefill={chosen[0]};decode={chosen[1]}"
