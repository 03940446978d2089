"""What `mla run` runs: requests, and the engine steps that advance them. No torch here.

    requests := item ("," item)*
    item     := phase ":" new ("+" cached)? ("x" count)?
    phase    := prefill | chunk | decode | verify

"decode:1+4096x4" is four requests with 4096 cached tokens and one new one each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mla_core.errors import ConfigError

__all__ = ["Request", "Scenario", "Step", "Work", "default_scenario", "parse_requests"]

_ITEM = re.compile(r"(?P<phase>[a-z]+):(?P<new>\d+)(?:\+(?P<cached>\d+))?(?:x(?P<count>\d+))?")
PHASES = ("prefill", "chunk", "decode", "verify")
EXAMPLE = "prefill:512,chunk:256+1024,decode:1+4096x4,verify:3+200"


@dataclass(frozen=True)
class Request:
    """A sequence of tokens: it starts empty, as a copy of its parent, or with rows put into the cache."""

    name: str
    parent: str | None = None
    cached: int = 0


@dataclass(frozen=True)
class Work:
    """What one engine step does for one request: `tokens` new tokens after `context` cached ones."""

    request: str
    phase: str
    tokens: int
    context: int

    def __str__(self) -> str:
        return f"{self.phase} {self.tokens}" + (f"+{self.context}" if self.context else "")


@dataclass(frozen=True)
class Step:
    """One engine step: what it does, in the order of the batch."""

    name: str
    work: tuple[Work, ...]

    @property
    def tokens(self) -> int:
        return sum(work.tokens for work in self.work)


@dataclass(frozen=True)
class Scenario:
    """Requests, parents before children, and the steps that run them."""

    requests: tuple[Request, ...]
    steps: tuple[Step, ...]

    @property
    def max_decode_query_len(self) -> int:
        """The longest query that is meant as decode: one token, or one and the drafts to verify."""
        return max([1, *(work.tokens for work in self._work() if work.phase in ("decode", "verify"))])

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens of every request when all steps have run, its parent's included."""
        found = {request.name: request.cached for request in self.requests}
        return found | {work.request: work.context + work.tokens for work in self._work()}

    @property
    def new_tokens(self) -> dict[str, int]:
        """Tokens that go through the layer, by request."""
        found = dict.fromkeys((request.name for request in self.requests), 0)
        for work in self._work():
            found[work.request] += work.tokens
        return found

    def works_of(self, request: str) -> tuple[Work, ...]:
        """What the steps do for one request, in order."""
        return tuple(work for work in self._work() if work.request == request)

    def _work(self) -> Iterator[Work]:
        return (work for step in self.steps for work in step.work)


def default_scenario() -> Scenario:
    """One request through its life, then a step that mixes every phase in no order.

    It is prefilled, continued by a chunk, and decoded; then copies of it, which share its pages, are decoded
    and verified beside its next chunk and a stranger's prefill.
    """
    prompt, more, decoded = 96, 48, 4
    middle = prompt + more
    end = middle + decoded
    decode = [Step("decode", (Work("main", "decode", 1, middle + i),)) for i in range(decoded)]
    mixed = (
        Work("copy1", "decode", 1, end),
        Work("other", "prefill", 40, 0),
        Work("copy2", "verify", 3, end),
        Work("main", "chunk", 24, end),
        Work("copy3", "decode", 1, end),
    )
    copies = tuple(Request(f"copy{i}", parent="main") for i in (1, 2, 3))
    return Scenario(
        requests=(Request("main"), *copies, Request("other")),
        steps=(
            Step("prefill", (Work("main", "prefill", prompt, 0),)),
            Step("chunk", (Work("main", "chunk", more, prompt),)),
            *decode,
            Step("mixed", mixed),
        ),
    )


def parse_requests(text: str) -> Scenario:
    """One step over the requests of a string such as EXAMPLE. Raises ConfigError."""
    work: list[Work] = []
    for item in text.split(","):
        phase, new, cached, count = _item(item.strip())
        work += [Work(f"request{len(work) + i}", phase, new, cached) for i in range(count)]
    requests = tuple(Request(each.request, cached=each.context) for each in work)
    return Scenario(requests, (Step("mixed" if len(work) > 1 else work[0].phase, tuple(work)),))


def _item(text: str) -> tuple[str, int, int, int]:
    match = _ITEM.fullmatch(text)
    if match is None or match["phase"] not in PHASES:
        raise ConfigError(
            f"not a request: {text!r}; write PHASE:NEW+CACHEDxCOUNT, phases are {', '.join(PHASES)}; "
            f"for example {EXAMPLE}"
        )
    phase, new, cached = match["phase"], int(match["new"]), int(match["cached"] or 0)
    count = 1 if match["count"] is None else int(match["count"])
    problem = _problem(phase, new, cached, count)
    if problem:
        raise ConfigError(f"request {text!r}: {problem}; for example {EXAMPLE}")
    return phase, new, cached, count


def _problem(phase: str, new: int, cached: int, count: int) -> str | None:
    if new < 1 or count < 1:
        return "new tokens and count must be at least 1"
    if phase == "prefill" and cached:
        return f"a prefill starts with nothing cached; write chunk:{new}+{cached}"
    if phase != "prefill" and not cached:
        return f"{phase} continues cached tokens; write {phase}:{new}+100 for 100 of them"
    if phase == "decode" and new != 1:
        return f"decode adds one token; write verify:{new}+{cached} or chunk:{new}+{cached}"
    return None
