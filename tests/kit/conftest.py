"""The liars as an installed distribution, and runs of the kit against them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mla_core.conformance.cells import Cell, cells_of
from mla_core.conformance.probe import Probe
from mla_core.conformance.report import Judged, judged
from mla_core.manifest import BackendInfo
from mla_core.request import DeviceInfo

SITE = Path(__file__).with_name("site")
HEAVY = "heavy = mla_liars.heavy_manifest:HEAVY"
LAYOUTS = ("fp32", "fp16", "bf16")


def liars() -> dict[str, tuple[str, BackendInfo]]:
    """Every liar's manifest by name, with the attribute it lies in."""
    spec = importlib.util.spec_from_file_location("liars_manifest", SITE / "mla_liars/manifest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {name: value for name, value in vars(module).items() if isinstance(value, BackendInfo)}
    return {info.name: (name, info) for name, info in found.items()}


@pytest.fixture(scope="session")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the liars are installed."""
    metadata = tmp_path_factory.mktemp("liars") / "mla_liars-1.0.dist-info"
    metadata.mkdir()
    lines = [f"{name} = mla_liars.manifest:{attribute}" for name, (attribute, _) in liars().items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[mla_core.backends]", *lines, HEAVY]) + "\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mla-liars\nVersion: 1.0\n")
    path = os.pathsep.join([str(metadata.parent), str(SITE), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


@dataclass
class Trial:
    """Cells of one liar, tried on demand in one child process."""

    info: BackendInfo
    probe: Probe
    quick: bool = True
    cells: dict[str, Cell] = field(default_factory=dict)
    results: dict[str, Judged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        made = (self.info.capabilities, DeviceInfo.parse("cpu"), LAYOUTS)
        self.cells = {cell.id: cell for cell in cells_of(*made, quick=self.quick, seed=0)}

    def judge(self, cell: str) -> Judged:
        if cell not in self.results:
            self.results[cell] = judged(
                self.cells[cell], self.probe.try_cell(self.info.name, self.cells[cell])
            )
        return self.results[cell]

    def all(self, *groups: str) -> list[Judged]:
        """Every cell of these groups, of all when none is named."""
        return [self.judge(name) for name, cell in self.cells.items() if not groups or cell.group in groups]

    def failing(self, *groups: str) -> dict[str, str]:
        """Verdicts that fail a run, by cell."""
        return {result.id: result.verdict.value for result in self.all(*groups) if result.fails}


@pytest.fixture(scope="session")
def trial(environ: dict[str, str]) -> Iterator[Callable[..., Trial]]:
    """`trial(name)` is the liar of that name on trial; all share one child process."""
    trials: dict[str, Trial] = {}
    with Probe(seconds=60.0, environ=environ) as probe:
        yield lambda name: trials.setdefault(name, Trial(liars()[name][1], probe))


@pytest.fixture(scope="session")
def impatient_trial(environ: dict[str, str]) -> Iterator[Trial]:
    """The hanger, with little time for each cell."""
    with Probe(seconds=5.0, environ=environ) as probe:
        yield Trial(liars()["hanger"][1], probe)


@pytest.fixture(scope="session")
def run_suite(environ: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the suite as a plugin's author does, in a folder of its own."""

    def run(folder: Path, *arguments: str, seconds: float = 150) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(
            command, cwd=folder, env=environ, capture_output=True, text=True, timeout=seconds, check=False
        )

    return run
