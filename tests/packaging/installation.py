"""A folder of installed packages, and programs run in it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(folder: Path, out: Path) -> Path:
    """The wheel of a project folder, built by its own backend in this environment."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(folder)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    (wheel,) = out.glob("*.whl")
    return wheel


@dataclass(frozen=True)
class Installation:
    """Runs Python with `site` ahead of everything else that is installed."""

    site: Path

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENTS` outside the checkout; the result carries returncode, stdout and stderr."""
        environment = os.environ | {"PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1"} | variables
        return subprocess.run(
            [sys.executable, *arguments],
            check=False,
            cwd=self.site,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def output(self, *arguments: str, **variables: str) -> str:
        """Standard output of a run that must succeed."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout
