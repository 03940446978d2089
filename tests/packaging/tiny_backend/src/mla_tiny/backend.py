"""Request by request, in plain torch: T tokens, S keys, H heads, L latent, R rope, E = N + R, V value."""

from __future__ import annotations

import torch
from torch import Tensor

from mla_core import CacheGeometry, LatentCache, LayerContext, MhaSegments, MqaSegments

__all__ = ["Tiny"]


class Tiny:
    """Both attention forms, with a gain on the output that shows whose kernels ran."""

    def __init__(self, context: LayerContext) -> None:
        self.gain = float(context.options["gain"])

    def prepare(self, kernel: str, segments: MhaSegments | MqaSegments, geometry: CacheGeometry) -> None:
        """Nothing to plan."""

    def mha(
        self,
        q_THE: Tensor,
        k_SHE: Tensor,
        v_SHV: Tensor,
        segments: MhaSegments,
        scale: float,
        out_THV: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        """Kernel mha_prefill."""
        first_query = first_key = 0
        for queries, keys in zip(segments.query_lens, segments.key_lens, strict=True):
            rows = slice(first_query, first_query + queries)
            seen = slice(first_key, first_key + keys)
            out, lse = self._attend(q_THE[rows], k_SHE[seen], v_SHV[seen], segments.causal, scale)
            _store(rows, out, lse, out_THV, lse_TH)
            first_query, first_key = rows.stop, seen.stop

    def mqa(
        self,
        q_THL: Tensor,
        cache: LatentCache,
        segments: MqaSegments,
        scale: float,
        out_THL: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        """Kernel mqa_decode: all heads share the cached row as key and its latent part as value."""
        first = 0
        for request, (queries, keys) in enumerate(zip(segments.query_lens, segments.key_lens, strict=True)):
            rows = slice(first, first + queries)
            latent_SL, k_rope_SR = cache.read(segments.block_table[request], keys, q_THL.dtype)
            key_SHL = torch.cat([latent_SL, k_rope_SR], dim=-1)[:, None].expand(-1, q_THL.shape[1], -1)
            value_SHL = latent_SL[:, None].expand(-1, q_THL.shape[1], -1)
            out, lse = self._attend(q_THL[rows], key_SHL, value_SHL, segments.causal, scale)
            _store(rows, out, lse, out_THL, lse_TH)
            first = rows.stop

    def _attend(
        self, query_THE: Tensor, key_SHE: Tensor, value_SHV: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        scores_HTS = torch.einsum("the,she->hts", query_THE.float(), key_SHE.float()) * scale
        if causal:
            tokens, keys = scores_HTS.shape[1:]
            hidden = torch.ones(tokens, keys, dtype=torch.bool).triu(keys - tokens + 1)
            scores_HTS = scores_HTS.masked_fill(hidden, float("-inf"))
        lse_HT = scores_HTS.logsumexp(dim=-1)
        # A row without keys has lse -inf; any finite stand-in makes its weights exp(-inf) = 0.
        weights_HTS = torch.exp(scores_HTS - lse_HT.masked_fill(lse_HT.isneginf(), 0.0)[..., None])
        out_THV = torch.einsum("hts,shv->thv", weights_HTS, value_SHV.float())
        return out_THV * self.gain, lse_HT.T


def _store(rows: slice, out: Tensor, lse: Tensor, out_all: Tensor, lse_all: Tensor | None) -> None:
    out_all[rows] = out.to(out_all.dtype)
    if lse_all is not None:
        lse_all[rows] = lse
