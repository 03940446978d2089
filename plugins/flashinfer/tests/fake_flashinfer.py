"""FlashInfer's wrappers in pure torch: the same keyword calls, checked, and honest answers.

They refuse what FlashInfer 0.7.4 refuses and the backend must therefore never ask: causal tiles that would
lose a key, more queries than keys under a causal mask, empty plans, buffers that moved, queries of other rows
than planned. What they round, FlashInfer rounds: the scale of fp8 keys, and each scaled key, to bfloat16.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

LOG2 = 0.6931471805599453


class Event:
    """A CUDA event that is over at once."""

    def record(self, stream: object) -> None: ...

    def query(self) -> bool:
        return True


@dataclass(frozen=True)
class MLAPlanMetadata:
    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> Any:
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


def attention(
    q_THE: Tensor, k_SHE: Tensor, v_SHV: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse in base 2), the last query aligned with the last key."""
    rows, keys = len(q_THE), len(k_SHE)
    if not keys:
        return v_SHV.new_zeros(rows, *v_SHV.shape[1:]), torch.full(q_THE.shape[:2], -torch.inf)
    scores = torch.einsum("the,she->ths", q_THE.float(), k_SHE.float()) * scale
    if causal:
        assert rows <= keys, "more queries than keys are not defined under a causal mask"
        later = torch.arange(keys) > torch.arange(rows).unsqueeze(1) + (keys - rows)
        scores.masked_fill_(later.unsqueeze(1), -torch.inf)
    out = torch.einsum("ths,shv->thv", scores.softmax(-1), v_SHV.float())
    return out, torch.logsumexp(scores, -1) / LOG2


def _check_vectors(*tensors: Tensor) -> None:
    for x in tensors:
        assert x.stride(-1) == 1
        assert x.data_ptr() % 16 == 0
        assert all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])


def _check_host(*tensors: Tensor) -> None:
    assert all(x.dtype == torch.int32 and x.device.type == "cpu" and x.is_contiguous() for x in tensors)


