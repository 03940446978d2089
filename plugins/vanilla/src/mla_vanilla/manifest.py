"""What the vanilla backend declares; imports no torch."""

from __future__ import annotations

from mla_core import BackendInfo, Capabilities, IntSet, Limit

__all__ = ["INFO"]

_ANY = IntSet.range(1)
_LAYOUTS = {
    **dict.fromkeys(("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_ds_mla"), _ANY),
    **dict.fromkeys(("nvfp4", "nvfp4_rope_bf16"), IntSet.exact(64)),
}
_WIDTHS = (
    Limit(
        name="width of fp8_ds_mla rows",
        when={"layout": ["fp8_ds_mla"]},
        then={"latent": IntSet.exact(512), "rope": IntSet.exact(64)},
        because="a row of fp8_ds_mla is 512 latent and 64 rope values",
    ),
    Limit(
        name="groups of nvfp4",
        when={"layout": ["nvfp4", "nvfp4_rope_bf16"]},
        then={"latent": IntSet.multiple_of(16), "rope": IntSet.multiple_of(16, low=0)},
        because="nvfp4 scales groups of 16 values",
    ),
)

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
        layouts=_LAYOUTS,
        query_len={"single", "uniform", "varlen"},
        heads=_ANY,
        latent=_ANY,
        nope=_ANY,
        rope=IntSet.range(0),
        value=_ANY,
        returns={"lse"},
        limits=_WIDTHS,
    ),
)
