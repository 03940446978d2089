"""Run one trained layer on the backend named in the first argument; print how far from the oracle it ended.

Run by the packaging tests in an installation: `python use_layer.py BACKEND CHECKPOINT`. Of seven tokens five
are prefilled and two decoded. Legend: T tokens, D model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

import mla_core
from mla_core import MLA, Batch, MLAConfig, reference

PREFIX = "model.layers.0.self_attn."
PAGE_SIZE, TABLE = 4, [[2, 0]]


def run(layer: MLA, hidden_TD: torch.Tensor) -> torch.Tensor:
    cache = layer.new_cache(num_pages=3, page_size=PAGE_SIZE)
    outputs = []
    for start, stop in [(0, 5), (5, 6), (6, 7)]:
        step = layer.prepare(Batch.build([stop - start], [start], TABLE, PAGE_SIZE), cache)
        outputs.append(layer(hidden_TD[start:stop], step))
    return torch.cat(outputs)


def main(backend: str, checkpoint: str) -> None:
    config = MLAConfig.from_hf(checkpoint)
    tensors = load_file(Path(checkpoint) / "model.safetensors")
    weights = {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
    hidden_TD = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(0))
    layer = MLA(config, backend=backend, dtype=torch.float32)
    layer.load_hf(weights)
    exact = {name: value.double() for name, value in weights.items()}
    wanted_TD = reference.attention_layer(config, exact, hidden_TD.double()).hidden_SD
    with torch.no_grad():
        error = (run(layer, hidden_TD) - wanted_TD).abs().max() / wanted_TD.abs().max()
    report = {"core": mla_core.__file__, "choices": layer.plan.choices, "error": float(error)}
    print(json.dumps(report | {"versions": layer.plan.versions}))


main(*sys.argv[1:])
