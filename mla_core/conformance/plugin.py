"""The pytest plugin of the conformance kit. Without its suite among the tests it does nothing.

It is loaded in every pytest run of everybody who has mla-core installed, so it imports nothing heavy before
a test of the suite is collected.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mla_core.conformance.report import Judged
    from mla_core.conformance.session import Session

__all__: list[str] = []

MARKER = "mla_cells"
PROPERTY = "mla_cell"
_SESSION = pytest.StashKey["Session"]()
_PROBLEM = pytest.StashKey[str]()
_EVIDENCE = "mla_evidence"
SUITE = "mla_core.conformance.suite"
NO_BACKEND = (
    "the conformance suite needs a backend: --mla-backend NAME, or mla_backend = NAME in the ini file"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mla", "mla_core conformance")
    add = group.addoption
    add("--mla-backend", metavar="NAME", help="the backend to test")
    add("--mla-report", metavar="FILE", type=Path, help="write the evidence to this JSON file")
    add(
        "--mla-require-verified",
        action="store_true",
        help="an unverified cell fails instead of being skipped",
    )
    add(
        "--mla-device", metavar="DEVICE", help="cpu, cuda or cuda:sm_90a; default: the best declared one here"
    )
    add("--mla-quick", action="store_true", help="fewer sizes and mixes")
    add("--mla-seed", metavar="N", type=int, default=0, help="seed of the pairwise mixes (0)")
    add("--mla-timeout", metavar="SECONDS", type=float, default=120.0, help="time limit of a cell (120)")
    add(
        "--mla-known-gaps", metavar="FILE", type=Path, help="default: known_gaps.toml of the plugin's package"
    )
    parser.addini("mla_backend", "the backend that the conformance suite tests")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARKER}(suite): conformance cells; set by the suite itself")
    pytest.register_assert_rewrite(SUITE)
    if backend_of(config) is None and any(str(argument).startswith(SUITE) for argument in config.args):
        raise pytest.UsageError(NO_BACKEND)


def backend_of(config: pytest.Config) -> str | None:
    """The backend that this run is about."""
    return config.getoption("--mla-backend") or config.getini("mla_backend") or None


def session_of(config: pytest.Config) -> Session | None:
    """The run's conformance session; None when it cannot be made, and then collection ends with a usage
    error.
    """
    if _SESSION not in config.stash and _PROBLEM not in config.stash:
        from mla_core.conformance.session import Options, Session
        from mla_core.errors import MLAError

        backend = backend_of(config)
        if backend is None:
            config.stash[_PROBLEM] = NO_BACKEND
            return None
        option = config.getoption
        session = Session(
            Options(
                backend=backend,
                device=option("--mla-device"),
                quick=option("--mla-quick"),
                seed=option("--mla-seed"),
                seconds=option("--mla-timeout"),
                require_verified=option("--mla-require-verified"),
                known_gaps=option("--mla-known-gaps"),
            )
        )
        try:
            session.cells, session.gaps  # noqa: B018  errors belong here, before any test runs
        except MLAError as error:
            session.close()
            config.stash[_PROBLEM] = str(error)
            return None
        config.stash[_SESSION] = session
    return config.stash.get(_SESSION, None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker(MARKER)
    if marker is not None:
        session = session_of(metafunc.config)
        chosen = [] if session is None else [c for c in session.cells if c.suite == marker.args[0]]
        metafunc.parametrize("cell", chosen, ids=[cell.id for cell in chosen])


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    # Here, since what is raised while tests are generated counts as a broken test file.
    if _PROBLEM in config.stash:
        raise pytest.UsageError(config.stash[_PROBLEM])


@pytest.fixture(scope="session")
def mla_session(request: pytest.FixtureRequest) -> Session:
    """The conformance run: its backend's manifest, cells and verdicts."""
    session = session_of(request.config)
    if session is None:
        raise pytest.UsageError(request.config.stash[_PROBLEM])
    return session


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    session = item.config.stash.get(_SESSION, None)
    cell = getattr(item, "callspec", None) and item.callspec.params.get("cell")  # type: ignore[attr-defined]
    if session is not None and cell is not None and report.when == "call":
        # User properties travel from workers of a distributed run to the process that reports.
        report.user_properties.append((PROPERTY, session.results[cell.id].model_dump_json()))
        report.user_properties.append((_EVIDENCE, session.evidence.model_dump_json()))
    return report


class _Collector:
    """Gathers verdicts as reports arrive, and writes them at the end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.cells: dict[str, Judged] = {}
        self.evidence: str | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, text in report.user_properties:
            if name == PROPERTY and report.when == "call":
                from mla_core.conformance.report import Judged

                cell = Judged.model_validate_json(str(text))
                self.cells[cell.id] = cell
            elif name == _EVIDENCE:
                self.evidence = str(text)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.evidence is None:
            return
        from mla_core.conformance.report import Evidence, Report

        report = Report(
            evidence=Evidence.model_validate_json(self.evidence), cells=tuple(self.cells.values())
        )
        self._write(report, terminalreporter)
        about = report.evidence
        terminalreporter.section(f"{about.backend} on {about.device} ({about.device_name})")
        for verdict, count in report.counts().items():
            if count:
                terminalreporter.write_line(f"{count:6} {verdict}")
        controls = [cell for cell in report.cells if cell.noticed is not None]
        noticed = sum(cell.noticed is True for cell in controls)
        terminalreporter.write_line(f"{noticed:6} of {len(controls)} deliberate faults noticed")

    def _write(self, report: Any, terminalreporter: pytest.TerminalReporter) -> None:
        path = self.config.getoption("--mla-report")
        if path is not None:
            path.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
            terminalreporter.write_line(f"wrote {path}")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(_Collector(session.config), "mla_conformance_collector")


def pytest_unconfigure(config: pytest.Config) -> None:
    session = config.stash.get(_SESSION, None)
    if session is not None:
        session.close()
