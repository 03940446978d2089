"""The backend as it is, declared for CPU tensors as well: Triton's interpreter runs its kernels there."""

from __future__ import annotations

from mla_trtllm_like.backend import TrtllmLike
from mla_trtllm_like.manifest import INFO

__all__ = ["CPU_INFO", "Interpreted"]

CPU_INFO = INFO.model_copy(
    update={
        "name": "interpreted",
        "target": "plugins.trtllm_like.tests.interpreted:Interpreted",
        "capabilities": INFO.capabilities.model_copy(update={"devices": frozenset({"cpu", "cuda"})}),
    }
)


class Interpreted(TrtllmLike):
    info = CPU_INFO
