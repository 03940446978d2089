"""Which values of each field are worth trying: all declared ones, the edges, and one step outside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from mla_core.capabilities import (
    INT_FIELDS,
    Allowed,
    Arch,
    Capabilities,
    DevicePattern,
    DType,
    IntSet,
    Kernel,
    Limit,
    RopeStyle,
)
from mla_core.request import DeviceInfo, LayerRequest

__all__ = ["PROBES", "Probe", "example_device", "limit_probes", "mix_values", "probes"]

# Architectures that exist, oldest first: "one step outside" is the neighbour in this list.
KNOWN_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")

# Real models' dims, tried where an open range includes them.
_REAL: dict[str, tuple[int, ...]] = {
    "heads": (16, 128),
    "latent": (512,),
    "nope": (128, 192),
    "rope": (64,),
    "value": (128, 256),
    "page_size": (64,),
    "max_query_len": (2, 8, 16),
}


@dataclass(frozen=True)
class Probe:
    """A value of one field to try, as changes to the base request."""

    field: str
    value: str
    changes: dict[str, Any]


@dataclass(frozen=True)
class Room:
    """What probing needs to know beside the declaration."""

    offered: Capabilities
    device: DeviceInfo
    layouts: tuple[str, ...]
    quick: bool


Source = Callable[[Room], Iterator[Probe]]


def probes(
    offered: Capabilities, kernel: Kernel, device: DeviceInfo, layouts: Iterable[str], *, quick: bool
) -> Iterator[Probe]:
    """All values worth trying of every field that the kernel sees."""
    room = Room(offered, device, tuple(layouts), quick)
    seen = _asked(kernel)
    for field, source in PROBES.items():
        if field in seen:
            yield from source(room)


def _asked(kernel: Kernel) -> set[str]:
    sample = LayerRequest(
        device=DeviceInfo(kind="cpu"), dtype="float32", layout="x", heads=1, latent=1, nope=1, rope=0, value=1
    )
    return sample.kernel_request(kernel).model_fields_set - {"kernel"}


def limit_probes(limit: Limit, offered: Capabilities, kernel: Kernel) -> Iterator[Probe]:
    """Both sides of a named limit for one kernel: kept, and each of its consequences broken alone."""
    if not _about(kernel, limit.when):
        return
    when = {field: _member(allowed, field, offered) for field, allowed in _others(limit.when)}
    kept = {field: _member(allowed, field, offered) for field, allowed in _others(limit.then)}
    if not _about(kernel, limit.then):
        yield Probe(limit.name, f"kernel={kernel}", {**when, **kept})
        return
    yield Probe(limit.name, "kept", {**when, **kept})
    for field, allowed in _others(limit.then):
        for value in _strangers(allowed, field, offered):
            yield Probe(limit.name, f"{field}={value}", {**when, **kept, field: value})


def _about(kernel: Kernel, rule: dict[str, Allowed]) -> bool:
    return kernel in rule.get("kernel", (kernel,))


def _others(rule: dict[str, Allowed]) -> list[tuple[str, Allowed]]:
    """A rule's fields but for the kernel, which a probe is already for."""
    return [(field, allowed) for field, allowed in rule.items() if field != "kernel"]


def mix_values(offered: Capabilities, *, quick: bool) -> dict[str, list[Any]]:
    """Declared values to mix: a few of each field."""
    found: dict[str, list[Any]] = {"dtype": sorted(offered.dtypes), "layout": sorted(offered.layouts)}
    for field in ("heads", "latent", "nope", "rope", "value"):
        found[field] = _inside(field, getattr(offered, field), quick)[:4]
    if offered.query_len - {"single"}:
        lens = [1, 2, offered.max_query_len or 5]
        found["max_query_len"] = sorted({n for n in lens if n <= (offered.max_query_len or n)})
    return found


def _devices(room: Room) -> Iterator[Probe]:
    wanted = ["cpu", str(room.device)]
    for text in sorted(room.offered.devices):
        wanted += _archs(DevicePattern.parse(text))
    for text in dict.fromkeys(wanted):
        yield Probe("device", text, {"device": DeviceInfo.parse(text)})


def _archs(pattern: DevicePattern) -> list[str]:
    """Ends of a range and the architectures next to it."""
    if pattern.kind == "cpu":
        return []
    if pattern.low is None or pattern.high is None:
        return [f"cuda:{arch}" for arch in (KNOWN_ARCHS[0], KNOWN_ARCHS[-1])]
    numbers = [Arch.parse(arch).number for arch in KNOWN_ARCHS]
    below = [arch for arch, number in zip(KNOWN_ARCHS, numbers, strict=True) if number < pattern.low.number]
    above = [arch for arch, number in zip(KNOWN_ARCHS, numbers, strict=True) if number > pattern.high.number]
    ends = [f"sm_{arch.number}{arch.suffix}" for arch in (pattern.low, pattern.high)]
    return [f"cuda:{arch}" for arch in dict.fromkeys([*below[-1:], *ends, *above[:1]])]


