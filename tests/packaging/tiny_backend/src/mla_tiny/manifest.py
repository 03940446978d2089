"""What the backend declares; read without importing torch."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from mla_core import BackendInfo, Capabilities, IntSet

__all__ = ["INFO", "Options"]

PAGES = IntSet.range(1, 1024)


class Options(BaseModel):
    """`tiny[gain=2]` doubles what the kernels return."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gain: float = 1.0


INFO = BackendInfo(
    name="tiny",
    target="mla_tiny.backend:Tiny",
    options=Options,
    summary="a third party's backend for tests",
    capabilities=Capabilities(
        devices=frozenset({"cpu"}),
        kernels=frozenset({"mha_prefill", "mqa_decode"}),
        dtypes=frozenset({"float32"}),
        layouts={"fp32": PAGES},
        query_len=frozenset({"single", "uniform", "varlen"}),
        heads=IntSet.range(1, 128),
        latent=IntSet.range(1),
        nope=IntSet.range(1),
        rope=IntSet.range(0),
        value=IntSet.range(1),
        returns=frozenset({"lse"}),
    ),
)
