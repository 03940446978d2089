"""Times one DeepSeek-V3 attention layer on the CPU against what a user has today.

python bench/decode_cpu.py [--json FILE] [--dtype bfloat16 ...] [--rounds N] [--threads N]

Exit status: 0 when every target is met, 1 when one is missed, 2 for contestants that disagree. See README.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from contestants import Paged, Problem, Transformers
from handwritten import HandWritten, flash, matmul
from overhead import Inline, stages
from timing import Summary, interleaved, machine, note, ratios, repeated, summary
from torch import Tensor

BACKEND = "vanilla"
REQUESTS, CACHED, PROMPT = 4, 4096, 512
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
# Largest distance of two right answers, relative to their norm: some roundings of each dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Disagreement(Exception):
    """Two contestants do not compute the same."""


@dataclass(frozen=True)
class Target:
    """A figure with its bound; `at_least` says on which side of the bound it must lie."""

    name: str
    figure: Summary
    bound: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.figure.median >= self.bound if self.at_least else self.figure.median <= self.bound

    def as_dict(self) -> dict[str, Any]:
        bound = {"at_least" if self.at_least else "at_most": self.bound}
        return self.figure.as_dict() | bound | {"met": self.met}


@dataclass(frozen=True)
class Case:
    """One comparison: what took how long, how far the answers are apart, and the targets."""

    name: str
    unit: str
    timings: dict[str, Summary]
    targets: list[Target]
    distances: dict[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "case": self.name,
            "unit": self.unit,
            "timings": {name: figures.as_dict() for name, figures in self.timings.items()},
            "targets": {target.name: target.as_dict() for target in self.targets},
            "distances": self.distances,
        }


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    cases: list[Case] = []
    try:
        with torch.inference_mode():
            for case in _cases(options):
                note("")
                _show(case)
                cases.append(case)
    except Disagreement as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        torch.set_num_threads(options.threads)
        evidence = {"machine": machine(), "cases": [case.as_dict() for case in cases]}
        options.json.write_text(json.dumps(evidence, indent=2) + "\n", encoding="utf-8")
    return 0 if all(target.met for case in cases for target in case.targets) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, machine and versions here")
    parser.add_argument(
        "--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"]
    )
    parser.add_argument("--rounds", type=int, default=15, help="timed calls of each contestant (default 15)")
    parser.add_argument("--slow-rounds", type=int, default=3, help="against transformers (default 3)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    return parser.parse_args()


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    for name in options.dtype:
        note(f"{name}: building")
        problem = Problem.random(getattr(torch, name), REQUESTS, CACHED, PROMPT)
        paged = Paged(problem, BACKEND)
        yield decode_by_hand(problem, paged, options.rounds)
        yield cache_memory(problem, paged)
        transformers = Transformers(problem)
        yield decode_transformers(problem, paged, transformers, options.slow_rounds)
        yield prefill(problem, paged, transformers, options.slow_rounds)
    for requests in (1, 4):
        yield framework_overhead(requests)


def decode_by_hand(problem: Problem, paged: Paged, rounds: int) -> Case:
    """The paged layer against the absorbed step written by hand over a contiguous cache."""
    hand = HandWritten(problem)
    by_hand = {
        "hand-written, fused kernel": lambda: hand.decode(flash),
        "hand-written, matmuls": lambda: hand.decode(matmul),
    }
    trial = interleaved(by_hand, 3, f"decode {problem.dtype}, which is faster by hand")
    best = min(trial, key=lambda name: min(trial[name]))
    calls = {"layer with prepare": paged.decode, "layer": paged.forward, best: by_hand[best]}
    distances = _distances(problem, {name: call() for name, call in (calls | by_hand).items()})
    taken = trial | interleaved(calls, rounds, f"decode {problem.dtype} by hand")
    ratio = ratios(taken["layer with prepare"], taken[best])
    return Case(
        name=f"decode, {REQUESTS} x {CACHED} tokens, {_name(problem)}, against hand-written",
        unit="ms",
        timings={name: summary(samples) for name, samples in taken.items()},
        targets=[Target(f"layer with prepare / {best}", ratio, 1.25, at_least=False)],
        distances=distances,
    )


def decode_transformers(problem: Problem, paged: Paged, transformers: Transformers, rounds: int) -> Case:
    """The paged layer against transformers' module, which expands its whole latent cache in every step."""
    theirs = f"transformers ({transformers.implementation})"
    calls = {"layer with prepare": paged.decode, theirs: transformers.decode}
    distances = _distances(problem, {name: call() for name, call in calls.items()})
    taken = interleaved(calls, rounds, f"decode {problem.dtype}, transformers")
    return Case(
        name=f"decode, {REQUESTS} x {CACHED} tokens, {_name(problem)}, against transformers",
        unit="ms",
        timings={name: summary(samples) for name, samples in taken.items()},
        targets=[_faster(theirs, taken, 40.0)],
        distances=distances,
    )


