"""What the flashinfer backend declares; imports neither torch nor flashinfer."""

from __future__ import annotations

from mla_core import BackendInfo, Capabilities, IntSet, Limit
from mla_flashinfer.options import Options

__all__ = ["INFO"]

_ANY_PAGE = IntSet.range(1)

_LIMITS = (
    Limit(
        name="a bf16 cache is read by bfloat16 queries",
        when={"layout": ["bf16"]},
        then={"dtype": ["bfloat16"]},
        because="FlashInfer reads an unquantised cache in the query's own type",
    ),
    Limit(
        name="a fp16 cache is read by float16 queries",
        when={"layout": ["fp16"]},
        then={"dtype": ["float16"]},
        because="FlashInfer reads an unquantised cache in the query's own type",
    ),
    Limit(
        name="fp8 caches",
        when={"layout": ["fp8_e4m3"]},
        then={"device": ["sm_90"], "dtype": ["bfloat16"], "latent": IntSet.exact(512)},
        because="FlashInfer reads fp8 caches on Hopper only, with bfloat16 queries and 512 latent values",
    ),
    Limit(
        name="prefill of 128 values",
        when={"kernel": ["mha_prefill"], "value": IntSet.exact(128)},
        then={"nope": IntSet.of(64, 128)},
        because="the ragged prefill kernels exist for query and value widths 128/128, 192/128 and 256/256",
    ),
    Limit(
        name="prefill of 256 values",
        when={"kernel": ["mha_prefill"], "value": IntSet.exact(256)},
        then={"nope": IntSet.exact(192)},
        because="the ragged prefill kernels exist for query and value widths 128/128, 192/128 and 256/256",
    ),
)

INFO = BackendInfo(
    name="flashinfer",
    api=1,
    target="mla_flashinfer.backend:FlashInfer",
    options=Options,
    doctor="mla_flashinfer.toolchain:problems",
    summary="FlashInfer's paged MLA and ragged prefill kernels, compiled at first use",
    capabilities=Capabilities(
        devices={"sm_80..sm_90", "sm_100..sm_103", "sm_120..sm_121"},
        kernels={"mha_prefill", "mqa_decode", "mqa_prefill"},
        dtypes={"float16", "bfloat16"},
        layouts=dict.fromkeys(("bf16", "fp16", "fp8_e4m3"), _ANY_PAGE),
        query_len={"single", "uniform", "varlen"},
        heads=IntSet.range(1, 128),
        latent=IntSet.of(128, 256, 512),
        nope=IntSet.of(64, 128, 192),
        rope=IntSet.exact(64),
        value=IntSet.of(128, 256),
        returns={"lse"},
        cuda_graph="decode",
        deterministic=True,
        # Exact: fp8 scales need a name that is not public, and what was compared is stated in the README.
        requires=("flashinfer-python>=0.7.4,<0.7.5",),
        limits=_LIMITS,
    ),
)
