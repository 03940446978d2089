"""The conformance kit: every claim of a backend's manifest, tried and judged.

`pytest --pyargs mla_core.conformance.suite --mla-backend NAME` runs it. Cells are made from the declaration
(`cells`), tried in a child process with the core's guard bypassed (`probe`, `worker`), compared with a
float64 oracle (`oracle`, `tolerances`) and judged (`verdicts`). Importing this package loads no torch.
"""

from __future__ import annotations

__all__: list[str] = []
