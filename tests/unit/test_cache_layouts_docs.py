"""docs/cache-layouts.md states the layouts' sizes and hashes: a changed byte format must show there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mla_core.cache import layout_for, layout_ids

DOCUMENT = (Path(__file__).parents[2] / "docs/cache-layouts.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| (\d+) \|.*\| `([0-9a-f]{16})` \|$", re.MULTILINE)
STATED = {layout_id: (int(size), found) for layout_id, size, found in ROW.findall(DOCUMENT)}


def test_every_layout_has_a_row():
    assert sorted(STATED) == sorted(layout_ids())


@pytest.mark.parametrize("layout_id", layout_ids())
def test_size_and_hash_are_the_documented_ones(layout_id):
    widths = (128, 0) if layout_id == "idx_fp8" else (512, 64)
    layout = layout_for(layout_id, torch.bfloat16, *widths)
    assert (layout.bytes_per_token, layout.hash) == STATED.get(layout_id)


@pytest.mark.parametrize("layout_id", layout_ids())
def test_every_layout_has_a_section_with_its_bytes(layout_id):
    headings = " ".join(re.findall(r"^### (.+)$", DOCUMENT, re.MULTILINE)).replace(",", " ").split()
    assert layout_id in headings
