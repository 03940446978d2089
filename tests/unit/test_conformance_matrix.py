"""The capability matrix: what manifests declare, what reports prove, and how both are shown."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mla_core.cli import matrix as command
from mla_core.conformance.cells import cells_of
from mla_core.conformance.matrix import Matrix, matrix_of
from mla_core.conformance.matrix_html import html
from mla_core.conformance.matrix_text import markdown, terminal_rows
from mla_core.conformance.report import Evidence, Report, judged
from mla_core.conformance.verdicts import Outcome
from mla_core.errors import ConfigError
from mla_core.manifest import BackendInfo
from mla_core.request import DeviceInfo
from tests.unit.fakes import backend, registry

ROOT = Path(__file__).resolve().parents[2]
PAGE, EVIDENCE = ROOT / "docs/capability-matrix.md", ROOT / "docs/evidence"
MINE = backend("mine", heads=[16, 32], dtypes={"float32", "bfloat16"})
GAP = "mqa_decode/heads=32"


def run(**changes: object) -> Evidence:
    made = {
        "backend": "mine",
        "distribution": "mla-mine",
        "version": "1.2",
        "device": "cpu",
        "device_name": "x86_64",
        "versions": {"torch": "2.13.0"},
        "commit": "abc123",
        "date": "2026-11-29",
        "quick": False,
        "seed": 0,
    }
    return Evidence.model_validate({**made, **changes})


def report(info: BackendInfo = MINE, *, wrong: str = GAP, **changes: object) -> Report:
    """A run in which one cell was wrong, everything else as declared."""
    cells = cells_of(info.capabilities, DeviceInfo.parse("cpu"), ["fp32", "bf16"], quick=False, seed=0)
    outcomes = {
        "declared": Outcome(kind="right", error=0.01),
        "undeclared": Outcome(
            kind="refused",
            fields=("heads", "dtype", "layout", "kernel", "page_size", "latent", "rope", "nope", "device"),
        ),
    }
    bad = Outcome(kind="wrong", detail="out is wrong in row 3")
    tried = [judged(cell, bad if cell.id == wrong else outcomes[cell.claim]) for cell in cells]
    return Report(evidence=run(**changes), cells=tuple(tried))


@pytest.fixture
def matrix() -> Matrix:
    return matrix_of([MINE], [report()])


def states(found: Matrix, device: str = "cpu") -> dict[str, str]:
    return {entry.cell: entry.state for entry in found.entries if entry.device == device}


def test_without_evidence_what_is_declared_is_only_declared():
    assert set(states(matrix_of([MINE], [])).values()) == {"declared", "refused"}


def test_a_verified_cell_is_verified(matrix):
    assert states(matrix)["mqa_decode/heads=16"] == "verified"


def test_a_failing_cell_is_a_gap(matrix):
    assert states(matrix)[GAP] == "gap"


def test_a_gap_says_why(matrix):
    (gap,) = [entry for entry in matrix.entries if entry.cell == GAP]
    assert gap.reason == "out is wrong in row 3"


def test_a_cell_says_on_what_it_was_seen(matrix):
    (entry,) = [entry for entry in matrix.entries if entry.cell == "mqa_decode/heads=16"]
    assert entry.evidence == (
        "verified, error 0.01 of the tolerance; "
        "mine 1.2 on cpu (x86_64), torch 2.13.0, commit abc123, 2026-11-29, full run"
    )


def test_a_refused_value_says_what_is_offered(matrix):
    (entry,) = [entry for entry in matrix.entries if entry.cell == "mqa_decode/heads=17"]
    assert (entry.state, entry.reason) == ("refused", "heads: wanted 17, offered 16, 32")


def test_evidence_of_another_declaration_does_not_count():
    """heads=32 was refused when it was tested, and is declared now."""
    before = report(backend("mine", heads=[16]), wrong="none")
    assert states(matrix_of([MINE], [before])).get("mqa_decode/heads=32") == "declared"


def test_evidence_of_another_backend_does_not_count():
    assert set(states(matrix_of([MINE], [report(backend="other")])).values()) == {"declared", "refused"}


def test_a_device_without_a_run_is_shown_as_declared():
    both = MINE.model_copy(
        update={"capabilities": MINE.capabilities.model_copy(update={"devices": frozenset({"cpu", "sm_90"})})}
    )
    found = matrix_of([both], [report(both)])
    assert states(found, "cuda:sm_90")["mqa_decode/heads=16"] == "declared"
    assert states(found)["mqa_decode/heads=16"] == "verified"


def test_the_terminal_table_has_a_row_for_each_kernel_and_layout(matrix):
    head, *rows = terminal_rows(matrix)
    assert head[:4] == ["backend", "device", "kernel", "layout"]
    assert rows == [
        ["mine", "cpu", "mha_prefill", "any", "✓", "–", "✓"],
        ["mine", "cpu", "mqa_decode", "fp32", "✓", "–", "✓"],
    ]


def test_the_page_names_gaps_with_their_evidence(matrix):
    page = markdown(matrix, "mla matrix")
    assert f"* `{GAP}` on cpu: out is wrong in row 3; over-claim" in page


def test_the_page_sums_values_up_by_mark(matrix):
    assert re.search(r"\| heads \|.*\| ✓ 16 · – 15, 17, 31, 33 · ! 32 \|", markdown(matrix, "x"))


def test_the_json_form_reads_back(matrix):
    assert Matrix.model_validate_json(command.rendered(matrix, "json", "x")) == matrix


@pytest.mark.parametrize("name", ["page.pdf", "page"])
def test_a_file_whose_name_says_no_form_is_refused(matrix, tmp_path, name):
    with pytest.raises(ConfigError, match="cannot tell the form"):
        command.show(matrix, None, tmp_path / name, "x")


def test_a_written_page_is_not_stale(matrix, tmp_path):
    page = tmp_path / "page.md"
    command.show(matrix, None, page, "x")
    assert command.check(matrix, page, "x") == []


def test_a_page_of_another_declaration_is_stale(matrix, tmp_path):
    page = tmp_path / "page.md"
    command.show(matrix, None, page, "x")
    changed = matrix_of([backend("mine", heads=[16, 32, 64])], [report()])
    assert command.check(changed, page, "x")


def test_a_missing_page_is_stale(matrix, tmp_path):
    assert command.check(matrix, tmp_path / "page.md", "x")


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no folder"):
        command.read_evidence(tmp_path / "nowhere")


def test_a_file_that_is_no_report_is_refused(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"x.json is no report: evidence: Field required"):
        command.read_evidence(tmp_path)


def test_named_backends_are_shown_and_no_others():
    plugins = registry(MINE, backend("other"))
    assert command.matrix(plugins, ["mine"], []).backends == ["mine"]
    assert command.matrix(plugins, [], []).backends == ["mine", "other"]


def test_the_committed_page_is_what_manifests_and_evidence_give():
    """The page's own second line says how to write it again."""
    from mla_core.registry import default

    written = re.search(r"`mla matrix (.*) --write docs/capability-matrix.md`", PAGE.read_text("utf-8"))
    assert written, "the page does not say how it was made"
    names = written[1].split()
    missing = sorted(set(names) - set(default().names()))
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)}; pip install -e plugins/NAME")
    found = command.matrix(default(), names, command.read_evidence(EVIDENCE))
    line = command.command_line(names, command.EVIDENCE, Path("docs/capability-matrix.md"))
    assert command.check(found, PAGE, line) == [], f"stale; run: {line}"


