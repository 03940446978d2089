"""What a layer wants of a kernel, and the one function that says whether a declaration offers it.

`reasons(capabilities, request)` is the only checker: selection, explain, error texts, the capability matrix
and the conformance kit all call it. An empty list means yes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mla_core.capabilities import (
    Allowed,
    Arch,
    Capabilities,
    DevicePattern,
    DType,
    IntSet,
    Kernel,
    QueryLen,
    Requirement,
    RopeStyle,
    SparseInput,
)
from mla_core.errors import ConfigError

__all__ = ["CHECKERS", "DeviceInfo", "KernelRequest", "LayerRequest", "Reason", "reasons"]

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DeviceInfo(_Record):
    """A device as selection sees it: no torch, and the device need not exist here."""

    kind: Literal["cpu", "cuda"]
    arch: str | None = None
    name: str | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceInfo:
        """Read "cpu", "cuda" or "cuda:sm_90a". Raises ConfigError."""
        if text == "cpu":
            return cls(kind="cpu")
        if text == "cuda":
            return cls(kind="cuda")
        kind, _, arch = text.partition(":")
        if kind != "cuda":
            raise _bad_device(text)
        return cls(kind="cuda", arch=_checked_arch(text, arch))

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, data: Any) -> Any:
        return cls.parse(data).model_dump() if isinstance(data, str) else data

    @model_validator(mode="after")
    def _check(self) -> DeviceInfo:
        if self.arch is not None:
            if self.kind == "cpu":
                raise ValueError(f"a cpu has no CUDA architecture, got {self.arch!r}")
            Arch.parse(self.arch)
        return self

    def __str__(self) -> str:
        return self.kind if self.arch is None else f"{self.kind}:{self.arch}"


def _checked_arch(text: str, arch: str) -> str:
    try:
        Arch.parse(arch)
    except ValueError as error:
        raise _bad_device(text) from error
    return arch


def _bad_device(text: str) -> ConfigError:
    return ConfigError(f"not a device to plan for: {text!r}; write cpu, cuda, cuda:sm_90 or cuda:sm_90a")


class Reason(_Record):
    """Why a declaration does not offer what a request wants, in one field."""

    field: str
    wanted: str
    offered: str
    hint: str | None = None

    def __str__(self) -> str:
        text = f"{self.field}: wanted {self.wanted}, offered {self.offered}"
        return text if self.hint is None else f"{text} ({self.hint})"


class KernelRequest(_Record):
    """What one kernel is wanted for; field names as in `Capabilities`, None means not asked."""

    kernel: Kernel
    device: DeviceInfo
    dtype: DType
    layout: str | None = None
    page_size: Positive | None = None
    query_len: QueryLen | None = None
    max_query_len: Positive | None = None
    heads: Positive | None = None
    latent: Positive | None = None
    nope: Positive | None = None
    rope: NotNegative | None = None
    value: Positive | None = None
    rope_style: RopeStyle | None = None
    lse: bool = False
    sparse: SparseInput | None = None
    cuda_graph: Literal["decode", "full"] | None = None
    deterministic: bool = False
    batch_invariant: bool = False


class LayerRequest(_Record):
    """What one layer wants of its kernels, before weights or kernels exist."""

    device: DeviceInfo
    dtype: DType
    layout: str
    # None until a cache exists; the page size always comes from the cache.
    page_size: Positive | None = None
    # How query lengths of decode requests vary; None: single when max_query_len is 1, else varlen.
    query_len: QueryLen | None = None
    # 1 + draft tokens: the longest query that counts as decode.
    max_query_len: Positive = 1
    # Per rank.
    heads: Positive
    latent: Positive
    nope: Positive
    rope: NotNegative
    value: Positive
    rope_style: RopeStyle = "interleaved"
    # Decode must return lse (context parallel); prefill always must.
    lse: bool = False
    sparse: SparseInput | None = None
    cuda_graph: Literal["decode", "full"] | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    prefill_form: Literal["auto", "expand", "absorb"] = "auto"
    # Context tokens that chunked prefill may expand at once.
    workspace_tokens: Positive | None = None

    def at_page_size(self, page_size: int) -> LayerRequest:
        """The same layer over a cache whose page size is known."""
        return self.model_copy(update={"page_size": page_size})

    def kernel_request(self, kernel: Kernel) -> KernelRequest:
        """What this layer wants of one kernel: only the fields that the kernel sees are asked."""
        asked = {field: getattr(self, field) for field in (*_EVERY_KERNEL, *_ASKED[kernel])}
        if kernel in ("mha_prefill", "mqa_prefill"):
            # Chunks of a cached prefix are merged by lse; prefill is captured at the full graph level only.
            asked |= {"lse": True, "cuda_graph": "full" if self.cuda_graph == "full" else None}
        if "query_len" in asked and self.query_len is None:
            asked["query_len"] = "single" if self.max_query_len == 1 else "varlen"
        return KernelRequest(kernel=kernel, **asked)


_EVERY_KERNEL = ("device", "dtype", "rope", "deterministic", "batch_invariant", "cuda_graph")
_ATTENTION = ("heads", "value", "rope_style", "lse")
_PAGED = ("latent", "layout", "page_size")
_DECODE = ("query_len", "max_query_len")
_ASKED: dict[Kernel, tuple[str, ...]] = {
    "mha_prefill": (*_ATTENTION, "nope"),
    "mqa_prefill": (*_ATTENTION, *_PAGED),
    "mqa_decode": (*_ATTENTION, *_PAGED, *_DECODE),
    "mqa_sparse": (*_ATTENTION, *_PAGED, *_DECODE, "sparse"),
    "append": _PAGED,
}


Installed = Callable[[str], str | None]
Found = Iterator[Reason]
Checker = Callable[[Capabilities, KernelRequest, Installed], Found]


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def reasons(
    capabilities: Capabilities, request: KernelRequest, installed: Installed = installed_version
) -> list[Reason]:
    """Every reason why the declaration does not offer what is wanted; empty means yes.

    `installed` gives the version of a distribution, None when absent; by default the running environment's.
    """
    found: dict[tuple[str, str], Reason] = {}
    for check in CHECKERS.values():
        for reason in check(capabilities, request, installed):
            key = (reason.field, reason.wanted)
            # The first checker knows what is offered instead; a later one (limits, declined) knows why.
            found[key] = found[key].model_copy(update={"hint": reason.hint}) if key in found else reason
    return list(found.values())


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words)) or "none"


def _devices(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
    device = request.device
    if not any(DevicePattern.parse(text).fits(device.kind, device.arch) for text in capabilities.devices):
        yield Reason(field="device", wanted=str(device), offered=_listed(capabilities.devices))


def _kernels(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
    offered = capabilities.kernels | (capabilities.owns & {"append"})
    if request.kernel not in offered:
        yield Reason(field="kernel", wanted=request.kernel, offered=_listed(offered))


def _layouts(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
    if request.layout is None:
        return
    pages = capabilities.layouts.get(request.layout)
    if pages is None:
        yield Reason(field="layout", wanted=request.layout, offered=_listed(capabilities.layouts))
    elif request.page_size is not None and request.page_size not in pages:
        yield Reason(
            field="page_size",
            wanted=str(request.page_size),
            offered=str(pages),
            hint=f"with layout {request.layout}",
        )


def _max_query_len(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
    wanted, limit = request.max_query_len, capabilities.max_query_len
    if wanted is not None and limit is not None and wanted > limit:
        yield Reason(field="max_query_len", wanted=str(wanted), offered=f"1..{limit}")


def _value(capabilities: Capabilities, request: KernelRequest, installed: Installed) -> Found:
    # The absorb form returns latents: without v_up its kernels never see the value width.
    if request.kernel == "mha_prefill" or "v_up" in capabilities.owns:
        yield from _dim("value")(capabilities, request, installed)


def _owns(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
    # An append that is asked for a rope style is asked to rotate the key as well.
    if request.kernel == "append" and request.rope_style is not None and "rope" not in capabilities.owns:
        yield Reason(field="owns", wanted="rope", offered=_listed(capabilities.owns))


def _rope_styles(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
    # Who does not own rope gets rotated queries and keys, whatever the style.
    if "rope" in capabilities.owns and request.rope_style not in (None, *capabilities.rope_styles):
        offered = _listed(capabilities.rope_styles)
        yield Reason(field="rope_style", wanted=str(request.rope_style), offered=offered)


def _returns(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
    if request.lse and "lse" not in capabilities.returns:
        yield Reason(field="lse", wanted="returned", offered="not returned")


_GRAPH_LEVELS = ("none", "decode", "full")


def _cuda_graph(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
    wanted = request.cuda_graph or "none"
    if _GRAPH_LEVELS.index(wanted) > _GRAPH_LEVELS.index(capabilities.cuda_graph):
        yield Reason(field="cuda_graph", wanted=wanted, offered=capabilities.cuda_graph)


def _requires(capabilities: Capabilities, _: KernelRequest, installed: Installed) -> Found:
    for requirement in map(Requirement, capabilities.requires):
        version = installed(requirement.name) if requirement.applies() else None
        if requirement.applies() and (version is None or not requirement.allows(version)):
            offered = "not installed" if version is None else f"{requirement.name} {version}"
            hint = f"pip install '{requirement.text}'"
            yield Reason(field="requires", wanted=requirement.text, offered=offered, hint=hint)


def _known_bad(capabilities: Capabilities, _: KernelRequest, installed: Installed) -> Found:
    for bad in map(Requirement, capabilities.known_bad):
        version = installed(bad.name) if bad.applies() else None
        if version is not None and bad.allows(version):
            yield Reason(field="known_bad", wanted=f"not {bad.text}", offered=f"{bad.name} {version}")


def _limits(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
    for limit in capabilities.limits:
        if not all(_meets(request, field, allowed, unasked=False) for field, allowed in limit.when.items()):
            continue
        for field, allowed in limit.then.items():
            if not _meets(request, field, allowed, unasked=True):
                wanted = str(getattr(request, field))
                yield Reason(field=field, wanted=wanted, offered=_offered(allowed), hint=limit.because)


def _meets(request: KernelRequest, field: str, allowed: Allowed, *, unasked: bool) -> bool:
    value = getattr(request, field)
    if value is None:
        return unasked
    if field == "device" and not isinstance(allowed, IntSet):
        return any(DevicePattern.parse(str(text)).fits(value.kind, value.arch) for text in allowed)
    return value in allowed


def _offered(allowed: Allowed) -> str:
    return str(allowed) if isinstance(allowed, IntSet) else _listed(str(value) for value in allowed)


def _declined(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
    for declined in capabilities.declined:
        if _meets(request, declined.field, declined.as_allowed(), unasked=False):
            wanted = str(getattr(request, declined.field))
            yield Reason(field=declined.field, wanted=wanted, offered="declined", hint=declined.because)


def _dim(field: str) -> Checker:
    """Checker of a number that must lie in an IntSet."""

    def check(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
        wanted, offered = getattr(request, field), getattr(capabilities, field)
        if wanted is not None and wanted not in offered:
            yield Reason(field=field, wanted=str(wanted), offered=str(offered))

    return check


def _word(field: str, declared: str) -> Checker:
    """Checker of a word that must be declared."""

    def check(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
        wanted, offered = getattr(request, field), getattr(capabilities, declared)
        if wanted is not None and wanted not in offered:
            yield Reason(field=field, wanted=wanted, offered=_listed(offered))

    return check


def _property(field: str) -> Checker:
    """Checker of a property that a request may insist on."""

    def check(capabilities: Capabilities, request: KernelRequest, _: Installed) -> Found:
        if getattr(request, field) and not getattr(capabilities, field):
            yield Reason(field=field, wanted="yes", offered="no")

    return check


# One checker for every field of Capabilities, in the order in which reasons are reported.
CHECKERS: dict[str, Checker] = {
    "devices": _devices,
    "kernels": _kernels,
    "dtypes": _word("dtype", "dtypes"),
    "layouts": _layouts,
    "query_len": _word("query_len", "query_len"),
    "max_query_len": _max_query_len,
    "heads": _dim("heads"),
    "latent": _dim("latent"),
    "nope": _dim("nope"),
    "rope": _dim("rope"),
    "value": _value,
    "owns": _owns,
    "rope_styles": _rope_styles,
    "returns": _returns,
    "sparse": _word("sparse", "sparse"),
    "cuda_graph": _cuda_graph,
    "deterministic": _property("deterministic"),
    "batch_invariant": _property("batch_invariant"),
    "requires": _requires,
    "known_bad": _known_bad,
    "limits": _limits,
    "declined": _declined,
}
