"""One run against one backend: its cells, tried when a test asks, and what came of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

from mla_core.conformance.cells import Cell, cells_of
from mla_core.conformance.gaps import Gap, read_gaps
from mla_core.conformance.probe import Here, Probe
from mla_core.conformance.report import Evidence, Judged, evidence_of, judged
from mla_core.conformance.subject import Subject
from mla_core.errors import ConfigError
from mla_core.manifest import BackendInfo
from mla_core.request import DeviceInfo, KernelRequest, reasons

__all__ = ["Options", "Session", "manifest_facts", "today"]


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    backend: str
    device: str | None = None
    quick: bool = False
    seed: int = 0
    seconds: float = 120.0
    require_verified: bool = False
    known_gaps: Path | None = None


@dataclass
class Session:
    """Cells of a backend and their verdicts so far; the child process starts when first needed."""

    options: Options
    results: dict[str, Judged] = field(default_factory=dict)

    @cached_property
    def subject(self) -> Subject:
        """The backend with its options. Raises SpecError or ConfigError."""
        return Subject.parse(self.options.backend)

    @cached_property
    def info(self) -> BackendInfo:
        """The manifest. Raises a RegistryError, or SpecError for options that it does not have."""
        self.subject.options  # noqa: B018  a wrong option is an error before any cell is tried
        return self.subject.info

    @cached_property
    def probe(self) -> Probe:
        return Probe(seconds=self.options.seconds)

    @cached_property
    def here(self) -> Here:
        return self.probe.here()

    @cached_property
    def device(self) -> DeviceInfo:
        """The device asked for; else the best one here that is declared; else the best one here."""
        if self.options.device is not None:
            return self._asked_device(self.options.device)
        found = [DeviceInfo.parse(text) for text in self.here.devices]
        return next((device for device in found if self._declares(device)), found[0])

    def _asked_device(self, text: str) -> DeviceInfo:
        wanted = DeviceInfo.parse(text)
        found = [DeviceInfo.parse(here) for here in self.here.devices]
        matching = [d for d in found if d.kind == wanted.kind and wanted.arch in (None, d.arch)]
        if not matching:
            raise ConfigError(
                f"--mla-device {text}: this machine has {', '.join(self.here.devices)}; a device that is not "
                "here cannot be tested"
            )
        return matching[0]

    def _declares(self, device: DeviceInfo) -> bool:
        request = KernelRequest(kernel="append", device=device, dtype="float32")
        return all(reason.field != "device" for reason in reasons(self.info.capabilities, request))

    @cached_property
    def cells(self) -> list[Cell]:
        made = (self.info.capabilities, self.device, self.here.layouts)
        return cells_of(*made, quick=self.options.quick, seed=self.options.seed)

    @cached_property
    def gaps(self) -> dict[str, Gap]:
        """Known gaps by cell, of those that hold with these options. Raises ConfigError."""
        found = read_gaps(self.options.known_gaps or _beside_manifest(self.info))
        chosen = self.subject.options
        return {cell: gap for cell, gap in found.items() if gap.applies(chosen)}

    @cached_property
    def evidence(self) -> Evidence:
        made = {"quick": self.options.quick, "seed": self.options.seed, "options": self.subject.named_options}
        return evidence_of(self.info, str(self.device), self.here.device_name, **made)

    def judge(self, cell: Cell) -> Judged:
        """Try one cell, once."""
        if cell.id not in self.results:
            self.results[cell.id] = judged(cell, self.probe.try_cell(str(self.subject), cell))
        return self.results[cell.id]

    def close(self) -> None:
        """End the child process, if one was started."""
        if "probe" in vars(self):
            self.probe.close()


def manifest_facts(backend: str) -> dict[str, object]:
    """What describing the backend does in a fresh process: whether torch was loaded, and its JSON."""
    code = (
        "import json, sys\n"
        "from mla_core import registry\n"
        f"info = registry.info({backend!r})\n"
        "loaded = sorted({'torch', 'triton'} & set(sys.modules))\n"
        "print(json.dumps({'loaded': loaded, 'manifest': info.model_dump_json()}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=300
    )
    facts: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return facts


def today() -> date:
    """The day by which gaps expire, the same everywhere."""
    return datetime.now(timezone.utc).date()


def _beside_manifest(info: BackendInfo) -> Path:
    """known_gaps.toml in the folder of the plugin's package."""
    spec = find_spec(info.target.partition(":")[0].partition(".")[0])
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else Path()
    return folder / "known_gaps.toml"
