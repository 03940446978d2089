"""What the backend declares; imports neither torch nor triton.

No measurement on a device is committed yet. What stands behind a claim so far: the tests run every kernel in
Triton's interpreter, and compile it for sm_80, sm_89 and sm_90a.
"""

from __future__ import annotations

from mla_core import BackendInfo, Capabilities, IntSet, Limit
from mla_trtllm_like.options import Options

__all__ = ["INFO"]

_ANY_PAGE = IntSet.range(1)
_LAYOUTS = {
    **dict.fromkeys(("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_ds_mla"), _ANY_PAGE),
    **dict.fromkeys(("nvfp4", "nvfp4_rope_bf16"), IntSet.exact(64)),
}

_LIMITS = (
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
    name="trtllm_like",
    api=1,
    target="mla_trtllm_like.backend:TrtllmLike",
    options=Options,
    priority=10,
    summary="our own Triton kernels: split-KV decode over every cache layout, prefill, fused rope and append",
    capabilities=Capabilities(
        devices={"sm_80..sm_90"},
        kernels={"mha_prefill", "mqa_decode", "mqa_prefill", "append"},
        dtypes={"float32", "float16", "bfloat16"},
        layouts=_LAYOUTS,
        query_len={"single", "uniform", "varlen"},
        heads=IntSet.range(1, 128),
        latent=IntSet.range(1, 512),
        nope=IntSet.range(1, 192),
        rope=IntSet.range(0, 64),
        value=IntSet.range(1, 256),
        owns={"rope", "append"},
        rope_styles={"interleaved", "half_split", "none"},
        returns={"lse"},
        cuda_graph="decode",
        deterministic=True,
        requires=("triton>=3.6",),
        limits=_LIMITS,
    ),
)
