"""One backend on the bench: built as a layer builds it, its kernels called in guarded memory, judged.

The core's own guard is not asked: what is not declared must be refused by the backend itself.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mla_core import registry
from mla_core.backend import LayerContext
from mla_core.cache.latent import CacheGeometry
from mla_core.cache.layout import layout_for
from mla_core.conformance.catalogue import ABSORB
from mla_core.conformance.cells import Cell
from mla_core.conformance.guard import Guarded, Watched
from mla_core.conformance.oracle import Answer
from mla_core.conformance.scenes import Lengths, MhaScene, MqaScene, mha_scene, mqa_scene
from mla_core.conformance.subject import Subject
from mla_core.conformance.tolerances import tolerance
from mla_core.device import device_info
from mla_core.errors import CacheError
from mla_core.request import DeviceInfo, installed_version, reasons

__all__ = ["Bench", "NoMethod", "Unavailable", "Wrong", "find_device", "poisoned_memory"]

_METHODS = {"mha_prefill": "mha", "mqa_decode": "mqa", "mqa_prefill": "mqa", "mqa_sparse": "mqa_sparse"}

Scene = MhaScene | MqaScene

# Layouts that hold 16-bit and 32-bit values as they are.
PLAIN_LAYOUTS = ("fp32", "fp16", "bf16")
_TOO_LARGE_TO_COPY = 1 << 28


class Wrong(Exception):
    """The backend answered, and the answer is not right; `error` is in tolerances."""

    def __init__(self, detail: str, error: float | None = None) -> None:
        super().__init__(detail)
        self.detail, self.error = detail, error


class Unavailable(Exception):
    """This cell cannot be tried here."""


class NoMethod(Exception):
    """The backend's class has no method for the kernel: it cannot serve it, and nobody can ask it to."""


