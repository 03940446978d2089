"""How GPU checks run: kernels compile in the background, parts wait for theirs, results become evidence."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_scenes import ARCH, DEVICE, LINES, Packed, Paged, backend, left, say

from mla_core import registry
from mla_core.conformance.report import evidence_of
from mla_flashinfer.manifest import INFO


def register() -> None:
    """Backends by name, also where the packages are not installed but on the path."""
    from mla_vanilla.manifest import INFO as VANILLA

    for info in (INFO, VANILLA):
        if info.name not in registry.names():
            registry.add(info)


@dataclass(frozen=True)
class Compiled:
    """A kernel that checks need, and how long one H200 machine took to compile it beside three others."""

    kernel: str
    impl: str
    seconds: float
    changes: dict[str, Any] = field(default_factory=dict)

    def first_plan(self) -> str:
        """Plan something small, unless compiling would take more time than is left."""
        if left() < self.seconds:
            raise TimeoutError(f"{left():.0f} s are left, and compiling may take {self.seconds:.0f}")
        return first_plan(self.kernel, self.impl, self.changes)


def run_parts(parts: Sequence[tuple[Callable[[], None], tuple[Compiled, ...]]]) -> None:
    """Compile in the background, in the order of need; run each part when its kernels are there."""
    # The first import alone, so that a FlashInfer that does not import says so once.
    registry.load(INFO.name)
    pool = ThreadPoolExecutor(4)
    needed = {id(kernel): kernel for _, kernels in parts for kernel in kernels}
    jobs: dict[int, Future[str]] = {key: pool.submit(kernel.first_plan) for key, kernel in needed.items()}
    told: set[int] = set()
    for part, kernels in parts:
        missing = [kernel for kernel in kernels if not _ready(jobs[id(kernel)], kernel, told)]
        if missing:
            say(f"SKIP {part.__name__}: its kernels are not compiled")
        else:
            attempt(part)
    pool.shutdown(wait=False, cancel_futures=True)


def _ready(job: Future[str], kernel: Compiled, told: set[int]) -> bool:
    """Wait for a compiled kernel as long as there is time; says once how it went."""
    name = f"compile {kernel.kernel} {kernel.impl} {kernel.changes or ''}".strip()
    try:
        line = f"PASS {name}: {job.result(timeout=max(left(), 0))}"
    except TimeoutError as error:
        line = f"SKIP {name}: {error or 'still compiling'}"
    # Whatever else goes wrong is this kernel's result; the other parts still run.
    except Exception as error:  # noqa: BLE001
        line = f"FAIL {name}: {type(error).__name__}: {str(error)[:300]}"
    if id(kernel) not in told:
        told.add(id(kernel))
        say(line)
    return line.startswith("PASS")


def first_plan(kernel: str, impl: str, changes: dict[str, Any]) -> str:
    started = time.perf_counter()
    kernels, context = backend(impl, 16, kernel, **changes)
    if kernel == "mha_prefill":
        kernels.prepare(kernel, Packed(context, (1,), (3,)).segments(), None)
    else:
        call = Paged(context, (1,), (3,))
        kernels.prepare(kernel, call.segments(), call.cache.geometry)
    return f"{time.perf_counter() - started:.1f} s"


def attempt(part: Callable[[], None]) -> None:
    """A part that cannot even build its backends is a failure like a check's."""
    try:
        part()
    except Exception as error:  # noqa: BLE001
        say(f"FAIL {part.__name__}: {type(error).__name__}: {str(error)[:500]}")


def write_evidence(folder: Path) -> None:
    """All lines as text, and as records with what they were found on."""
    (folder / "flashinfer_gpu_check.txt").write_text("\n".join(LINES), encoding="utf-8")
    about = evidence_of(INFO, ARCH, torch.cuda.get_device_name(DEVICE), quick=False, seed=0)
    found = {
        "device": about.device_name,
        "versions": about.versions,
        "commit": about.commit,
        "date": about.date,
        "command": "python plugins/flashinfer/tests/gpu_check.py",
        "records": [record(line) for line in LINES if not line.startswith("INFO")],
    }
    (folder / f"h200-{about.date}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def record(line: str) -> dict[str, str]:
    """`KIND what: result`; what is checked may hold dicts."""
    found = re.fullmatch(r"(\w+) ((?:\{[^}]*\}|[^:{])+)(?:: (.*))?", line, re.DOTALL)
    kind, what, result = found.groups() if found else ("INFO", line, None)
    return {"kind": kind, "what": what, "result": result or "-"}
