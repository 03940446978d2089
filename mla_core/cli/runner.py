"""`mla run`: plan, weights, inputs, engine steps, oracle, and a report of all of it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mla_core import weights
from mla_core.checkpoint import Checkpoint, open_checkpoint, write_checkpoint
from mla_core.checkpoint_weights import check
from mla_core.cli.engine import Engine, Outcome
from mla_core.cli.exact_weights import exact_weights
from mla_core.cli.inputs import Inputs, random_inputs, text_inputs
from mla_core.cli.random_weights import random_weights
from mla_core.cli.report import Report, StepReport, WorkReport
from mla_core.cli.run_options import RunOptions
from mla_core.cli.scenario import Scenario, default_scenario, parse_requests
from mla_core.cli.seeds import stream
from mla_core.cli.verify import Judge, is_quantised, tolerance
from mla_core.config import MLAConfig
from mla_core.config_presets import PRESETS
from mla_core.errors import CheckpointError, ConfigError
from mla_core.layer import MLA

__all__ = ["Runner"]

Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
Announce = Callable[[str], None]

# Small enough that a large layer has several shards.
_SHARD_BYTES = 256 << 20
# The default scenario's first context is longer: it takes more than one chunk.
_DEMO_WORKSPACE, _WORKSPACE = 64, 8192


@dataclass(frozen=True)
class Runner:
    """One run. `bar` shows progress of slow work, `announce` takes what is known before the run ends."""

    options: RunOptions
    bar: Bar
    announce: Announce

    def run(self) -> Report:
        """Do everything. Raises an MLAError when it cannot be done as asked."""
        options = self.options
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        scenario = default_scenario() if options.requests is None else parse_requests(options.requests)
        opened = None if options.checkpoint is None else open_checkpoint(options.checkpoint)
        layers = self._layers(scenario, opened)
        self.announce(_heading(layers))
        with self._source(layers, opened) as checkpoint:
            self._load(layers, checkpoint)
            inputs = self._inputs(scenario, checkpoint, layers)
            self.announce(f"inputs   {inputs.source}")
            engine = Engine(layers, scenario, options.page_size, options.seed)
            outcomes = self._steps(engine, scenario, inputs)
            errors = self._verify(engine, scenario, checkpoint, inputs, outcomes) if options.verify else {}
        return self._report(engine, inputs, outcomes, errors)

    def _layers(self, scenario: Scenario, opened: Checkpoint | None) -> list[MLA]:
        """The layers, planned but without weights."""
        options = self.options
        config = MLAConfig.preset(options.model or "") if opened is None else opened.config
        own = config.attention_layers if opened is None else tuple(opened.layers)
        known = own if opened is None else (*own, *opened.extra_layers)
        indices = own[:1] if options.layers is None else options.layers
        for index in indices:
            if index not in known:
                raise ConfigError(f"there is no MLA layer {index}; layers: {', '.join(map(str, known))}")
        if not indices:
            raise CheckpointError(f"{options.checkpoint} holds no MLA attention")
        default = _DEMO_WORKSPACE if options.requests is None else _WORKSPACE
        made = {
            "backend": options.backend,
            "cache": options.cache,
            "dtype": getattr(torch, options.dtype),
            "device": _device(options.device),
            "workspace_tokens": options.workspace_tokens or default,
            "max_decode_query_len": scenario.max_decode_query_len,
            "prefill_form": options.prefill_form,
        }
        return [MLA(config, layer_idx=index, **made) for index in indices]

    @contextmanager
    def _source(self, layers: list[MLA], opened: Checkpoint | None) -> Iterator[Checkpoint]:
        """The checkpoint that was named, or one of random weights written for this run."""
        if opened is not None:
            yield opened
            return
        with tempfile.TemporaryDirectory(prefix="mla-run-") as temporary:
            folder = self.options.write or Path(temporary)
            started = time.perf_counter()
            self._write(layers, folder)
            where = folder if self.options.write else "a temporary checkpoint"
            self.announce(f"weights  random, written to {where} in {time.perf_counter() - started:.1f} s")
            yield open_checkpoint(folder)

    def _write(self, layers: list[MLA], folder: Path) -> None:
        tensors = {}
        with self.bar("making weights", len(layers)) as advance:
            for layer in layers:
                numbers = stream(self.options.seed, f"weights of layer {layer.layer_idx}")
                shapes = weights.expected_shapes(layer)
                made = random_weights(layer.config, shapes, layer.dtype, numbers)
                prefix = f"model.layers.{layer.layer_idx}.self_attn."
                tensors |= {prefix + name: value for name, value in made.items()}
                advance(1)
        with self.bar("writing weights", sum(value.nbytes for value in tensors.values())) as advance:
            hf_config = PRESETS[(self.options.model or "").lower()]
            write_checkpoint(folder, hf_config, tensors, _SHARD_BYTES, advance)

    def _load(self, layers: list[MLA], checkpoint: Checkpoint) -> None:
        started, read = time.perf_counter(), 0
        with self.bar("reading weights", len(layers)) as advance:
            for layer in layers:
                stored = checkpoint.attention(layer.layer_idx)
                try:
                    layer.load_hf(stored)
                except CheckpointError:
                    # All layers at once, and under the checkpoint's own names, where its headers show it.
                    check(checkpoint, [layer.layer_idx for layer in layers])
                    raise
                read += sum(value.nbytes for value in stored.values())
                advance(1)
        seconds = time.perf_counter() - started
        self.announce(f"weights  {read / 1e9:.3g} GB read from {checkpoint.directory} in {seconds:.1f} s")

    def _inputs(self, scenario: Scenario, checkpoint: Checkpoint, layers: list[MLA]) -> Inputs:
        """Embedded text where the checkpoint has what it takes."""
        options, first = self.options, layers[0]
        indices = [layer.layer_idx for layer in layers]
        text = options.text or checkpoint.directory / "heldout.txt"
        try:
            if options.text is None and not text.is_file():
                raise CheckpointError("no text given")
            found = text_inputs(scenario, indices, checkpoint, text)
        except CheckpointError as error:
            # A text that was asked for is used or refused.
            if options.text is not None:
                raise
            width = first.config.hidden_size
            found = random_inputs(scenario, indices, width, options.seed, str(error))
        return found.to(first.device, first.dtype)

    def _steps(self, engine: Engine, scenario: Scenario, inputs: Inputs) -> list[Outcome]:
        done = dict.fromkeys(scenario.new_tokens, 0)
        outcomes = []
        with self.bar("running", sum(step.tokens for step in scenario.steps)) as advance:
            for step in scenario.steps:
                spans = [(work.request, done[work.request], work.tokens) for work in step.work]
                hidden = {
                    layer: torch.cat([rows[name][start : start + count] for name, start, count in spans])
                    for layer, rows in inputs.rows.items()
                }
                outcomes.append(engine.run(step, hidden))
                done |= {name: start + count for name, start, count in spans}
                advance(step.tokens)
        return outcomes

    def _verify(
        self,
        engine: Engine,
        scenario: Scenario,
        checkpoint: Checkpoint,
        inputs: Inputs,
        outcomes: list[Outcome],
    ) -> dict[tuple[int, int], list[float]]:
        """Relative errors by step and layer, one for each request of the step."""
        errors = {}
        total = len(engine.layers) * sum(scenario.new_tokens.values())
        with self.bar("verifying", total) as advance:
            for layer in engine.layers:
                index = layer.layer_idx
                filled = {name: rows for (of, name), rows in engine.filled.items() if of == index}
                exact = exact_weights(layer, checkpoint.attention(index))
                reader = partial(engine.rows, layer) if is_quantised(layer.layout) else None
                judge = Judge.of(layer.config, exact, scenario, inputs.rows[index], filled, reader, advance)
                for number, outcome in enumerate(outcomes):
                    rows = outcome.outputs[index].split([work.tokens for work in outcome.step.work])
                    errors[number, index] = [
                        judge.error(work, output_TD)
                        for work, output_TD in zip(outcome.step.work, rows, strict=True)
                    ]
        return errors

    def _report(
        self,
        engine: Engine,
        inputs: Inputs,
        outcomes: list[Outcome],
        errors: dict[tuple[int, int], list[float]],
    ) -> Report:
        first = engine.layers[0]
        steps = []
        for number, outcome in enumerate(outcomes):
            judged = [errors[number, layer.layer_idx] for layer in engine.layers] if errors else []
            works = [
                WorkReport(work, max((error[i] for error in judged), default=None))
                for i, work in enumerate(outcome.step.work)
            ]
            steps.append(StepReport(outcome.step.name, works, outcome.prepare_seconds, outcome.layer_seconds))
        return Report(
            model=self.options.model or str(self.options.checkpoint),
            layers=[layer.layer_idx for layer in engine.layers],
            plan=first.plan,
            cache=first.layout.id,
            inputs=inputs.source,
            steps=steps,
            weights_bytes=sum(_bytes(layer) for layer in engine.layers),
            cache_bytes=engine.cache_bytes,
            cache_bytes_per_token=engine.pool.bytes_per_token,
            tolerance=tolerance(first.dtype, first.layout) if errors else None,
        )


def _heading(layers: list[MLA]) -> str:
    first = layers[0]
    config = first.config
    indices = ", ".join(str(layer.layer_idx) for layer in layers)
    return "\n".join(
        [
            f"model    {config.model_type}, {config.hidden_size} hidden, {config.num_heads} heads, "
            f"layers {indices} in {first.plan.request.dtype}",
            f"cache    {first.layout.id}, {first.layout.bytes_per_token} bytes a token and layer",
            str(first.plan),
        ]
    )


def _bytes(layer: MLA) -> int:
    return sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise ConfigError(f"not a device: {text!r}; write cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {text!r} is not supported; write cpu, cuda or cuda:0")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {text!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices; run on cpu, "
            "or ask with mla explain --device cuda:sm_90 what would run"
        )
    return device
