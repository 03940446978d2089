"""Every requirement is tested with poisoned scratch memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support import fill_uninitialized


@pytest.fixture(autouse=True)
def _poisoned_scratch() -> Iterator[None]:
    with fill_uninitialized():
        yield
