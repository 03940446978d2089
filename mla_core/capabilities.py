"""What a backend declares: sets of values, closed world. What is not declared is not supported.

Every field of `Capabilities` has one checker in `mla_core.request`, the same for selection, explain, error
texts, documentation and the conformance kit. Torch-free and a JSON round trip: readable without any kernel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from packaging.requirements import InvalidRequirement
from packaging.requirements import Requirement as PackagingRequirement
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, field_validator, model_validator

from mla_core.intset import IntSet

__all__ = [
    "Arch",
    "Capabilities",
    "Declined",
    "IntSet",
    "Kernel",
    "Limit",
    "Requirement",
]

Kernel = Literal["mha_prefill", "mqa_decode", "mqa_prefill", "mqa_sparse", "append"]
DType = Literal["float32", "float16", "bfloat16"]
QueryLen = Literal["single", "uniform", "varlen"]
RopeStyle = Literal["interleaved", "half_split", "none"]
Stage = Literal["rope", "append", "v_up", "gate"]
SparseInput = Literal["token_topk"]
GraphLevel = Literal["none", "decode", "full"]

Element = TypeVar("Element")
# Sorted, so that the same declaration always gives the same JSON.
Choice = Annotated[frozenset[Element], PlainSerializer(sorted, return_type=list[str], when_used="json")]

# Request fields that a Limit may speak about, by the type of their values.
INT_FIELDS = frozenset({"page_size", "max_query_len", "heads", "latent", "nope", "rope", "value"})
WORD_FIELDS = frozenset(
    {"kernel", "device", "dtype", "layout", "query_len", "rope_style", "sparse", "cuda_graph"}
)
FLAG_FIELDS = frozenset({"lse", "deterministic", "batch_invariant"})


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Arch:
    """A CUDA architecture such as sm_90a: a number and an optional suffix."""

    number: int
    suffix: str

    @classmethod
    def parse(cls, text: str) -> Arch:
        """Read "sm_90", "sm_90a" or "sm_100f"; ValueError otherwise."""
        match = re.fullmatch(r"sm_(\d+)([af]?)", text)
        if match is None:
            raise ValueError(f"not a CUDA architecture: {text!r}; write sm_90, sm_90a or sm_100f")
        return cls(int(match[1]), match[2])


@dataclass(frozen=True)
class DevicePattern:
    """One element of `Capabilities.devices`: a device kind, or a closed range of architectures."""

    kind: str
    low: Arch | None = None
    high: Arch | None = None

    @classmethod
    def parse(cls, text: str) -> DevicePattern:
        """Read "cpu", "cuda" (any CUDA device), "sm_90" or "sm_80..sm_90"; ValueError otherwise."""
        if text in ("cpu", "cuda"):
            return cls(text)
        first, _, last = text.partition("..")
        low = Arch.parse(first)
        high = Arch.parse(last) if ".." in text else low
        if low.suffix != high.suffix or low.number > high.number:
            raise ValueError(
                f"not a range of architectures: {text!r}; write sm_80..sm_90 or sm_100a..sm_103a"
            )
        return cls("cuda", low, high)

    def fits(self, kind: str, arch: str | None) -> bool:
        """True when the device is meant; a suffix in the pattern must be the device's, none fits all."""
        if kind != self.kind:
            return False
        if self.low is None or self.high is None:
            return True
        if arch is None:
            return False
        device = Arch.parse(arch)
        return self.low.number <= device.number <= self.high.number and self.low.suffix in ("", device.suffix)


@dataclass(frozen=True)
class Requirement:
    """A distribution that a backend needs, as a PEP 508 string."""

    text: str

    def __post_init__(self) -> None:
        try:
            PackagingRequirement(self.text)
        except InvalidRequirement as error:
            raise ValueError(f"not a PEP 508 requirement: {self.text!r}: {error}") from error

    @property
    def name(self) -> str:
        return PackagingRequirement(self.text).name

    def applies(self) -> bool:
        """False when an environment marker (`; python_version < "3.11"`) rules it out here."""
        marker = PackagingRequirement(self.text).marker
        return marker is None or marker.evaluate()

    def allows(self, version: str) -> bool:
        """True when the version meets the specifier; pre-releases count as their version says."""
        return PackagingRequirement(self.text).specifier.contains(version, prereleases=True)


Words = tuple[str | bool, ...]
Allowed = IntSet | Words


