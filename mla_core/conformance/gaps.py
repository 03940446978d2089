"""Known gaps of a plugin: cells that fail for a stated reason until a date. Strict in both directions.

`known_gaps.toml` beside the manifest, or where `--mla-known-gaps` says:

    [[gap]]
    cell = "mqa_decode/heads=129"
    reason = "the kernel's tiles hold 128 heads"
    link = "https://example.org/issues/7"
    expires = 2027-06-30
    options = { impl = ["auto", "fa3"] }      # leave it out when the gap holds with all options

A gap whose cell passes, does not exist or has expired fails the run, so the file never outlives its reasons.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from mla_core.conformance.verdicts import FAILURES, Verdict
from mla_core.errors import ConfigError
from mla_core.manifest import validation_problems

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["Gap", "complaints", "read_gaps"]


class Gap(BaseModel):
    """One cell that is known to fail."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cell: str
    reason: str
    link: str
    expires: date
    # Option to the values with which the gap exists; with all when it is not named.
    options: dict[str, tuple[str, ...]] = {}

    def applies(self, options: Mapping[str, object]) -> bool:
        """Does a run with these options have the gap?"""
        return all(str(options.get(name)) in values for name, values in self.options.items())


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    gap: tuple[Gap, ...] = ()


def read_gaps(path: Path) -> dict[str, Gap]:
    """The gaps of a file by cell; none when it does not exist. Raises ConfigError for anything unreadable."""
    if not path.is_file():
        return {}
    try:
        found = _File.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path.name} is not TOML: {error}") from error
    except ValidationError as error:
        raise ConfigError(f"{path.name}: {'; '.join(validation_problems(error))}") from error
    twice = {gap.cell for gap in found.gap if sum(other.cell == gap.cell for other in found.gap) > 1}
    if twice:
        raise ConfigError(f"{path.name} names {', '.join(sorted(twice))} more than once")
    return {gap.cell: gap for gap in found.gap}


def complaints(
    gaps: Iterable[Gap], verdicts: dict[str, Verdict], known: Iterable[str], today: date
) -> list[str]:
    """What is wrong with the gaps, given the verdicts of the cells that ran and the ids of all cells."""
    cells = set(known)
    found = []
    for gap in gaps:
        verdict = verdicts.get(gap.cell)
        if gap.cell not in cells:
            found.append(f"{gap.cell}: no such cell; remove the gap")
        elif gap.expires < today:
            found.append(f"{gap.cell}: expired on {gap.expires}; fix it or give it a new date ({gap.link})")
        elif verdict is not None and verdict not in FAILURES and verdict != Verdict.UNVERIFIED:
            found.append(f"{gap.cell}: is {verdict.value}, no longer a gap; remove it")
    return found
