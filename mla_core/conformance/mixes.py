"""Pairwise combinations: every two values of two fields meet in some row, in few rows."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["pairwise"]

_ATTEMPTS = 20


def pairwise(values: Mapping[str, Sequence[Any]], *, seed: int, most: int) -> list[dict[str, Any]]:
    """At most `most` rows, each the one of some random rows that covers most pairs not seen yet.

    The same values and seed give the same rows.
    """
    chance = random.Random(seed)
    fields = sorted(field for field, options in values.items() if options)
    left = {
        pair
        for one, other in itertools.combinations(fields, 2)
        for pair in itertools.product(_named(one, values[one]), _named(other, values[other]))
    }
    rows: list[dict[str, Any]] = []
    while left and len(rows) < most:
        tried = [{field: chance.choice(list(values[field])) for field in fields} for _ in range(_ATTEMPTS)]
        row = max(tried, key=lambda row: len(_pairs(row) & left))
        left -= _pairs(row)
        rows.append(row)
    return rows


def _named(field: str, options: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(field, value) for value in options]


def _pairs(row: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(sorted(row.items()), 2))