class Bench:
    """Runs scenes for one cell. `worst` is the largest error so far, in tolerances."""

    def __init__(self, subject: Subject, cell: Cell) -> None:
        self.subject, self.cell, self.layer = subject, cell, cell.layer
        self.info = subject.info
        self.owned = self.info.capabilities.owns
        self._quantised = cell.kernel != "mha_prefill" and self.layer.layout not in PLAIN_LAYOUTS
        self.tolerance = tolerance(self.layer.dtype, quantised=self._quantised)
        self.scale = (self.layer.nope + self.layer.rope) ** -0.5
        self.worst = 0.0
        self.touched = False
        # What a backend that owns v_up multiplies by.
        self.w_uv_HLV: Tensor | None = None
        # Of the next mqa_sparse call.
        self.indices_TK = torch.empty(0)

    @property
    def asks_lse(self) -> bool:
        """Prefill always returns lse, since its chunks are merged; decode only when the layer asks."""
        return self.cell.kernel in ("mha_prefill", "mqa_prefill") or self.layer.lse

    @cached_property
    def device(self) -> torch.device:
        """The torch device that the cell asks for. Raises Unavailable when it is not here."""
        return find_device(self.layer.device)

    @cached_property
    def backend(self) -> Any:
        """The backend's instance for the cell's layer and kernel; its constructor may refuse."""
        self._check_packages()
        target = registry.load(self.info.name)
        method = self._method()
        if not callable(getattr(target, method, None)):
            raise NoMethod(f"{self.info.target} has no method {method}")
        if "v_up" in self.owned and self.cell.claim == "declared" and self.cell.kernel in ABSORB:
            return self._with_weights()
        # As in life: a layer is built before a cache exists.
        request = self.layer.model_copy(update={"page_size": None})
        return target(
            LayerContext(
                request=request,
                kernels=frozenset({self.cell.kernel}),
                options=self.subject.options,
                softmax_scale=self.scale,
                device=self.device,
                dtype=getattr(torch, self.layer.dtype),
            )
        )

    def _with_weights(self) -> Any:
        """An instance that has seen a layer's weights, as one that multiplies by W_uv itself must."""
        # A layer on the bench is itself built from one.
        from mla_core.conformance.layers import LayerRun

        prefill = self.cell.kernel == "mqa_prefill"
        form = "absorb" if prefill or "mha_prefill" not in self.info.capabilities.kernels else "expand"
        layer = LayerRun(self, form=form, max_decode_query_len=self.layer.max_query_len).layer
        self.w_uv_HLV = layer.w_uv_HLV
        return layer.kernels.of("mqa_prefill" if prefill else "mqa")

    def _method(self) -> str:
        if self.cell.kernel != "append":
            return _METHODS[self.cell.kernel]
        return "rope_append" if "rope" in self.owned else "append"

    def _check_packages(self) -> None:
        needs = self.info.capabilities.model_copy(update={"limits": (), "declined": ()})
        found = reasons(needs, self.layer.kernel_request("append"), installed_version)
        missing = [str(reason) for reason in found if reason.field in ("requires", "known_bad")]
        if missing:
            raise Unavailable("; ".join(missing))

    def mha(self, lengths: Lengths, **options: Any) -> MhaScene:
        """A scene for the expanded form."""
        self.backend  # noqa: B018  a refusal comes before anything is made
        return mha_scene(self.layer, lengths, self.device, self.scale, **options)

    def mqa(self, lengths: Lengths, **options: Any) -> MqaScene:
        """A scene for the absorbed form, with the cell's page size unless told otherwise."""
        self.backend  # noqa: B018  a refusal comes before anything is made
        page_size = options.pop("page_size", self.layer.page_size or 16)
        try:
            made = {"page_size": page_size, **options}
            scene = mqa_scene(self.layer, lengths, self.device, self.scale, **made)
            return replace(scene, w_uv_HLV=self.w_uv_HLV)
        except CacheError as error:
            self._prepare_without_cache(lengths, page_size)
            raise Unavailable(f"this core has no such cache: {error}") from error

    def _prepare_without_cache(self, lengths: Lengths, page_size: int) -> None:
        """Give the backend the chance to refuse a cache that the core cannot build."""
        layer = self.layer
        try:
            layout = layout_for(layer.layout, getattr(torch, layer.dtype), layer.latent, layer.rope)
        except CacheError:
            return
        table = torch.zeros(len(lengths.keys), 8, dtype=torch.int32, device=self.device)
        scene = MqaScene(lengths, torch.empty(0), None, table, self.scale)
        geometry = CacheGeometry(layout, page_size, 8, self.device)
        self.backend.prepare(self.cell.kernel, _on(scene.segments(), self.device), geometry)

    def check(self, scene: Scene, *, lse: bool = True) -> Answer:
        """Run a scene and compare it with the oracle (with the control's fault, when the cell has one)."""
        answer = self.run(scene, lse=lse)
        self.compare(answer, scene.expected(self.cell.control), lse=lse)
        return answer

    def at_spread(self, spread: float) -> Bench:
        """The same bench for scores that are this wide."""
        other = copy.copy(self)
        other.tolerance = tolerance(self.layer.dtype, quantised=self._quantised, spread=spread)
        return other

    def check_sparse(self, scene: MqaScene, indices_TK: Tensor, *, nothing: bool = False) -> None:
        """Run mqa_sparse with indices that select every visible key, or nothing."""
        expected = scene.expected(self.cell.control)
        if nothing:
            empty = torch.full_like(expected.lse_TH, -torch.inf)
            expected = Answer(torch.zeros_like(expected.out_THV), empty)
        self.indices_TK = indices_TK
        self.compare(self.run(scene), expected)

    def run(self, scene: Scene, *, lse: bool = True) -> Answer:
        """Call the kernel in guarded memory. Raises Wrong when it wrote where it must not."""
        out = Guarded(scene.out_shape, getattr(torch, self.layer.dtype), self.device)
        asked = lse and self.asks_lse
        lse_guard = Guarded(scene.out_shape[:2], torch.float32, self.device) if asked else None
        segments = scene.segments()
        watched = Watched(scene.inputs | _tensors(segments))
        if isinstance(scene, MqaScene) and scene.cache.data.numel() < _TOO_LARGE_TO_COPY:
            watched.add("cache", scene.cache.data)
        try:
            with poisoned_memory():
                self._call(scene, segments, out.view, None if lse_guard is None else lse_guard.view)
            _synchronize(self.device)
        except BaseException:
            self.touched = out.touched() or bool(watched.changed())
            raise
        self._check_memory(out, lse_guard, watched)
        missing = torch.full(scene.out_shape[:2], torch.nan) if lse_guard is None else lse_guard.view
        return Answer(out.view, missing)

    def _call(self, scene: Scene, segments: Any, out: Tensor, lse: Tensor | None) -> None:
        if isinstance(scene, MhaScene):
            segments.meta = self.backend.prepare(self.cell.kernel, segments, self._any_geometry())
            self.backend.mha(scene.q_THE, scene.k_SHE, scene.v_SHV, segments, scene.scale, out, lse)
            return
        segments.meta = self.backend.prepare(self.cell.kernel, segments, scene.cache.geometry)
        if self.cell.kernel == "mqa_sparse":
            arguments = (segments, self.indices_TK, scene.scale, out, lse)
            self.backend.mqa_sparse(scene.q_THX, scene.cache, *arguments)
            return
        self.backend.mqa(scene.q_THX, scene.cache, segments, scene.scale, out, lse)

    def _any_geometry(self) -> CacheGeometry:
        """The expanded form never sees the cache, but `prepare` always gets its geometry."""
        layer = self.layer
        layout = layout_for("auto", getattr(torch, layer.dtype), layer.latent, layer.rope)
        return CacheGeometry(layout, layer.page_size or 16, 1, self.device)

    def _check_memory(self, out: Guarded, lse: Guarded | None, watched: Watched) -> None:
        changed = watched.changed()
        if changed:
            raise Wrong(f"changed its inputs: {', '.join(changed)}")
        for name, guard in (("out", out), ("lse", lse)):
            if guard is not None and guard.overrun():
                raise Wrong(f"wrote outside {name}")

    def compare(self, answer: Answer, expected: Answer, *, lse: bool = True) -> None:
        """Raises Wrong when an answer is further from the expected one than the tolerance."""
        self._compare_rows("out", answer.out_THV, expected.out_THV)
        if lse and self.asks_lse:
            self._compare_lse(answer.lse_TH, expected.lse_TH)

    def _compare_rows(self, name: str, actual: Tensor, expected: Tensor) -> None:
        if expected.numel() == 0:
            return
        actual, expected = actual.double().flatten(1), expected.to(actual.device).double().flatten(1)
        sizes = expected.norm(dim=1)
        error = (actual - expected).norm(dim=1) / sizes.clamp(min=float(sizes.mean())).clamp(min=1e-30)
        self._judge(name, error, self.tolerance.row)

    def _compare_lse(self, actual: Tensor, expected: Tensor) -> None:
        if expected.numel() == 0:
            return
        expected = expected.to(actual.device)
        # Equal infinities are equal; any other infinity or NaN is an infinite error.
        same = (actual == expected) & expected.isinf()
        error = (actual.double() - expected).abs().masked_fill(same, 0.0).amax(dim=1)
        self._judge("lse", error, self.tolerance.lse)

    def _judge(self, name: str, error_T: Tensor, tolerance: float) -> None:
        error_T = error_T.nan_to_num(nan=torch.inf)
        row = int(error_T.argmax())
        error = float(error_T[row]) / tolerance
        self.worst = max(self.worst, error)
        if error > 1:
            where = f"{name} is wrong in row {row}: error {float(error_T[row]):.3g}, allowed {tolerance:.3g}"
            raise Wrong(where, error)


def find_device(wanted: DeviceInfo) -> torch.device:
    """The torch device of a described one. Raises Unavailable when it is not here."""
    if wanted.kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Unavailable(f"needs {wanted}; there is no CUDA device here")
    device = torch.device("cuda", torch.cuda.current_device())
    actual = device_info(device)
    if wanted.arch not in (None, actual.arch):
        raise Unavailable(f"needs {wanted}; the device here is {actual}")
    return device


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Within it, torch.empty gives NaN (integers: the largest value) instead of whatever was there."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        # Operations without a deterministic variant warn; determinism is not what is wanted here.
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0])
            torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _tensors(segments: Any) -> dict[str, Tensor]:
    return {name: value for name, value in vars(segments).items() if isinstance(value, Tensor)}


def _on(segments: Any, device: torch.device) -> Any:
    for name, value in _tensors(segments).items():
        setattr(segments, name, value.to(device))
    return segments


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
