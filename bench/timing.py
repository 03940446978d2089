"""Fair timing on a machine that is not quiet: contestants take turns, and the ratio is taken turn by turn."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch

__all__ = ["Call", "Summary", "interleaved", "machine", "note", "ratios", "repeated", "summary"]

Call = Callable[..., Any]


@dataclass(frozen=True)
class Summary:
    """Median, extremes and number of some samples."""

    median: float
    min: float
    max: float
    samples: int

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 4) for name, value in asdict(self).items()}


def summary(samples: Iterable[float]) -> Summary:
    values = list(samples)
    return Summary(median(values), min(values), max(values), len(values))


def interleaved(calls: Mapping[str, Call], rounds: int, what: str) -> dict[str, list[float]]:
    """Milliseconds of each call: one call each a round. Callers have warmed them up.

    The order turns from round to round, so that nobody always runs behind the same neighbour.
    """
    names = list(calls)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        note(f"{what}: round {turn + 1} of {rounds}")
        for offset in range(len(names)):
            name = names[(turn + offset) % len(names)]
            start = perf_counter()
            calls[name]()
            taken[name].append(1e3 * (perf_counter() - start))
    return taken


def ratios(slower: list[float], faster: list[float]) -> Summary:
    """slower / faster, round by round."""
    return summary(a / b for a, b in zip(slower, faster, strict=True))


def repeated(calls: Mapping[str, Call], rounds: int, repeats: int) -> dict[str, list[float]]:
    """Microseconds of processor time that this thread spends in each call, averaged over `repeats` calls.

    For calls of some microseconds on one thread: time in which other processes had the core does not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            start = thread_time()
            for _ in range(repeats):
                call()
            # The first round only warms up.
            if turn:
                taken[name].append(1e6 * (thread_time() - start) / repeats)
    return taken


def machine() -> dict[str, Any]:
    """What a reader needs to place the figures; nothing that identifies the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def note(text: str) -> None:
    """Progress, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r{text:<70}", end="", file=sys.stderr, flush=True)


def _cpu_model() -> str:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def _commit() -> str:
    """The commit that was measured; "+" when package sources differ from it."""
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "mla_core", "plugins")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
