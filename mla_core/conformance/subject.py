"""What a run tests: one backend, with options when the run names some, as in "flashinfer[impl=fa2]"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mla_core import registry
from mla_core.errors import ConfigError
from mla_core.manifest import BackendInfo
from mla_core.options import Asked
from mla_core.spec import AUTO, Part

__all__ = ["Subject"]

_SOURCE = "backend to test"


@dataclass(frozen=True)
class Subject:
    """A backend and its options. Its text is what a layer takes as `backend`."""

    asked: Asked
    part: Part

    @classmethod
    def parse(cls, text: str) -> Subject:
        """Raises SpecError for a bad string, ConfigError for more than one backend."""
        asked = Asked.parse(text, _SOURCE)
        stacks = [*asked.spec.prefill, *(asked.spec.decode or ())]
        if len(stacks) != 1 or stacks[0].sparse is not None or stacks[0].backend.name == AUTO:
            raise ConfigError(f"{_SOURCE}: one name, with options or without, got {text!r}")
        return cls(asked, stacks[0].backend)

    def __str__(self) -> str:
        return str(self.part)

    @property
    def info(self) -> BackendInfo:
        """The manifest. Raises a RegistryError."""
        return registry.info(self.part.name)

    @property
    def options(self) -> dict[str, Any]:
        """All options, validated, defaults included. Raises SpecError."""
        return self.asked.options(self.part, self.info)

    @property
    def named_options(self) -> dict[str, str]:
        """The options that were named, as text."""
        return {option.key: option.value for option in self.part.options}