def example_device(pattern: str) -> str:
    """A device that an element of `Capabilities.devices` means: the lowest architecture of a range."""
    low = DevicePattern.parse(pattern).low
    return pattern if low is None else f"cuda:sm_{low.number}{low.suffix}"


def _dtypes(room: Room) -> Iterator[Probe]:
    for dtype in get_args(DType):
        yield Probe("dtype", dtype, {"dtype": dtype})


def _layouts(room: Room) -> Iterator[Probe]:
    for layout in sorted({*room.layouts, *room.offered.layouts}):
        yield Probe("layout", layout, {"layout": layout})


def _page_sizes(room: Room) -> Iterator[Probe]:
    for layout, pages in sorted(room.offered.layouts.items()):
        for page_size in _both_sides("page_size", pages, room.quick):
            changes = {"layout": layout, "page_size": page_size}
            yield Probe("page_size", f"{page_size}({layout})", changes)


def _query_lens(room: Room) -> Iterator[Probe]:
    longest = min(room.offered.max_query_len or 3, 3)
    for word, length in (("single", 1), ("uniform", longest), ("varlen", longest)):
        yield Probe("query_len", word, {"query_len": word, "max_query_len": length})


def _max_query_len(room: Room) -> Iterator[Probe]:
    limit = room.offered.max_query_len
    lengths = {1, *(() if limit is None else (limit, limit + 1))}
    lengths |= {n for n in _REAL["max_query_len"] if not room.quick and (limit is None or n < limit)}
    # Of a kernel for single queries, longer ones are refused by query_len.
    lengths = lengths if room.offered.query_len - {"single"} else {1}
    for length in sorted(lengths):
        yield Probe("max_query_len", str(length), {"max_query_len": length})


def _numbers(field: str) -> Source:
    def source(room: Room) -> Iterator[Probe]:
        for value in _both_sides(field, getattr(room.offered, field), room.quick):
            yield Probe(field, str(value), {field: value})

    return source


def _rope_styles(room: Room) -> Iterator[Probe]:
    # Who does not own rope never sees a style.
    styles = get_args(RopeStyle) if "rope" in room.offered.owns else ()
    for style in set(styles) - room.offered.rope_styles:
        yield Probe("rope_style", style, {"rope_style": style})


def _flag(field: str) -> Source:
    def source(room: Room) -> Iterator[Probe]:
        yield Probe(field, "True", {field: True})

    return source


def _graphs(room: Room) -> Iterator[Probe]:
    for level in ("decode", "full"):
        yield Probe("cuda_graph", level, {"cuda_graph": level})


def _sparse(room: Room) -> Iterator[Probe]:
    yield Probe("sparse", "token_topk", {"sparse": "token_topk"})


# One source for every field of a kernel request; a test compares.
PROBES: dict[str, Source] = {
    "device": _devices,
    "dtype": _dtypes,
    "layout": _layouts,
    "page_size": _page_sizes,
    "query_len": _query_lens,
    "max_query_len": _max_query_len,
    "heads": _numbers("heads"),
    "latent": _numbers("latent"),
    "nope": _numbers("nope"),
    "rope": _numbers("rope"),
    "value": _numbers("value"),
    "rope_style": _rope_styles,
    "lse": _flag("lse"),
    "sparse": _sparse,
    "cuda_graph": _graphs,
    "deterministic": _flag("deterministic"),
    "batch_invariant": _flag("batch_invariant"),
}


def _inside(field: str, offered: IntSet, quick: bool) -> list[int]:
    real = [value for value in _REAL.get(field, ()) if value in offered and not quick]
    return sorted({*offered.edges()[0], *real})


def _both_sides(field: str, offered: IntSet, quick: bool) -> list[int]:
    return sorted({*_inside(field, offered, quick), *offered.edges()[1]})


def _member(allowed: Allowed, field: str, offered: Capabilities) -> Any:
    """A value that a limit allows, one that the declaration offers where possible."""
    if not isinstance(allowed, IntSet):
        return DeviceInfo.parse(example_device(str(allowed[0]))) if field == "device" else allowed[0]
    inside = allowed.edges()[0]
    return next((value for value in inside if value in _offered(field, offered)), inside[0])


def _strangers(allowed: Allowed, field: str, offered: Capabilities) -> list[Any]:
    """Values that a limit forbids, those next to its edges that the declaration offers otherwise."""
    if field in INT_FIELDS and isinstance(allowed, IntSet):
        return [value for value in allowed.edges()[1] if value in _offered(field, offered)]
    declared = {"dtype": offered.dtypes, "layout": offered.layouts, "query_len": offered.query_len}
    flags = {"lse": (True, False), "deterministic": (True, False), "batch_invariant": (True, False)}
    words = [*sorted(declared.get(field, ())), *flags.get(field, ())]
    return [word for word in words if not isinstance(allowed, IntSet) and word not in allowed]


def _offered(field: str, offered: Capabilities) -> IntSet:
    if field == "page_size":
        return IntSet.of(*(value for pages in offered.layouts.values() for value in pages.edges()[0]))
    if field == "max_query_len":
        return IntSet.range(1, offered.max_query_len)
    found: IntSet = getattr(offered, field)
    return found
