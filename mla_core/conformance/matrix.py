"""The capability matrix: what manifests declare, with the evidence that reports give for it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mla_core.capabilities import DevicePattern
from mla_core.conformance.cells import Cell, cells_of
from mla_core.conformance.report import Evidence, Judged, Report
from mla_core.conformance.values import example_device
from mla_core.conformance.verdicts import FAILURES, Verdict
from mla_core.manifest import BackendInfo
from mla_core.request import DeviceInfo

__all__ = ["SYMBOLS", "Entry", "Matrix", "evidence_line", "matrix_of"]

State = Literal["verified", "declared", "refused", "gap"]
SYMBOLS: dict[State, str] = {"verified": "✓", "declared": "○", "refused": "–", "gap": "!"}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Entry(_Record):
    """One cell of the matrix."""

    backend: str
    device: str
    kernel: str
    layout: str
    dtype: str
    group: str
    field: str
    value: str
    cell: str
    state: State
    # Why it is refused or a gap, or what a skipped cell needs.
    reason: str
    # Where and when it was seen; empty without evidence.
    evidence: str

    @property
    def symbol(self) -> str:
        return SYMBOLS[self.state]


class Matrix(_Record):
    """All entries, and the runs that they rest on."""

    entries: tuple[Entry, ...]
    runs: tuple[Evidence, ...]
    summaries: dict[str, str]

    @property
    def backends(self) -> list[str]:
        return list(self.summaries)

    def of(self, backend: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.backend == backend]


def matrix_of(infos: Iterable[BackendInfo], reports: Sequence[Report]) -> Matrix:
    """The matrix of these backends; a report counts for what its backend still declares the same way."""
    chosen = sorted(infos, key=lambda info: info.name)
    entries = [entry for info in chosen for entry in _entries(info, reports)]
    names = {info.name for info in chosen}
    runs = sorted(
        (report.evidence for report in reports if report.evidence.backend in names),
        key=lambda run: (run.backend, run.device),
    )
    summaries = {info.name: info.summary for info in chosen}
    return Matrix(entries=tuple(entries), runs=tuple(runs), summaries=summaries)


def evidence_line(run: Evidence) -> str:
    """A run in one line."""
    software = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    code = f", commit {run.commit}" if run.commit else ""
    extent = "quick run" if run.quick else "full run"
    name = f"{run.backend} {run.version}" if run.version else run.backend
    return f"{name} on {run.device} ({run.device_name}), {software}{code}, {run.date}, {extent}"


def _entries(info: BackendInfo, reports: Sequence[Report]) -> list[Entry]:
    """One set of entries a device: those that reports are from, else the ones that are declared."""
    mine = {report.evidence.device: report for report in reports if report.evidence.backend == info.name}
    devices = [*mine, *(text for text in _declared_devices(info) if not _covered(text, mine))]
    return [entry for device in devices for entry in _on_device(info, device, mine.get(device))]


def _declared_devices(info: BackendInfo) -> list[str]:
    """A device for each declared pattern, its lowest architecture where it is a range."""
    return [example_device(text) for text in sorted(info.capabilities.devices)]


def _covered(text: str, reports: dict[str, Report]) -> bool:
    """Is there a report from a device that this one stands for?"""
    wanted = DeviceInfo.parse(text)
    pattern = DevicePattern.parse(text.partition(":")[2] or text)
    found = [DeviceInfo.parse(device) for device in reports]
    return any(device.kind == wanted.kind and pattern.fits(device.kind, device.arch) for device in found)


def _on_device(info: BackendInfo, device: str, report: Report | None) -> list[Entry]:
    layouts = {cell.layout for cell in report.cells} if report is not None else set()
    cells = cells_of(info.capabilities, DeviceInfo.parse(device), layouts, quick=False, seed=_seed(report))
    seen = report.by_id() if report is not None else {}
    shown = [cell for cell in cells if cell.group != "control"]
    return [_entry(info.name, device, cell, seen.get(cell.id), report) for cell in shown]


def _seed(report: Report | None) -> int:
    return 0 if report is None else report.evidence.seed


def _entry(backend: str, device: str, cell: Cell, found: Judged | None, report: Report | None) -> Entry:
    # What the manifest says now decides; what was seen of another declaration is no evidence.
    found = found if found is not None and found.claim == cell.claim else None
    refused = "; ".join(str(reason) for reason in cell.reasons)
    return Entry(
        backend=backend,
        device=device,
        kernel=cell.kernel,
        layout=cell.layer.layout,
        dtype=cell.layer.dtype,
        group=cell.group,
        field=cell.field,
        value=cell.value,
        cell=cell.id,
        state=_state(cell, found),
        reason=refused or (found.detail if found is not None else ""),
        evidence="" if found is None or report is None else _seen(found, report.evidence),
    )


def _state(cell: Cell, found: Judged | None) -> State:
    if found is not None and found.verdict in FAILURES:
        return "gap"
    if cell.claim != "declared":
        return "refused"
    return "verified" if found is not None and found.verdict == Verdict.VERIFIED else "declared"


def _seen(found: Judged, run: Evidence) -> str:
    error = f", error {found.error:.2g} of the tolerance" if found.error else ""
    return f"{found.verdict.value}{error}; {evidence_line(run)}"