def _check_known(field: str) -> None:
    if field not in INT_FIELDS | WORD_FIELDS | FLAG_FIELDS:
        known = ", ".join(sorted(INT_FIELDS | WORD_FIELDS | FLAG_FIELDS))
        raise ValueError(f"unknown request field {field!r}; one of {known}")


def _coerce_rule(rule: Any) -> Any:
    """Lists of ints become IntSets; unknown field names and values of the wrong type are refused."""
    if not isinstance(rule, dict):
        return rule
    for field in rule:
        _check_known(field)
    return {
        field: IntSet.model_validate(value) if field in INT_FIELDS else value for field, value in rule.items()
    }


def _check_words(where: str, field: str, allowed: Allowed) -> None:
    kind = bool if field in FLAG_FIELDS else str
    if isinstance(allowed, IntSet) or not all(isinstance(word, kind) for word in allowed):
        wanted = "true or false" if kind is bool else "words"
        raise ValueError(f"{where}: {field} takes a list of {wanted}, got {allowed}")
    if field == "device":
        _check_devices(frozenset(str(word) for word in allowed))


class Limit(_Record):
    """A rule across fields: when all of `when` holds of a request, all of `then` must hold too."""

    name: str
    when: dict[str, Allowed]
    then: dict[str, Allowed]
    because: str

    _coerce = field_validator("when", "then", mode="before")(_coerce_rule)

    @model_validator(mode="after")
    def _check(self) -> Limit:
        for field, allowed in (*self.when.items(), *self.then.items()):
            if field not in INT_FIELDS:
                _check_words(f"limit {self.name!r}", field, allowed)
        return self


class Declined(_Record):
    """A value that perhaps works but is deliberately not offered, with the reason."""

    field: str
    value: bool | int | str
    because: str

    @field_validator("field")
    @classmethod
    def _known(cls, field: str) -> str:
        _check_known(field)
        return field

    def as_allowed(self) -> Allowed:
        """The one value as a set, to be compared like a Limit's."""
        if isinstance(self.value, (bool, str)):
            return (self.value,)
        return IntSet.exact(self.value)


def _check_devices(devices: frozenset[str]) -> frozenset[str]:
    for device in devices:
        DevicePattern.parse(device)
    return devices


class Capabilities(_Record):
    """What a backend can do. Defaults mean "no"; each element of a set is a cell of the matrix."""

    # "cpu", "cuda" (any CUDA device), "sm_90", or a closed range "sm_80..sm_90"; suffixes a and f count.
    devices: Choice[str] = frozenset()
    kernels: Choice[Kernel] = frozenset()
    dtypes: Choice[DType] = frozenset()
    # Cache layout id to page sizes.
    layouts: dict[str, IntSet] = {}
    # Of mqa_decode: lengths of the new tokens of the requests in one call.
    query_len: Choice[QueryLen] = frozenset()
    # Of mqa_decode; None: no limit.
    max_query_len: Annotated[int, Field(gt=0)] | None = None
    # Per rank.
    heads: IntSet = IntSet()
    latent: IntSet = IntSet()
    nope: IntSet = IntSet()
    rope: IntSet = IntSet()
    value: IntSet = IntSet()
    # Stages that the backend does itself and the layer therefore skips.
    owns: Choice[Stage] = frozenset()
    rope_styles: Choice[RopeStyle] = frozenset()
    returns: Choice[Literal["lse"]] = frozenset()
    sparse: Choice[SparseInput] = frozenset()
    cuda_graph: GraphLevel = "none"
    deterministic: bool = False
    batch_invariant: bool = False
    # PEP 508 strings.
    requires: tuple[str, ...] = ()
    known_bad: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()
    declined: tuple[Declined, ...] = ()

    _devices = field_validator("devices")(_check_devices)

    @field_validator("requires", "known_bad")
    @classmethod
    def _requirements(cls, texts: tuple[str, ...]) -> tuple[str, ...]:
        for text in texts:
            Requirement(text)
        return texts

    @model_validator(mode="after")
    def _check(self) -> Capabilities:
        if "rope" in self.owns and "append" not in self.owns:
            raise ValueError(
                "owns rope but not append: cached keys are rotated, so who rotates must also append"
            )
        if "rope" in self.owns and not self.rope_styles:
            raise ValueError("owns rope but declares no rope_styles, so it could never be selected")
        return self
