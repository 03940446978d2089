"""The process that tries cells: one line of JSON in, one line of JSON out, until its input ends.

Run by `mla_core.conformance.probe` as `python -m mla_core.conformance.worker`. Whatever a backend prints
goes to stderr.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, TextIO

import torch

from mla_core.cache.layout import layout_ids
from mla_core.conformance.bench import Bench, NoMethod, Unavailable, Wrong, poisoned_memory
from mla_core.conformance.catalogue import Check
from mla_core.conformance.cells import Cell
from mla_core.conformance.fallback import register_fallback
from mla_core.conformance.subject import Subject
from mla_core.conformance.verdicts import Outcome
from mla_core.device import device_info
from mla_core.errors import UnsupportedError

__all__ = ["attempt", "main"]


def attempt(backend: str, cell: Cell) -> Outcome:
    """Try one cell; whatever happens becomes an Outcome."""
    started = time.perf_counter()
    bench = Bench(Subject.parse(backend), cell)
    outcome = _outcome(bench, _function(cell.check))
    spent = round(time.perf_counter() - started, 4)
    error = outcome.error if outcome.error is not None else bench.worst
    return outcome.model_copy(update={"seconds": spent, "error": min(error, 1e30)})


def _outcome(bench: Bench, check: Callable[[Bench], None]) -> Outcome:
    try:
        with torch.no_grad():
            check(bench)
    except Wrong as wrong:
        return Outcome(kind="wrong", detail=wrong.detail, error=wrong.error)
    except Unavailable as reason:
        return Outcome(kind="unavailable", detail=str(reason))
    except NoMethod as reason:
        return Outcome(kind="refused", detail=str(reason), fields=("kernel",))
    except UnsupportedError as refusal:
        fields = tuple(dict.fromkeys(reason.field for reason in refusal.reasons))
        return Outcome(kind="refused", detail=str(refusal), fields=fields, touched=bench.touched)
    # A backend may fail in any way; what happened is the outcome.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return Outcome(kind="raised", detail=f"{type(error).__name__}: {error}"[:500], touched=bench.touched)
    return Outcome(kind="right")


def _function(check: str) -> Callable[[Bench], None]:
    module, _, function = Check(check, ()).target.partition(":")
    found: Callable[[Bench], None] = getattr(import_module(module), function)
    return found


def _hello() -> dict[str, Any]:
    """What the parent wants to know once. What torch loads late is loaded here, at no cell's expense."""
    with poisoned_memory():
        torch.empty(1)
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.insert(0, str(device_info(torch.device("cuda", torch.cuda.current_device()))))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"devices": devices, "device_name": name, "layouts": layout_ids()}


def _replies(stream: TextIO) -> TextIO:
    """The real standard output; from here on everybody else's prints go to stderr."""
    replies = os.fdopen(os.dup(stream.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), stream.fileno())
    return replies


def main() -> None:
    """Answer requests until standard input ends."""
    replies = _replies(sys.stdout)
    register_fallback()
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "hello":
            answer = _hello()
        else:
            cell = Cell.model_validate(asked["cell"])
            answer = attempt(asked["backend"], cell).model_dump(mode="json")
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
