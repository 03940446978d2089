"""The request from which cells step away: small, inside the declaration, with dims that all differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from mla_core.capabilities import Allowed, Capabilities, IntSet, Kernel
from mla_core.request import DeviceInfo, LayerRequest, reasons

__all__ = ["Base"]

# Small first: a cell should take milliseconds. All different, so that mixing two up is noticed.
_PREFERRED: dict[str, tuple[int, ...]] = {
    "heads": (3, 4, 8, 16, 2, 1, 32, 64, 128),
    "latent": (16, 32, 64, 128, 256, 512),
    "nope": (12, 16, 32, 64, 128, 192),
    "rope": (8, 16, 32, 64, 0),
    "value": (10, 24, 16, 32, 64, 128, 256),
}
_PAGES = (4, 16, 32, 64, 128, 1)
_DTYPES = ("float32", "bfloat16", "float16")
_PLAIN = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_FEW, _TRIED = 3, 500


class Base:
    """Finds requests inside a declaration, as near to the same small one as its limits allow."""

    def __init__(self, offered: Capabilities, device: DeviceInfo) -> None:
        self.offered, self.device = offered, device
        rules = [rule for limit in offered.limits for rule in (limit.when, limit.then)]
        # Fields that rules across fields speak about; each other field stands alone.
        self._ruled = {field for rule in rules for field in rule} | {d.field for d in offered.declined}
        self._suggested = {
            field: [value for rule in rules if field in rule for value in _numbers(rule[field])]
            for field in self._ruled
        }
        self._first = next(self._candidates({}))

    def asks(self, kernel: Kernel, changes: dict[str, Any]) -> bool:
        """Does the kernel see every field of these changes?"""
        seen = self._request({}).kernel_request(kernel).model_fields_set
        return changes.keys() <= seen | {"kernel"}

    def near(self, kernels: Sequence[Kernel], changes: dict[str, Any]) -> LayerRequest:
        """A request with these values that is offered for all kernels; if none is, the one with the fewest
        objections.
        """
        best, fewest = self._request(changes), -1
        for free in itertools.islice(self._candidates(changes), _TRIED):
            request = self._request({**free, **changes})
            objections = sum(len(reasons(self.offered, request.kernel_request(k))) for k in kernels)
            if objections == 0:
                return request
            if fewest < 0 or objections < fewest:
                best, fewest = request, objections
        return best

    def _request(self, values: dict[str, Any]) -> LayerRequest:
        fields = {"device": self.device, **self._first, **values}
        if fields.get("max_query_len", 1) == 1 and "query_len" not in values:
            fields["query_len"] = None
        return LayerRequest(**fields)

    def _candidates(self, changes: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Values of the fields that are not fixed, preferred ones first."""
        free = self._free(changes)
        free = {field: values if field in self._ruled else values[:1] for field, values in free.items()}
        for storage in self._storages(changes):
            for values in itertools.product(*free.values()):
                yield {**storage, **dict(zip(free, values, strict=True))}

    def _free(self, changes: dict[str, Any]) -> dict[str, list[Any]]:
        free: dict[str, list[Any]] = {
            field: _few(getattr(self.offered, field), preferred, self._suggested.get(field, ()))
            for field, preferred in _PREFERRED.items()
            if field not in changes
        }
        if changes.get("max_query_len", 1) > 1 and "query_len" not in changes:
            free["query_len"] = [w for w in ("varlen", "uniform") if w in self.offered.query_len] or [
                "varlen"
            ]
        if "rope_style" not in changes and "rope" in self.offered.owns:
            free["rope_style"] = sorted(self.offered.rope_styles)
        return free

    def _storages(self, changes: dict[str, Any]) -> list[dict[str, Any]]:
        """dtype, layout and page size together: an unquantised cache of the same type first."""
        dtypes = [dtype for dtype in _DTYPES if dtype in self.offered.dtypes] or ["float32"]
        found = []
        for dtype in [changes["dtype"]] if "dtype" in changes else dtypes:
            plain = _PLAIN[dtype]
            layouts = sorted(self.offered.layouts, key=lambda name: (name != plain, name)) or [plain]
            for layout in [changes["layout"]] if changes.get("layout") else layouts:
                pages = _few(self.offered.layouts.get(layout, IntSet()), _PAGES)
                pages = [changes["page_size"]] if changes.get("page_size") else pages
                found += [{"dtype": dtype, "layout": layout, "page_size": page} for page in pages]
        return found


def _few(offered: IntSet, preferred: Sequence[int], suggested: Sequence[int] = ()) -> list[int]:
    """A few members, preferred ones first, and those that rules suggest; a preferred one when none is
    declared.
    """
    inside = [value for value in preferred if value in offered] + list(offered.edges()[0])
    also = [value for value in suggested if value in offered]
    return list(dict.fromkeys([*inside[:_FEW], *also])) or [preferred[0]]


def _numbers(allowed: Allowed) -> tuple[int, ...]:
    return allowed.edges()[0] if isinstance(allowed, IntSet) else ()
