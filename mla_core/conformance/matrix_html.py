"""The capability matrix as one HTML file that needs no other."""

from __future__ import annotations

import json
from importlib import resources

from mla_core.conformance.matrix import Matrix, evidence_line
from mla_core.conformance.matrix_text import LEGEND

__all__ = ["html"]


def html(matrix: Matrix) -> str:
    """The page: filters by device, phase and layout; a click on a cell shows its reason and evidence."""
    template = resources.files("mla_core.conformance").joinpath("matrix.html").read_text(encoding="utf-8")
    data = {
        "legend": LEGEND,
        "summaries": matrix.summaries,
        "runs": [evidence_line(run) for run in matrix.runs],
        "entries": [{**entry.model_dump(), "symbol": entry.symbol} for entry in matrix.entries],
    }
    # "</" would end the script element that the data lies in.
    return template.replace("__DATA__", json.dumps(data, ensure_ascii=False).replace("</", "<\\/"))
