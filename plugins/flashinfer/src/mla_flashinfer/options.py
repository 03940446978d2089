"""What may be written in brackets behind the backend's name."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

__all__ = ["EngineName", "Options"]

# FlashInfer's names for its implementations.
EngineName = Literal["auto", "fa2", "fa3", "cutlass", "trtllm-gen", "xqa", "cute-dsl", "cudnn"]


class Options(BaseModel):
    """impl: which of FlashInfer's implementations runs; auto takes fa3 where it exists, else fa2."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    impl: EngineName = "auto"