# What a browser shows. CI sets MLA_REQUIRE_CHROMIUM, so that the tests cannot be skipped there.


def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        if os.environ.get("MLA_REQUIRE_CHROMIUM"):
            pytest.fail("MLA_REQUIRE_CHROMIUM is set, but no Chromium is installed")
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium)")
    return found


@pytest.fixture
def browse(matrix, tmp_path):
    """The page's document after a script ran in a headless browser without network."""

    def dump(script: str = "") -> str:
        page = tmp_path / "page.html"
        page.write_text(
            html(matrix).replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8"
        )
        command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        profile = [f"--user-data-dir={tmp_path / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND"]
        done = subprocess.run(
            [*command, *profile, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
        )
        # Without the data, so that only what is shown can be found.
        return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)

    return dump


def choose(filter_id: str, value: str) -> str:
    """A script that sets one of the filters."""
    return (
        f"f = document.getElementById('{filter_id}'); f.value = '{value}'; "
        "f.dispatchEvent(new Event('change'))"
    )


def cells(document: str) -> set[str]:
    return set(re.findall(r'data-cell="([^"]+)"', document))


def test_the_html_page_needs_no_other_file(matrix):
    page = html(matrix)
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(|https?://""", page.partition('id="data"')[0])


def test_the_html_page_survives_text_that_looks_like_markup():
    nasty = MINE.model_copy(update={"summary": "</script><b>bold"})
    assert "</script><b>" not in html(matrix_of([nasty], []))


def test_the_html_page_shows_every_cell(browse, matrix):
    assert cells(browse()) == {entry.cell for entry in matrix.entries}


def test_a_filter_by_phase_leaves_that_phase(browse):
    script = (
        "f = document.getElementById('phase'); f.value = 'mqa_decode'; f.dispatchEvent(new Event('change'))"
    )
    assert {name.partition("/")[0] for name in cells(browse(script))} == {"mqa_decode"}


def test_a_filter_by_layout_leaves_that_layout_and_what_has_none(browse, matrix):
    script = choose("layout", "bf16")
    shown = cells(browse(script))
    assert shown == {e.cell for e in matrix.entries if e.layout == "bf16" or e.kernel == "mha_prefill"}
    assert "mqa_decode/heads=16" not in shown


def test_a_filter_by_device_leaves_that_device(browse):
    script = choose("device", "cpu")
    assert "<h3>cpu</h3>" in browse(script)


def test_a_click_on_a_cell_shows_its_reason_and_evidence(browse):
    script = f"document.querySelector('[data-cell=\"{GAP}\"]').click()"
    document = browse(script)
    assert '<dd data-line="Reason">out is wrong in row 3</dd>' in document
    assert '<dd data-line="Evidence">over-claim; mine 1.2 on cpu' in document


def test_nothing_is_shown_before_a_click(browse):
    assert "data-line" not in browse()


def test_the_json_of_a_report_reads_back(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(report().model_dump_json())
    assert command.read_evidence(tmp_path) == [report()]
    assert json.loads(path.read_text())["format"] == 1
