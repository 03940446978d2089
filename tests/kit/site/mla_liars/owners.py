"""Backends that own stages: rope, append, v_up and gate, also sparse attention; one honest, the others with a
fault each.

Legend: T query rows, S keys, H heads, L latent, R rope, K selected keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mla_core import LatentCache, MhaSegments, MqaSegments, RopeInputs, SlotTargets, hookimpl
from mla_liars import manifest
from mla_liars.backends import Honest

__all__ = ["Owner"]


class Owner(Honest):
    """All kernels and all stages."""

    manifest = manifest.OWNER

    @hookimpl
    def prepare_weights(self, layer: Any) -> None:
        self.w_uv_HLV = layer.w_uv_HLV.float()

    @hookimpl
    def gate(self, layer: Any, output: Tensor, hidden: Tensor) -> Tensor:
        if layer.gate_proj is None:
            return output
        gates = torch.sigmoid(layer.gate_proj(hidden).float()).view(*output.shape[:2], -1)
        return (output * gates).to(output.dtype)

    def store(self, out: Tensor, row: int, values: Tensor) -> None:
        out[row] = torch.einsum("hl,hlv->hv", values, self.w_uv_HLV).to(out.dtype)

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
        row = first = 0
        for queries, keys in zip(segments.query_lens, segments.key_lens, strict=True):
            for t in range(queries):
                seen = max(self.seen(keys, queries, t, segments.causal), 0)
                span = slice(first, first + seen)
                scores_HS = torch.einsum("he,she->hs", q_THE[row].float(), k_SHE[span].float()) * scale
                lse_H = scores_HS.logsumexp(dim=-1)
                share_HS = torch.exp(scores_HS - lse_H.nan_to_num(neginf=0.0)[:, None])
                out_THV[row] = torch.einsum("hs,shv->hv", share_HS, v_SHV[span].float()).to(out_THV.dtype)
                if lse_TH is not None:
                    lse_TH[row] = lse_H
                row += 1
            first += keys

    def mqa_sparse(
        self,
        q_THX: Tensor,
        cache: LatentCache,
        segments: MqaSegments,
        indices_TK: Tensor,
        scale: float,
        out_THL: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        row = 0
        for request, (queries, keys) in enumerate(zip(segments.query_lens, segments.key_lens, strict=True)):
            key_SX = self.rows(cache, segments, request, keys)
            for t in range(queries):
                chosen = self.chosen(indices_TK[row], self.seen(keys, queries, t, segments.causal))
                picked_KX = key_SX[chosen]
                values, lse = self.attend(q_THX[row], picked_KX, picked_KX[:, : self.latent], scale)
                out_THL[row] = values.to(out_THL.dtype)
                if lse_TH is not None:
                    lse_TH[row] = lse
                row += 1

    def chosen(self, indices_K: Tensor, seen: int) -> Tensor:
        valid = indices_K[(indices_K >= 0) & (indices_K < seen)]
        return valid.unique().long()

    def rope_append(
        self,
        cache: LatentCache,
        targets: SlotTargets,
        q_rope_THR: Tensor,
        latent_TL: Tensor,
        k_rope_TR: Tensor,
        rope: RopeInputs,
    ) -> None:
        rotate(q_rope_THR, rope)
        rotate(k_rope_TR.unsqueeze(1), rope)
        cache.write_targets(targets, latent_TL, k_rope_TR)


def rotate(x_THR: Tensor, rope: RopeInputs) -> None:
    cos, sin = rope.cos_TF.unsqueeze(1), rope.sin_TF.unsqueeze(1)
    half = x_THR.shape[-1] // 2
    interleaved = rope.style == "interleaved"
    first = x_THR[..., 0::2] if interleaved else x_THR[..., :half]
    second = x_THR[..., 1::2] if interleaved else x_THR[..., half:]
    turned = (first * cos - second * sin, second * cos + first * sin)
    first.copy_(turned[0])
    second.copy_(turned[1])


class DoubleRotator(Owner):
    """Rotates queries twice."""

    manifest = manifest.DOUBLE_ROTATOR

    def rope_append(self, *arguments: Any) -> None:
        super().rope_append(*arguments)
        rotate(arguments[2], arguments[-1])


class SloppyWriter(Owner):
    """Clears the last page of the cache whenever it appends."""

    manifest = manifest.SLOPPY_WRITER

    def rope_append(self, cache: LatentCache, *arguments: Any) -> None:
        cache.data[-1].zero_()
        super().rope_append(cache, *arguments)


class StaleOwner(Owner):
    """Keeps the first W_uv it has seen."""

    manifest = manifest.STALE_OWNER

    @hookimpl
    def prepare_weights(self, layer: Any) -> None:
        if "w_uv_HLV" not in vars(self):
            self.w_uv_HLV = layer.w_uv_HLV.float().clone()


class GateForgetter(Owner):
    """Owns the gate and lets everything through."""

    manifest = manifest.GATE_FORGETTER

    @hookimpl
    def gate(self, layer: Any, output: Tensor, hidden: Tensor) -> Tensor:
        return output


class DuplicateCounter(Owner):
    """Counts a key twice when it is selected twice."""

    manifest = manifest.DUPLICATE_COUNTER

    def chosen(self, indices_K: Tensor, seen: int) -> Tensor:
        return indices_K[(indices_K >= 0) & (indices_K < seen)].long()
