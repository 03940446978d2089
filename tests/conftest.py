"""What every test shares: no network, no leftovers of the caller's environment, repeatable random tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Before transformers is imported anywhere: tests never ask a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")

SELECTION_VARIABLES = ("MLA_BACKEND", "MLA_PLUGINS", "MLA_DISABLE")


@pytest.fixture(autouse=True)
def _clean_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own MLA_BACKEND must not decide what a test sees."""
    for variable in SELECTION_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
