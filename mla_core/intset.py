"""A set of integers that a backend can declare: exact, a few values, a range, or multiples of a number."""

from __future__ import annotations

import sys
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_serializer, model_validator

__all__ = ["IntSet"]


class IntSet(BaseModel):
    """Integers, as a list of values or as the multiples of `step` in low..high. Empty by default.

    JSON: `[16, 32]`, or `{"low": 1, "high": 128, "step": 1}` where high may be null. An int or a list of
    ints is accepted wherever an IntSet is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    values: tuple[StrictInt, ...] = ()
    low: int | None = Field(default=None, ge=0)
    high: int | None = None
    step: int = Field(default=1, gt=0)

    @classmethod
    def exact(cls, value: int) -> IntSet:
        """The one value."""
        return cls(values=(value,))

    @classmethod
    def of(cls, *values: int) -> IntSet:
        """These values."""
        return cls(values=values)

    @classmethod
    def range(cls, low: int, high: int | None = None) -> IntSet:
        """low..high, both included; no high: no upper limit."""
        return cls(low=low, high=high)

    @classmethod
    def multiple_of(cls, step: int, low: int | None = None, high: int | None = None) -> IntSet:
        """The multiples of step from low (default: step) to high (default: no upper limit)."""
        return cls(low=step if low is None else low, high=high, step=step)

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, data: Any) -> Any:
        if isinstance(data, int) and not isinstance(data, bool):
            return {"values": (data,)}
        if isinstance(data, (list, tuple, set, frozenset)):
            return {"values": tuple(sorted(set(data)))}
        if isinstance(data, dict) and "values" in data:
            return {**data, "values": tuple(sorted(set(data["values"])))}
        return data

    @model_validator(mode="after")
    def _check(self) -> IntSet:
        if self.values and self.low is not None:
            raise ValueError("an IntSet has either values or a range, not both")
        if self.low is None and (self.high is not None or self.step != 1):
            raise ValueError("an IntSet with high or step needs low")
        if self.low is not None and self.high is not None and self._first() > self.high:
            raise ValueError(f"no multiple of {self.step} lies in {self.low}..{self.high}")
        return self

    @model_serializer
    def _dump(self) -> list[int] | dict[str, int | None]:
        if self.low is None:
            return list(self.values)
        return {"low": self.low, "high": self.high, "step": self.step}

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        if self.low is None:
            return value in self.values
        return self.low <= value <= self._limit() and value % self.step == 0

    def __bool__(self) -> bool:
        return bool(self.values) or self.low is not None

    def __str__(self) -> str:
        if self.low is None:
            return ", ".join(str(value) for value in self.values) or "none"
        span = f"{self.low}..{'' if self.high is None else self.high}"
        if self.step == 1:
            return span
        everywhere = self.low == self.step and self.high is None
        return f"multiples of {self.step}" if everywhere else f"multiples of {self.step} in {span}"

    def edges(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(inside, outside): members and positive non-members next to every edge, for probing tests."""
        if self.low is None:
            inside = set(self.values)
        else:
            first = self._first()
            last = first + self.step if self.high is None else self.high // self.step * self.step
            inside = {first, last}
        near = {value + distance for value in inside for distance in (-self.step, -1, 1, self.step)}
        return tuple(sorted(inside)), tuple(
            sorted(value for value in near if value > 0 and value not in self)
        )

    def _limit(self) -> int:
        return sys.maxsize if self.high is None else self.high

    def _first(self) -> int:
        return -(-(self.low or 0) // self.step) * self.step
