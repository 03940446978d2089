"""The evidence of one run: every cell's verdict, and on what, with what and when it was found."""

from __future__ import annotations

import platform
import subprocess
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from mla_core.capabilities import Requirement
from mla_core.conformance.cells import Cell
from mla_core.conformance.verdicts import FAILURES, Claim, Outcome, Verdict, judge
from mla_core.errors import ConfigError
from mla_core.manifest import BackendInfo, validation_problems
from mla_core.request import installed_version

__all__ = ["Evidence", "Judged", "Report", "evidence_of", "judged", "read_report", "versions_of"]

_PACKAGES = ("mla-core", "torch", "triton")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Judged(_Record):
    """One cell with its verdict. `noticed` is for controls: did the check see the deliberate fault?"""

    id: str
    group: str
    kernel: str
    field: str
    value: str
    claim: Claim
    layout: str
    dtype: str
    verdict: Verdict
    noticed: bool | None = None
    detail: str = ""
    error: float | None = None
    seconds: float = 0.0

    @property
    def fails(self) -> bool:
        """Does it fail a run, known gaps aside?"""
        return self.verdict in FAILURES or self.noticed is False


class Evidence(_Record):
    """What was tested, where, and when."""

    backend: str
    distribution: str | None
    version: str | None
    device: str
    device_name: str
    versions: dict[str, str]
    # Of the plugin's repository, "+" when it had changes; None outside one.
    commit: str | None
    date: str
    quick: bool
    seed: int
    # Of the backend, where the run named some.
    options: dict[str, str] = {}


class Report(_Record):
    """One run of the kit."""

    format: Literal[1] = 1
    evidence: Evidence
    cells: tuple[Judged, ...]

    def counts(self) -> dict[str, int]:
        """Number of cells by verdict, controls apart."""
        counted = Counter(cell.verdict.value for cell in self.cells if cell.noticed is None)
        return {verdict.value: counted[verdict.value] for verdict in Verdict}

    def by_id(self) -> dict[str, Judged]:
        return {cell.id: cell for cell in self.cells}


def judged(cell: Cell, outcome: Outcome) -> Judged:
    """The verdict on one tried cell. A control is verified when its check noticed the fault."""
    noticed = None
    if cell.group == "control":
        noticed = None if outcome.kind == "unavailable" else outcome.kind == "wrong"
        verdict = Verdict.VERIFIED if noticed else Verdict.UNVERIFIED
    else:
        verdict = judge(cell.claim, outcome, [reason.field for reason in cell.reasons])
    return Judged(
        id=cell.id,
        group=cell.group,
        kernel=cell.kernel,
        field=cell.field,
        value=cell.value,
        claim=cell.claim,
        layout=cell.layer.layout,
        dtype=cell.layer.dtype,
        verdict=verdict,
        noticed=noticed,
        detail=outcome.detail or "; ".join(str(reason) for reason in cell.reasons),
        error=outcome.error,
        seconds=outcome.seconds,
    )


def evidence_of(
    info: BackendInfo,
    device: str,
    device_name: str,
    *,
    quick: bool,
    seed: int,
    options: Mapping[str, str] | None = None,
) -> Evidence:
    """Who, where, with what and when, for a run that starts now."""
    return Evidence(
        backend=info.name,
        distribution=info.distribution,
        version=info.version,
        device=device,
        device_name=device_name,
        versions=versions_of(info),
        commit=_commit(info),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        quick=quick,
        seed=seed,
        options=dict(options or {}),
    )


def versions_of(info: BackendInfo) -> dict[str, str]:
    """Versions of what a result depends on, from metadata alone."""
    names = [*_PACKAGES, *(Requirement(text).name for text in info.capabilities.requires)]
    found = {name: installed_version(name) for name in dict.fromkeys(names)}
    here = {name: version for name, version in found.items() if version is not None}
    return {"python": platform.python_version(), **here}


def _commit(info: BackendInfo) -> str | None:
    """Commit of the repository that the plugin's code lies in."""
    spec = find_spec(info.target.partition(":")[0].partition(".")[0])
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--", str(folder)) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def read_report(path: Path) -> Report:
    """A report from its file. Raises ConfigError when it cannot be read."""
    try:
        return Report.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        raise ConfigError(f"{path.name} is no report: {'; '.join(validation_problems(error)[:3])}") from error
    except OSError as error:
        raise ConfigError(f"cannot read {path.name}: {error}") from error
