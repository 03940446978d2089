"""What the vanilla backend declares; imports no torch."""

from __future__ import annotations

from mla_core import BackendInfo, Capabilities, IntSet

__all__ = ["INFO"]

_ANY = IntSet.range(1)

INFO = BackendInfo(
    name="vanilla",
    api=1,
    target="mla_vanilla.backend:Vanilla",
    priority=-100,
    summary="pure torch on every device; the reference for authors",
    capabilities=Capabilities(
        devices={"cpu", "cuda"},
        kernels={"mha_prefill", "mqa_decode", "mqa_prefill"},
        dtypes={"float32", "float16", "bfloat16"},
        layouts={"fp32": _ANY, "fp16": _ANY, "bf16": _ANY},
        query_len={"single", "uniform", "varlen"},
        heads=_ANY,
        latent=_ANY,
        nope=_ANY,
        rope=IntSet.range(0),
        value=_ANY,
        returns={"lse"},
    ),
)
