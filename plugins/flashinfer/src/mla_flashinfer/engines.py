"""FlashInfer's implementations: which one serves a layer, and why the others do not. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mla_core import LayerRequest, Reason, UnsupportedError
from mla_core.capabilities import Kernel
from mla_core.request import reasons
from mla_flashinfer.manifest import INFO
from mla_flashinfer.options import EngineName

__all__ = ["ENGINES", "choose"]

# What each implementation offers less than the manifest does, the preferred one first.
ENGINES: dict[EngineName, dict[str, Any]] = {
    "fa3": {"devices": frozenset({"sm_90"})},
    "fa2": {},
}
# Implementations of FlashInfer that this backend does not offer.
_NOT_OFFERED: dict[EngineName, str] = {
    "cutlass": "it returns no lse",
    "trtllm-gen": "it returns no lse for requests with different query lengths",
    "xqa": "it returns no lse",
    "cute-dsl": "its results have not been compared on a device",
    "cudnn": "its results have not been compared on a device",
}


def choose(impl: EngineName, request: LayerRequest, kernels: Iterable[Kernel]) -> EngineName:
    """The implementation for a layer. Raises UnsupportedError when the named one, or none, fits."""
    asked = tuple(sorted(kernels))
    if impl in _NOT_OFFERED:
        raise UnsupportedError(INFO.name, [_refusal(impl, _NOT_OFFERED[impl])])
    candidates = ENGINES if impl == "auto" else (impl,)
    found = {engine: _objections(engine, request, asked) for engine in candidates}
    for engine, objections in found.items():
        if not objections:
            return engine
    raise UnsupportedError(INFO.name, [reason for objections in found.values() for reason in objections])


def _objections(engine: EngineName, request: LayerRequest, kernels: Iterable[Kernel]) -> list[Reason]:
    offered = INFO.capabilities.model_copy(update=ENGINES[engine])
    found = [reason for kernel in kernels for reason in reasons(offered, request.kernel_request(kernel))]
    marked = [reason.model_copy(update={"hint": reason.hint or f"with impl={engine}"}) for reason in found]
    return list(dict.fromkeys(marked))


def _refusal(impl: EngineName, because: str) -> Reason:
    offered = ", ".join(("auto", *ENGINES))
    return Reason(field="impl", wanted=impl, offered=offered, hint=because)
