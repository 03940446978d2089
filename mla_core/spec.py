"""The backend string: who serves a layer, in order of preference.

    spec    := chain | "prefill=" chain ";" "decode=" chain
    chain   := stack ("|" stack)*                          the first that fits
    stack   := name options? ("+" name options?)?          a dense backend and a sparse hook
    options := "[" key "=" value ("," key "=" value)* "]"  checked later, against the manifest's options model

The name `auto` stands for everything that is installed, ranked. Blanks around words do not count.
`parse(str(spec)) == spec`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mla_core.errors import SpecError

__all__ = ["AUTO", "NAME_PATTERN", "Option", "Part", "Spec", "Stack", "parse"]

AUTO = "auto"
NAME_PATTERN = r"[A-Za-z_][A-Za-z0-9_.-]*"

_NAME = re.compile(NAME_PATTERN)
_VALUE = re.compile(r"[^,\[\]]+")
_PHASES = re.compile(r"\s*(prefill|decode)\s*=")


@dataclass(frozen=True)
class Option:
    """One `key=value`; the value is still text. `position` is where the key starts in the string."""

    key: str
    value: str
    position: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


@dataclass(frozen=True)
class Part:
    """A name with its options: a dense backend or a sparse hook."""

    name: str
    options: tuple[Option, ...] = ()
    position: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.name}[{','.join(map(str, self.options))}]" if self.options else self.name


@dataclass(frozen=True)
class Stack:
    """A dense backend, and the sparse hook on top of it if there is one."""

    backend: Part
    sparse: Part | None = None

    def __str__(self) -> str:
        return str(self.backend) if self.sparse is None else f"{self.backend}+{self.sparse}"


Chain = tuple[Stack, ...]


@dataclass(frozen=True)
class Spec:
    """A parsed backend string. `decode` None: one chain serves both phases."""

    prefill: Chain
    decode: Chain | None = None

    def __str__(self) -> str:
        prefill = "|".join(map(str, self.prefill))
        if self.decode is None:
            return prefill
        return f"prefill={prefill};decode={'|'.join(map(str, self.decode))}"

    def names(self) -> frozenset[str]:
        """Every backend that is named, `auto` included if it is."""
        return frozenset(stack.backend.name for stack in (*self.prefill, *(self.decode or ())))


def parse(text: str, *, source: str = "backend") -> Spec:
    """Read a backend string; SpecError with a caret under the mistake. `source` names where it came from."""
    return _Parser(text, source).spec()


class _Parser:
    """One method per rule of the grammar; `at` is the next unread character."""

    def __init__(self, text: str, source: str) -> None:
        self.text = text
        self.source = source
        self.at = 0

    def spec(self) -> Spec:
        decode = None
        if _PHASES.match(self.text):
            self.phase("prefill")
            prefill = self.chain()
            self.expect(";", "';decode=' after the prefill backends")
            self.phase("decode")
            decode = self.chain()
        else:
            prefill = self.chain()
        if not self.at_end():
            raise self.error("expected '|', '+', '[' or the end")
        return Spec(prefill, decode)

    def phase(self, name: str) -> None:
        self.skip_blanks()
        position = self.at
        if self.name(f"'{name}='") != name:
            raise self.error(f"expected '{name}='", position)
        self.expect("=", f"'{name}='")

    def chain(self) -> Chain:
        stacks = [self.stack()]
        while self.accept("|"):
            stacks.append(self.stack())
        return tuple(stacks)

    def stack(self) -> Stack:
        backend = self.part("a backend name, or auto")
        if backend.name == AUTO and backend.options:
            raise self.error(
                "auto takes no options; name the backend they are for", backend.options[0].position
            )
        sparse = self.part("the name of a sparse hook") if self.accept("+") else None
        return Stack(backend, sparse)

    def part(self, what: str) -> Part:
        self.skip_blanks()
        position = self.at
        name = self.name(what)
        return Part(name, self.options() if self.accept("[") else (), position)

    def options(self) -> tuple[Option, ...]:
        options = [self.option()]
        while self.accept(","):
            options.append(self.option())
            if options[-1].key in [option.key for option in options[:-1]]:
                raise self.error(f"option {options[-1].key!r} is given twice", options[-1].position)
        self.expect("]", "',' or ']'")
        return tuple(options)

    def option(self) -> Option:
        self.skip_blanks()
        position = self.at
        key = self.name("an option name")
        self.expect("=", f"'=' and a value for {key!r}")
        self.skip_blanks()
        value = _VALUE.match(self.text, self.at)
        if value is None or not value[0].strip():
            raise self.error(f"expected a value for {key!r}")
        self.at = value.end()
        return Option(key, value[0].strip(), position)

    def name(self, what: str) -> str:
        self.skip_blanks()
        match = _NAME.match(self.text, self.at)
        if match is None:
            raise self.error(f"expected {what}")
        self.at = match.end()
        return match[0]

    def accept(self, character: str) -> bool:
        self.skip_blanks()
        found = self.text[self.at : self.at + 1] == character
        self.at += found
        return found

    def expect(self, character: str, what: str) -> None:
        if not self.accept(character):
            raise self.error(f"expected {what}")

    def at_end(self) -> bool:
        self.skip_blanks()
        return self.at == len(self.text)

    def skip_blanks(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def error(self, problem: str, position: int | None = None) -> SpecError:
        return SpecError(problem, self.text, self.at if position is None else position, source=self.source)
