"""The cells of a declaration: every value, one step outside, limits on both sides, mixes, and all checks.

Whether a cell is declared is never written down twice: `mla_core.request.reasons` says so, as it does for
selection. Packages are left out of it here; a missing one makes a cell unverified, not undeclared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict

from mla_core.capabilities import Capabilities, Kernel
from mla_core.conformance.base import Base
from mla_core.conformance.catalogue import BASIC, LAYER, Check, checks_for
from mla_core.conformance.mixes import pairwise
from mla_core.conformance.values import Probe, limit_probes, mix_values, probes
from mla_core.conformance.verdicts import Claim
from mla_core.request import DeviceInfo, LayerRequest, Reason, reasons

__all__ = ["KERNELS", "Cell", "cells_of"]

KERNELS: tuple[Kernel, ...] = ("mha_prefill", "mqa_decode", "mqa_prefill", "mqa_sparse", "append")
MIXES, QUICK_MIXES = 24, 6


class Cell(BaseModel):
    """One thing to try: a kernel, the layer it is wanted for, and the check that judges it.

    group: value (one field away from the base request), limit, grid, mix, check, control (a check whose
    expected answer has a deliberate fault and which must therefore fail).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    group: str
    kernel: str
    field: str
    value: str
    claim: Claim
    reasons: tuple[Reason, ...] = ()
    layer: LayerRequest
    check: str
    control: str | None = None

    @property
    def suite(self) -> str:
        """The suite of tests that it belongs to."""
        return self.check.partition(".")[0] if self.group in ("check", "control") else self.group


def cells_of(
    capabilities: Capabilities, device: DeviceInfo, layouts: Iterable[str], *, quick: bool, seed: int
) -> list[Cell]:
    """Every cell of a declaration as seen from one device; `layouts` are the cache layouts that exist.

    Ids are stable: they depend on the declaration, not on order or seed (mixes are numbered).
    """
    maker = _Maker(capabilities, device, tuple(layouts), quick, seed)
    found: dict[str, Cell] = {}
    for cell in maker.all():
        found.setdefault(cell.id, cell)
    return list(found.values())


