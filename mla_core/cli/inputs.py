"""Hidden states for the requests of a scenario: embedded text where a checkpoint allows it, else random.

Legend: T tokens, D model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mla_core.checkpoint import Checkpoint
from mla_core.cli.scenario import Scenario
from mla_core.cli.seeds import stream
from mla_core.config_hf import text_part
from mla_core.errors import CheckpointError

__all__ = ["Inputs", "random_inputs", "text_inputs"]


@dataclass(frozen=True)
class Inputs:
    """Hidden states [T, D] of every request's new tokens, by layer and request, and where they come from."""

    rows: Mapping[int, Mapping[str, Tensor]]
    source: str

    def to(self, device: torch.device, dtype: torch.dtype) -> Inputs:
        moved = {
            layer: {name: rows.to(device, dtype) for name, rows in requests.items()}
            for layer, requests in self.rows.items()
        }
        return Inputs(moved, self.source)


def random_inputs(scenario: Scenario, layers: Sequence[int], width: int, seed: int, why: str) -> Inputs:
    """Normal hidden states, the same for all layers."""
    generator = stream(seed, "inputs")
    rows = {
        name: torch.randn(tokens, width, generator=generator) for name, tokens in scenario.new_tokens.items()
    }
    return Inputs(dict.fromkeys(layers, rows), f"random hidden states, seed {seed} ({why})")


def text_inputs(scenario: Scenario, layers: Sequence[int], checkpoint: Checkpoint, text: Path) -> Inputs:
    """Embeddings of successive pieces of a text, each through the layer's own input norm.

    Raises CheckpointError when the checkpoint has no embedding, norm or tokenizer to do it with.
    """
    places = {layer: checkpoint.place(layer) for layer in layers}
    needed = sum(scenario.new_tokens.values())
    tokens = _tokens(checkpoint.directory / "tokenizer.json", text, needed)
    embedded_TD = checkpoint.rows(places[layers[0]].embedding, tokens).float()
    norms = checkpoint.read(place.input_norm for place in places.values())
    epsilon = _norm_epsilon(checkpoint.hf_config)
    rows = {}
    for layer, place in places.items():
        weight = norms[place.input_norm].float()
        normed_TD = F.rms_norm(embedded_TD, weight.shape, weight, epsilon)
        rows[layer] = _shared_out(normed_TD, scenario.new_tokens)
    return Inputs(rows, f"embeddings of {needed} tokens of {text.name}")


def _tokens(tokenizer: Path, text: Path, count: int) -> list[int]:
    """The first tokens of a text, which starts over when it is too short."""
    # Optional: only text needs a tokenizer.
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise CheckpointError("the package tokenizers is not installed; pip install tokenizers") from error
    if not tokenizer.is_file():
        raise CheckpointError(f"{tokenizer} does not exist")
    try:
        # A few characters a token in any language; the whole text of a book would take a while.
        words = text.read_text(encoding="utf-8")[: 32 * count]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{text} cannot be read as text: {error}") from error
    found: list[int] = Tokenizer.from_file(str(tokenizer)).encode(words).ids
    if not found:
        raise CheckpointError(f"{text} holds no text")
    return (found * -(-count // len(found)))[:count]


def _norm_epsilon(hf_config: Mapping[str, Any]) -> float:
    return float(text_part(hf_config).get("rms_norm_eps", 1e-6))


def _shared_out(rows_TD: Tensor, lengths: Mapping[str, int]) -> dict[str, Tensor]:
    return dict(zip(lengths, rows_TD.split(list(lengths.values())), strict=True))
