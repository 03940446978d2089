"""Options of a backend string, checked against the options model of the plugin they are for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from mla_core.errors import SpecError
from mla_core.manifest import PluginInfo, validation_problems
from mla_core.spec import Option, Part, Spec, parse

__all__ = ["Asked", "default_options"]


@dataclass(frozen=True)
class Asked:
    """A backend string, parsed, with its text and origin for error messages."""

    spec: Spec
    text: str
    source: str

    @classmethod
    def parse(cls, text: str, source: str) -> Asked:
        """Read a backend string that came from `source`. Raises SpecError."""
        return cls(parse(text, source=source), text, source)

    def __str__(self) -> str:
        return f"{self.source}={str(self.spec)!r}"

    def error(self, problem: str, position: int) -> SpecError:
        """A SpecError with its caret at a position of the text."""
        return SpecError(problem, self.text, position, source=self.source)

    def options(self, part: Part, info: PluginInfo) -> dict[str, Any]:
        """The options of one name, validated, defaults included. Raises SpecError."""
        for option in part.options:
            self._check_known(option, part, info)
        if info.options is None:
            return {}
        try:
            return _dump(info.options, {option.key: option.value for option in part.options})
        except ValidationError as error:
            first = error.errors()[0]["loc"][:1]
            at = next((option.position for option in part.options if (option.key,) == first), part.position)
            problems = "; ".join(validation_problems(error))
            raise self.error(f"options of {part.name!r}: {problems}", at) from error

    def _check_known(self, option: Option, part: Part, info: PluginInfo) -> None:
        known = [] if info.options is None else _keys(info.options)
        if option.key in known:
            return
        close = difflib.get_close_matches(option.key, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise self.error(f"{part.name!r} has no option {option.key!r}{hint} ({takes})", option.position)


def default_options(info: PluginInfo) -> dict[str, Any]:
    """The options of a plugin when none are given. Raises pydantic's ValidationError when it needs some."""
    return {} if info.options is None else _dump(info.options, {})


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _dump(model: type[BaseModel], given: dict[str, str]) -> dict[str, Any]:
    return model.model_validate(given).model_dump(mode="json")
