"""Tries cells in a child process with a time limit, and starts a new one when it died or had to be ended."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import TracebackType
from typing import IO, Any

from pydantic import BaseModel, ConfigDict

from mla_core.conformance.cells import Cell
from mla_core.conformance.verdicts import Outcome
from mla_core.errors import KernelError

__all__ = ["Here", "Probe"]

# The first answer includes importing torch and the backend.
START_SECONDS = 180.0


class Here(BaseModel):
    """What the child process found: devices, the best one first, and the layouts that the core has."""

    model_config = ConfigDict(frozen=True)

    devices: tuple[str, ...]
    device_name: str
    layouts: tuple[str, ...]


class Probe:
    """A child process, started when first needed."""

    def __init__(self, *, seconds: float = 120.0, environ: Mapping[str, str] | None = None) -> None:
        self.seconds = seconds
        self._environ = dict(os.environ if environ is None else environ)
        self._child: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._pending = b""

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def here(self) -> Here:
        """What this machine offers. Raises KernelError when the child cannot start."""
        answer = self._ask({"do": "hello"}, START_SECONDS)
        if isinstance(answer, Outcome):
            raise KernelError(f"the conformance worker did not start: {answer.detail}")
        return Here.model_validate(answer)

    def try_cell(self, backend: str, cell: Cell) -> Outcome:
        """The outcome of one cell of a backend, a name with options or without; a crash or a hang is one
        too, and costs only this cell.
        """
        if self._child is None:
            self.here()
        answer = self._ask(
            {"do": "try", "backend": backend, "cell": cell.model_dump(mode="json")}, self.seconds
        )
        return answer if isinstance(answer, Outcome) else Outcome.model_validate(answer)

    def close(self) -> None:
        """End the child process."""
        if self._child is not None:
            self._end(self._child)
        self._child, self._pending = None, b""

    def _ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any] | Outcome:
        child = self._child or self._start()
        started = time.monotonic()
        try:
            assert child.stdin is not None
            child.stdin.write(json.dumps(question).encode() + b"\n")
            child.stdin.flush()
            line = self._line(child, seconds)
        except BrokenPipeError:
            line = b""
        spent = round(time.monotonic() - started, 4)
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        return self._lost(child, spent, seconds)

    def _start(self) -> subprocess.Popen[bytes]:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the child
        self._child = subprocess.Popen(
            [sys.executable, "-m", "mla_core.conformance.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self._environ,
            start_new_session=True,
        )
        return self._child

    def _line(self, child: subprocess.Popen[bytes], seconds: float) -> bytes:
        """One line of the child's, empty when it ended or time ran out."""
        assert child.stdout is not None
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return b""
                read = os.read(child.stdout.fileno(), 1 << 16)
                if not read:
                    return b""
                self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return line

    def _lost(self, child: subprocess.Popen[bytes], spent: float, seconds: float) -> Outcome:
        hung = child.poll() is None and spent >= seconds
        if not hung:
            child.wait(timeout=10)
        tail = self._tail()
        self.close()
        if hung:
            return Outcome(kind="hung", detail=f"no answer within {seconds:g} s", seconds=spent)
        return Outcome(kind="died", detail=f"{_ended(child.returncode)}; {tail}", seconds=spent)

    def _tail(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        return text.splitlines()[-1][-300:] if text else "it said nothing"

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        if child.poll() is None:
            # The whole group: kernels may have started compilers.
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        for stream in (child.stdin, child.stdout, self._log):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    # What was not yet written to a dead child is of no use to anybody.
                    continue


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process was ended by signal {-code}"
    return f"the process ended with exit code {code}"