class PagedWrapper:
    calls: Counter[str]

    def __init__(self, workspace: Tensor, *, use_cuda_graph: bool, backend: str, **buffers: Tensor) -> None:
        assert workspace.dtype == torch.uint8
        assert use_cuda_graph == bool(buffers)
        self.calls[f"paged {backend}"] += 1
        self.graph, self.buffers = use_cuda_graph, buffers

    def plan(self, *, metadata: MLAPlanMetadata, **planned: Any) -> None:
        self.calls["plan paged"] += 1
        fields = vars(metadata)
        _check_host(*fields.values())
        self.queries = metadata.qo_indptr.diff().tolist()
        keys = metadata.kv_len_arr.tolist()
        pages = [-(-length // planned["page_size"]) for length in keys]
        assert self.queries, "native planning requires a nonempty batch"
        assert metadata.kv_indptr.diff().tolist() == pages
        assert metadata.kv_indices.numel() == sum(pages)
        if planned["causal"]:
            _check_tiles(self.queries, keys, planned["num_heads"])
        fp8 = planned["kv_data_type"] == torch.float8_e4m3fn
        assert planned["scale_mode"] == ("kv-per-tensor" if fp8 else "default")
        assert planned["lse_mode"] == "basee"
        self._stage(fields)
        self._check_grid(planned["num_heads"])
        self.planned = planned
        self._planned_backend = SimpleNamespace(_sm_scale=planned["sm_scale"])

    def _check_grid(self, heads: int) -> None:
        """A captured graph keeps the grid that its first plan had."""
        cluster = _cluster(self.queries, heads)
        assert not self.graph or cluster == getattr(self, "cluster", cluster)
        self.cluster = cluster

    def _stage(self, fields: dict[str, Tensor]) -> None:
        if not self.graph:
            self.staged = fields
            return
        for name, source in fields.items():
            target = self.buffers[name]
            assert len(target) == len(source) or (name == "kv_indices" and len(target) > len(source))
            target[: len(source)].copy_(source)
        self.staged = self.buffers

    def run(
        self,
        *,
        query: Tensor,
        kv_cache: Tensor,
        out: Tensor,
        lse: Tensor | None,
        return_lse: bool,
        return_lse_base_on_e: bool,
        ckv_scale: float | None = None,
        kpe_scale: float | None = None,
    ) -> None:
        self.calls["run paged"] += 1
        assert (return_lse, return_lse_base_on_e) == (True, True), "the plan promised lse in base e"
        assert (ckv_scale is not None) == (self.planned["scale_mode"] == "kv-per-tensor")
        assert query.dtype == self.planned["q_data_type"] == out.dtype
        assert kv_cache.dtype == self.planned["kv_data_type"]
        assert len(query) == sum(self.queries)
        assert lse is None or lse.is_contiguous()
        _check_vectors(query, kv_cache, out)
        assert kv_cache.shape[1] == self.planned["page_size"]
        latent = self.planned["head_dim_ckv"]
        for b, start in enumerate(self.staged["qo_indptr"][:-1].tolist()):
            rows = slice(start, int(self.staged["qo_indptr"][b + 1]))
            first, last = self.staged["kv_indptr"][b : b + 2].tolist()
            length = int(self.staged["kv_len_arr"][b])
            pages = self.staged["kv_indices"][first:last].long()
            keys = kv_cache[pages].flatten(0, 1)[:length].to(query.dtype)
            if ckv_scale is not None:
                assert ckv_scale == kpe_scale
                keys = keys * torch.tensor(ckv_scale).to(query.dtype)
            key_SHX = keys.unsqueeze(1).expand(-1, query.shape[1], -1)
            scale = self._planned_backend._sm_scale
            got, base2 = attention(query[rows], key_SHX, key_SHX[..., :latent], self.planned["causal"], scale)
            out[rows] = got.to(out.dtype)
            if lse is not None:
                lse[rows] = base2 * LOG2


def _cluster(queries: list[int], heads: int) -> int:
    return 2 if sum(queries) * heads // len(queries) > 64 else 1


def _check_tiles(queries: list[int], keys: list[int], heads: int) -> None:
    """No border between tiles may fall inside a token that sees keys."""
    tile = 64 * _cluster(queries, heads)
    for count, seen in zip(queries, keys, strict=True):
        for end in range(tile, count * heads if seen else 0, tile):
            assert end % heads == 0, f"a tile of {tile} rows cuts a token of {heads} heads"


class RaggedWrapper:
    calls: Counter[str]

    def __init__(self, workspace: Tensor, *, kv_layout: str, backend: str) -> None:
        assert kv_layout == "NHD"
        self.calls[f"ragged {backend}"] += 1

    def plan(self, *, qo_indptr: Tensor, kv_indptr: Tensor, **planned: Any) -> None:
        self.calls["plan ragged"] += 1
        _check_host(qo_indptr, kv_indptr)
        assert len(qo_indptr) == len(kv_indptr) > 1
        self.starts, self.planned = (qo_indptr.tolist(), kv_indptr.tolist()), planned

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor,
        lse: Tensor | None,
        return_lse: bool,
        lse_base: str,
    ) -> None:
        self.calls["run ragged"] += 1
        assert return_lse == (lse is not None)
        assert lse is None or lse.is_contiguous()
        _check_vectors(q, k, v, out)
        queries, keys = self.starts
        assert (len(q), len(k), len(v)) == (queries[-1], keys[-1], keys[-1])
        for b in range(len(queries) - 1):
            rows, columns = slice(*queries[b : b + 2]), slice(*keys[b : b + 2])
            got, base2 = attention(
                q[rows], k[columns], v[columns], self.planned["causal"], self.planned["sm_scale"]
            )
            out[rows] = got.to(out.dtype)
            if lse is not None:
                lse[rows] = base2 * (LOG2 if lse_base == "ln" else 1.0)


def install(monkeypatch: Any) -> Counter[str]:
    """Put the fakes where `import flashinfer` finds them; returns the counter of their calls."""
    calls: Counter[str] = Counter()
    paged = type("BatchMLAPagedAttentionWrapper", (PagedWrapper,), {"calls": calls})
    ragged = type("BatchPrefillWithRaggedKVCacheWrapper", (RaggedWrapper,), {"calls": calls})
    modules = {
        "flashinfer": {},
        "flashinfer.mla": {paged.__name__: paged, "MLAPlanMetadata": MLAPlanMetadata},
        "flashinfer.prefill": {ragged.__name__: ragged},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    return calls
