"""The absorbed decode step in one function over a contiguous cache: the mathematics without a framework.

It serves one batch shape, no pages, no mixed lengths and no prefill, and stores its weights as it likes.
Legend: B requests, S cached tokens with the new one, H heads, D model, Q q-lora, L latent, N nope, R rope,
F = R/2 frequencies, V value, X = L + R.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from contestants import Problem
from torch import Tensor

from mla_core import MLAConfig

__all__ = ["Attend", "HandWritten", "flash", "matmul"]

# (query [B, H, X], cache [B, S, X], scale) to latent outputs [B, H, L or more].
Attend = Callable[[Tensor, Tensor, float], Tensor]


def flash(query_BHX: Tensor, cache_BSX: Tensor, scale: float) -> Tensor:
    """torch's fused CPU kernel: heads are the query rows of one shared head."""
    keys_B1SX = cache_BSX.unsqueeze(1)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query_BHX.unsqueeze(1), keys_B1SX, keys_B1SX, 0.0, False, scale=scale)[0].squeeze(1)


def matmul(query_BHX: Tensor, cache_BSX: Tensor, scale: float) -> Tensor:
    """Two batched matmuls with a float32 softmax in between."""
    scores_BHS = torch.bmm(query_BHX, cache_BSX.transpose(1, 2)).float().mul_(scale)
    return torch.bmm(torch.softmax(scores_BHS, dim=-1).to(query_BHX.dtype), cache_BSX)


class HandWritten:
    """Weights and the cache, which has room for the new token."""

    def __init__(self, problem: Problem) -> None:
        config, weights = problem.hf_config, problem.weights
        self.hidden_BD, self.position = problem.hidden_BD, problem.cached
        self.dims = (config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim)
        self.heads, self.nope = config.num_attention_heads, config.qk_nope_head_dim
        self.qkv_a = torch.cat([weights["q_a_proj.weight"], weights["kv_a_proj_with_mqa.weight"]])
        self.q_norm, self.kv_norm = weights["q_a_layernorm.weight"], weights["kv_a_layernorm.weight"]
        self.q_b, self.o = weights["q_b_proj.weight"], weights["o_proj.weight"]
        # The contracted dim last in memory: the only order that CPU matmuls in bfloat16 handle well.
        kv_b_HXL = weights["kv_b_proj.weight"].view(self.heads, -1, config.kv_lora_rank)
        self.w_uk_HNL = kv_b_HXL[:, : self.nope].transpose(1, 2).contiguous().transpose(1, 2)
        self.w_uv_HLV = kv_b_HXL[:, self.nope :].contiguous().transpose(1, 2)
        self.frequencies_F, self.amplitude = problem.rotary.inv_freq, problem.rotary.attention_scaling
        self.scale, self.eps = MLAConfig.from_hf(config).softmax_scale, config.rms_norm_eps
        rows = torch.cat([problem.latent_BSL, problem.k_rope_BSR], dim=-1)
        self.cache_BSX = F.pad(rows, (0, 0, 0, 1))

    def decode(self, attend: Attend) -> Tensor:
        """The new token of every request, written to the cache and attended to."""
        q_rank, latent, rope = self.dims
        requests, nope = self.hidden_BD.shape[0], self.nope
        angles_F = self.position * self.frequencies_F
        cos_F, sin_F = angles_F.cos() * self.amplitude, angles_F.sin() * self.amplitude

        q_a_BQ, latent_BL, k_rope_BR = F.linear(self.hidden_BD, self.qkv_a).split(self.dims, dim=-1)
        q_a_BQ = F.rms_norm(q_a_BQ, (q_rank,), self.q_norm, self.eps)
        query_BHE = F.linear(q_a_BQ, self.q_b).view(requests, self.heads, nope + rope)

        row_BX = self.cache_BSX[:, self.position]
        row_BX[:, :latent] = F.rms_norm(latent_BL, (latent,), self.kv_norm, self.eps)
        even_BF, odd_BF = k_rope_BR[:, 0::2], k_rope_BR[:, 1::2]
        row_BX[:, latent::2] = even_BF * cos_F - odd_BF * sin_F
        row_BX[:, latent + 1 :: 2] = odd_BF * cos_F + even_BF * sin_F

        query_BHX = query_BHE.new_empty(requests, self.heads, latent + rope)
        absorbed_HBL = torch.bmm(query_BHE[..., :nope].transpose(0, 1), self.w_uk_HNL)
        query_BHX[..., :latent] = absorbed_HBL.transpose(0, 1)
        even_BHF, odd_BHF = query_BHE[..., nope::2], query_BHE[..., nope + 1 :: 2]
        query_BHX[..., latent::2] = even_BHF * cos_F - odd_BHF * sin_F
        query_BHX[..., latent + 1 :: 2] = odd_BHF * cos_F + even_BHF * sin_F

        out_BHL = attend(query_BHX, self.cache_BSX, self.scale)[..., :latent]
        values_HBV = torch.bmm(out_BHL.transpose(0, 1), self.w_uv_HLV)
        return F.linear(values_HBV.transpose(0, 1).flatten(1), self.o)
