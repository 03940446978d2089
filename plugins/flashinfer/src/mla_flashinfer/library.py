"""The calls that plan FlashInfer's kernels; the only module that imports it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper
from torch import Tensor

from mla_core.errors import KernelError
from mla_flashinfer.planning import Csr, starts

__all__ = ["PagedShape", "RaggedShape", "new_paged", "plan_paged", "plan_ragged", "set_softmax_scale"]


@dataclass(frozen=True)
class PagedShape:
    """What all decode plans of one layer have in common."""

    engine: str
    heads: int
    latent: int
    rope: int
    page_size: int
    scale: float
    dtype: torch.dtype
    cache_dtype: torch.dtype


@dataclass(frozen=True)
class RaggedShape:
    """What all prefill plans of one layer have in common."""

    engine: str
    heads: int
    width: int
    value: int
    scale: float
    dtype: torch.dtype


def new_paged(engine: str, workspace: Tensor, fixed: Csr | None = None) -> BatchMLAPagedAttentionWrapper:
    """A wrapper to plan; `fixed` are device tensors that every plan is copied into, for CUDA graphs."""
    buffers = {} if fixed is None else vars(fixed)
    return BatchMLAPagedAttentionWrapper(
        workspace, use_cuda_graph=fixed is not None, backend=engine, **buffers
    )


def plan_paged(wrapper: BatchMLAPagedAttentionWrapper, shape: PagedShape, plan: Csr, *, causal: bool) -> None:
    """Plan one launch for host tensors; the first call with new types or widths compiles the kernel."""
    wrapper.plan(
        metadata=MLAPlanMetadata.csr(**vars(plan)),
        num_heads=shape.heads,
        head_dim_ckv=shape.latent,
        head_dim_kpe=shape.rope,
        page_size=shape.page_size,
        causal=causal,
        sm_scale=shape.scale,
        q_data_type=shape.dtype,
        kv_data_type=shape.cache_dtype,
        lse_mode="basee",
        scale_mode="kv-per-tensor" if shape.cache_dtype == torch.float8_e4m3fn else "default",
    )


def set_softmax_scale(wrapper: BatchMLAPagedAttentionWrapper, scale: float) -> None:
    """Let the next launches use another softmax scale than the planned one.

    A launch hands it to the kernel as a number, but `run` has no argument for it. This is no public name:
    the supported versions are those it was read in.
    """
    planned = vars(wrapper._planned_backend)
    if "_sm_scale" not in planned:
        raise KernelError("this FlashInfer keeps its softmax scale elsewhere; install a supported release")
    planned["_sm_scale"] = scale


def plan_ragged(
    shape: RaggedShape, workspace: Tensor, queries: Sequence[int], keys: Sequence[int], *, causal: bool
) -> BatchPrefillWithRaggedKVCacheWrapper:
    """A wrapper planned for packed requests of these lengths; compiles as `plan_paged` does."""
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, kv_layout="NHD", backend=shape.engine)
    wrapper.plan(
        qo_indptr=starts(queries),
        kv_indptr=starts(keys),
        num_qo_heads=shape.heads,
        num_kv_heads=shape.heads,
        head_dim_qk=shape.width,
        head_dim_vo=shape.value,
        causal=causal,
        sm_scale=shape.scale,
        q_data_type=shape.dtype,
    )
    return wrapper
