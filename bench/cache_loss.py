"""What each cache layout costs a trained model: loss on held-out text, and the error of attention outputs.

    python bench/cache_loss.py [--windows 8] [--tokens 1024] [layout ...]

transformers runs the model in float32 with our layers as its attention. Prefill is absorbed, so that every
key and value, the token's own included, is read back from the cache. Legend: W windows, S tokens, D model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from mla_core import MLA, Batch, LatentCache, MLAConfig, Scales, Step
from mla_core.cache import layout_for, layout_ids

__all__ = ["CASES", "CachedModel", "Case", "heldout", "output_errors", "row_errors", "scales_of"]

MODEL = Path(__file__).parents[1] / "tests" / "data" / "tiny_mla_kjv"
PAGE_SIZE = 64


@dataclass(frozen=True)
class Case:
    """A layout, and where its scales come from."""

    layout: str
    calibrate: bool = False
    power_of_two: bool = False

    def __str__(self) -> str:
        notes = {"calibrated": self.calibrate, "powers of two": self.power_of_two}
        return " ".join([f"`{self.layout}`", *(note for note, on in notes.items() if on)])


CASES = (
    Case("fp32"),
    Case("bf16"),
    Case("fp8_e4m3"),
    Case("fp8_e4m3", calibrate=True),
    Case("fp8_ds_mla"),
    Case("fp8_ds_mla", power_of_two=True),
    Case("nvfp4"),
    Case("nvfp4", calibrate=True),
    Case("nvfp4_rope_bf16"),
    Case("nvfp4_rope_bf16", calibrate=True),
)


def heldout(windows: int, tokens: int) -> Tensor:
    """Token ids [W, S] of text that the model was not trained on."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    ids = tokenizer.encode((MODEL / "heldout.txt").read_text(encoding="utf-8")).ids
    return torch.tensor(ids[: windows * tokens]).view(windows, tokens)


class CachedAttention(nn.Module):
    """Looks like transformers' attention; positions, mask and cache come from the prepared step.

    `hidden` and `output` are what it saw and made last.
    """

    hidden: Tensor
    output: Tensor
    cache: LatentCache
    step: Step

    def __init__(self, layer: MLA, scales: Scales) -> None:
        super().__init__()
        self.layer, self.scales = layer, scales

    def start(self, batch: Batch, pages: int) -> None:
        """An empty cache for a new batch."""
        scales = {"k_scale": self.scales.k_scale, "global_scale": self.scales.global_scale}
        self.cache = self.layer.new_cache(pages, PAGE_SIZE, power_of_two=self.scales.power_of_two, **scales)
        self.step = self.layer.prepare(batch, self.cache)

    def forward(self, hidden_states: Tensor, **_: object) -> tuple[Tensor, None]:
        self.hidden = hidden_states
        self.output = self.layer(hidden_states.flatten(0, 1), self.step).view_as(hidden_states)
        return self.output, None


class CachedModel:
    """The trained model over caches of one layout; `scales` has one entry a layer."""

    def __init__(self, layout: str, scales: Sequence[Scales] = (Scales(),) * 3) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            MODEL, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        self.attention = []
        for block, factors in zip(self.model.model.layers, scales, strict=True):
            block.self_attn = CachedAttention(_layer(block.self_attn, layout), factors)
            self.attention.append(block.self_attn)

    @torch.no_grad()
    def loss(self, ids_WS: Tensor) -> float:
        """Mean loss of the next token within each window."""
        windows, tokens = ids_WS.shape
        pages = -(-tokens // PAGE_SIZE)
        table = torch.arange(windows * pages).view(windows, pages)
        batch = Batch.build([tokens] * windows, [0] * windows, table, PAGE_SIZE)
        for attention in self.attention:
            attention.start(batch, windows * pages)
        logits = self.model(ids_WS, use_cache=False).logits[:, :-1]
        return float(nn.functional.cross_entropy(logits.flatten(0, 1), ids_WS[:, 1:].flatten()))


def _layer(module: nn.Module, layout: str) -> MLA:
    config = MLAConfig.from_hf(MODEL)
    layer = MLA(config, cache=layout, dtype=torch.float32, prefill_form="absorb")
    layer.load_hf(module.state_dict())
    return layer


def scales_of(case: Case, exact: CachedModel) -> list[Scales]:
    """Scales of each layer: where the case says so, from the rows that an exact cache holds."""
    if not case.calibrate:
        return [Scales(power_of_two=case.power_of_two)] * len(exact.attention)
    layout = layout_for(case.layout, torch.float32, *_widths(exact))
    return [layout.calibrate(*_first_window(attention)) for attention in exact.attention]


@torch.no_grad()
def output_errors(model: CachedModel, exact: CachedModel) -> list[float]:
    """Relative error of each layer's output on the hidden states that the exact model gave it."""
    pairs = zip(model.attention, exact.attention, strict=True)
    return [_relative(ours(theirs.hidden)[0], theirs.output) for ours, theirs in pairs]


def row_errors(model: CachedModel, exact: CachedModel, part: int) -> list[float]:
    """Relative error of each layer's latent (part 0) or rope (1) rows; after `output_errors`."""
    pairs = zip(model.attention, exact.attention, strict=True)
    return [_relative(_first_window(ours)[part], _first_window(theirs)[part]) for ours, theirs in pairs]


def _first_window(attention: CachedAttention) -> tuple[Tensor, Tensor]:
    tokens = attention.hidden.shape[1]
    return attention.cache.read(torch.arange(-(-tokens // PAGE_SIZE)), tokens)


def _widths(model: CachedModel) -> tuple[int, int]:
    layout = model.attention[0].layer.layout
    return layout.latent, layout.rope


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def main() -> None:
    """Print the table of docs/cache-layouts.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("layouts", nargs="*", help="ids of layouts, by default all")
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.layout in (arguments.layouts or layout_ids())]
    ids_WS = heldout(arguments.windows, arguments.tokens)
    exact, reference = CachedModel("fp32"), CachedModel("bf16")
    exact.loss(ids_WS)
    bf16 = reference.loss(ids_WS)
    print("| cache | bytes a token | loss | against bf16 | output error | latent error | rope error |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        model = CachedModel(case.layout, scales_of(case, exact))
        loss = model.loss(ids_WS)
        errors = [mean(output_errors(model, exact)), *(mean(row_errors(model, exact, i)) for i in (0, 1))]
        cells = [
            str(case),
            str(model.attention[0].cache.bytes_per_token),
            f"{loss:.4f}",
            f"{loss - bf16:+.4f}",
        ]
        print("|", " | ".join([*cells, *(f"{error:.1e}" for error in errors)]), "|", flush=True)


if __name__ == "__main__":
    main()