class _Maker:
    def __init__(
        self, capabilities: Capabilities, device: DeviceInfo, layouts: tuple[str, ...], quick: bool, seed: int
    ) -> None:
        # What packages are installed is another question, asked where the cell is tried.
        self.offered = capabilities.model_copy(update={"requires": (), "known_bad": ()})
        self.base = Base(self.offered, device)
        self.device, self.layouts, self.quick, self.seed = device, layouts, quick, seed

    def all(self) -> Iterator[Cell]:
        for kernel in KERNELS:
            yield self._kernel_cell(kernel)
            if self._declares(kernel):
                yield from self._values(kernel)
                yield from self._limits(kernel)
                yield from self._grid(kernel)
                yield from self._mixes(kernel)
                yield from self._checks(kernel)
        if any(self._declares(kernel) for kernel in KERNELS[:3]):
            yield from self._stages()
            yield from self._checks(LAYER)

    def _declares(self, kernel: Kernel) -> bool:
        return kernel in self.offered.kernels or kernel in self.offered.owns & {"append"}

    def _kernel_cell(self, kernel: Kernel) -> Cell:
        return self._cell("value", kernel, "kernel", kernel, {})

    def _values(self, kernel: Kernel) -> Iterator[Cell]:
        for probe in probes(self.offered, kernel, self.device, self.layouts, quick=self.quick):
            cell = self._probed("value", kernel, probe)
            if self._sees(kernel, cell):
                yield cell

    def _sees(self, kernel: Kernel, cell: Cell) -> bool:
        """False for what a kernel is never asked, or cannot refuse: prefill is asked no decode graph, latents
        have no value width, and an append is never prepared for a page size.
        """
        if kernel == "append" and cell.field == "page_size":
            return cell.claim == "declared"
        if cell.field == "cuda_graph":
            return cell.layer.kernel_request(kernel).cuda_graph is not None
        return cell.field != "value" or kernel == "mha_prefill" or "v_up" in self.offered.owns

    def _limits(self, kernel: Kernel) -> Iterator[Cell]:
        for limit in self.offered.limits:
            for probe in limit_probes(limit, self.offered, kernel):
                if self.base.asks(kernel, probe.changes):
                    yield self._probed("limit", kernel, probe)

    def _grid(self, kernel: Kernel) -> Iterator[Cell]:
        layouts = sorted(self.offered.layouts) if self.base.asks(kernel, {"layout": None}) else [None]
        for layout in layouts:
            for dtype in sorted(self.offered.dtypes):
                changes = {"dtype": dtype} if layout is None else {"dtype": dtype, "layout": layout}
                value = dtype if layout is None else f"{layout}+{dtype}"
                probe = Probe("layout+dtype" if layout else "dtype", value, changes)
                yield self._probed("grid", kernel, probe)

    def _mixes(self, kernel: Kernel) -> Iterator[Cell]:
        values = {
            field: options
            for field, options in mix_values(self.offered, quick=self.quick).items()
            if self.base.asks(kernel, {field: None})
        }
        most = QUICK_MIXES if self.quick else MIXES
        for number, row in enumerate(pairwise(values, seed=self.seed, most=most)):
            yield self._cell("mix", kernel, "mix", str(number), row)

    def _stages(self) -> Iterator[Cell]:
        for stage in sorted(self.offered.owns):
            check = "stages.gate" if stage == "gate" else "stages.once"
            yield self._layer_cell("owns", stage, {}, check)
        for style in sorted(self.offered.rope_styles if "rope" in self.offered.owns else ()):
            yield self._layer_cell("rope_style", style, {"rope_style": style}, "stages.once")

    def _layer_cell(self, field: str, value: str, changes: dict[str, Any], check: str) -> Cell:
        return self._cell("value", LAYER, field, value, changes, check=check)

    def _checks(self, kernel: str) -> Iterator[Cell]:
        for check in checks_for(kernel, quick=self.quick):
            changes = dict(_parsed(need) for need in check.needs)
            if "max_query_len" in changes:
                changes = self._longest(changes)
            layer, refused = self._layer(kernel, changes)
            if not refused:
                yield from self._check_cells(check, kernel, layer)

    def _longest(self, changes: dict[str, Any]) -> dict[str, Any]:
        limit = min(self.offered.max_query_len or 4, 4)
        lens = next((word for word in ("varlen", "uniform") if word in self.offered.query_len), None)
        return {**changes, "max_query_len": max(limit, 2), "query_len": lens or "varlen"}

    def _check_cells(self, check: Check, kernel: str, layer: LayerRequest) -> Iterator[Cell]:
        made = {"kernel": kernel, "claim": "declared", "layer": layer, "check": check.name}
        name = f"{kernel}/{check.name}"
        yield Cell(id=name, group="check", field="check", value=check.name, **made)
        for control in check.controls:
            if control == "rope" and layer.rope == 0:
                continue
            yield Cell(
                id=f"{name}!{control}",
                group="control",
                field="control",
                value=control,
                control=control,
                **made,
            )

    def _probed(self, group: str, kernel: Kernel, probe: Probe) -> Cell:
        return self._cell(group, kernel, probe.field, probe.value, probe.changes)

    def _cell(
        self,
        group: str,
        kernel: str,
        field: str,
        value: str,
        changes: dict[str, Any],
        *,
        check: str | None = None,
    ) -> Cell:
        layer, refused = self._layer(kernel, changes)
        return Cell(
            id=f"{kernel}/{field}={value}" if group == "value" else f"{kernel}/{group}:{field}={value}",
            group=group,
            kernel=kernel,
            field=field,
            value=value,
            claim=_claim(refused),
            reasons=tuple(refused),
            layer=layer,
            check=check or BASIC[kernel],
        )

    def _layer(self, kernel: str, changes: dict[str, Any]) -> tuple[LayerRequest, list[Reason]]:
        """The base request with these changes, and why it is not offered; the layer asks all it needs."""
        kernels = [k for k in KERNELS[:3] if self._declares(k)] if kernel == LAYER else [kernel]
        layer = self.base.near(kernels, changes)
        found = [reason for k in kernels for reason in reasons(self.offered, layer.kernel_request(k))]
        return layer, found


def _claim(refused: list[Reason]) -> Claim:
    if not refused:
        return "declared"
    return "declined" if all(reason.offered == "declined" for reason in refused) else "undeclared"


def _parsed(need: str) -> tuple[str, Any]:
    field, _, text = need.partition("=")
    value: Any = {"True": True}.get(text, text)
    return field, int(text) if text.isdigit() else value