def prefill(problem: Problem, paged: Paged, transformers: Transformers, rounds: int) -> Case:
    theirs = f"transformers ({transformers.implementation})"
    calls = {"layer with prepare": paged.prefill, theirs: transformers.prefill}
    distances = _distances(problem, {name: call() for name, call in calls.items()})
    taken = interleaved(calls, rounds, f"prefill {problem.dtype}")
    return Case(
        name=f"prefill, {PROMPT} tokens, {_name(problem)}",
        unit="ms",
        timings={name: summary(samples) for name, samples in taken.items()},
        targets=[_faster(theirs, taken, 1.0)],
        distances=distances,
    )


def cache_memory(problem: Problem, paged: Paged) -> Case:
    """Values the paged cache really allocates for each token it has room for."""
    values = paged.cache.data.untyped_storage().nbytes() / problem.dtype.itemsize / paged.table.numel() / 64
    figure = summary([values])
    exact = float(problem.latent_BSL.shape[2] + problem.k_rope_BSR.shape[2])
    return Case(
        name=f"cache memory, {_name(problem)}",
        unit="values a token",
        timings={"paged cache": figure},
        targets=[Target("values a token", figure, exact, at_least=False)],
    )


def framework_overhead(requests: int) -> Case:
    """Python around the torch calls, on one thread."""
    torch.set_num_threads(1)
    problem = Problem.random(torch.float32, requests, 40, 1, **TINY)
    paged = Paged(problem, BACKEND)
    calls = {
        "layer": paged.forward,
        "inline, products through nn.Module": Inline(paged, modules=True).decode,
        "inline, bare tensors": Inline(paged, modules=False).decode,
    }
    distances = _distances(problem, {name: call() for name, call in calls.items()})
    taken = repeated(calls, rounds=300, repeats=5)
    parts = repeated(stages(paged), rounds=100, repeats=5)
    return Case(
        name=f"framework overhead, decode of {requests} at tiny dims",
        unit="µs",
        timings={name: summary(samples) for name, samples in taken.items()}
        | {f"  {name}": summary(samples) for name, samples in parts.items()},
        targets=[
            Target(f"layer - {name}", _excess(taken["layer"], taken[name]), 100.0, at_least=False)
            for name in list(calls)[1:]
        ],
        distances=distances,
    )


def _excess(longer: list[float], shorter: list[float]) -> Summary:
    """longer - shorter, round by round."""
    return summary(a - b for a, b in zip(longer, shorter, strict=True))


def _faster(theirs: str, taken: dict[str, list[float]], bound: float) -> Target:
    ratio = ratios(taken[theirs], taken["layer with prepare"])
    return Target(f"{theirs} / layer with prepare", ratio, bound, at_least=True)


def _distances(problem: Problem, outputs: dict[str, Tensor]) -> dict[str, float]:
    """How far each answer is from the last one. Raises Disagreement beyond what rounding explains."""
    *others, (reference, right) = outputs.items()
    found = {}
    for name, output in others:
        apart = (output.double() - right.double()).norm() / right.double().norm()
        found[f"{name} to {reference}"] = float(f"{apart:.2e}")
        # Written so that a NaN disagrees.
        if not apart <= TOLERANCE[problem.dtype]:
            raise Disagreement(f"{name} and {reference} differ by {apart:.2e} of the norm in {problem.dtype}")
    return found


def _name(problem: Problem) -> str:
    return str(problem.dtype).removeprefix("torch.")


def _show(case: Case) -> None:
    print(f"\n{case.name}")
    for name, figures in case.timings.items():
        print(f"  {name:<45}{figures.median:>11.1f} {case.unit}   {figures.min:.1f} to {figures.max:.1f}")
    for target in case.targets:
        figure, side = target.figure, ">=" if target.at_least else "<="
        verdict = "met" if target.met else "MISSED"
        print(
            f"  {target.name:<45}{figure.median:>11.2f} {side} {target.bound:g} {verdict}"
            f"   {figure.min:.2f} to {figure.max:.2f}"
        )
    for name, apart in case.distances.items():
        print(f"  distance of {name}: {apart:.1e}")


if __name__ == "__main__":
    sys.exit(main())
