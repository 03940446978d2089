"""The layer's weight modules under their Hugging Face names.

Legend: D model, Q q-lora, L latent, R rope, E = N + R query head, H heads of this rank, V value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_core.config import MLAConfig

__all__ = ["Linear", "Projections", "RMSNorm"]


class Linear(nn.Module):
    """y = x W^T + b with uninitialised, frozen parameters."""

    def __init__(self, width: int, out: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _frozen(torch.empty(out, width, dtype=dtype, device=device))
        self.bias = _frozen(torch.empty(out, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _frozen(torch.empty(width, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Projections(nn.Module):
    """Down and up projections and their norms; with q LoRA the two down projections may be one fused
    matrix.
    """

    def __init__(
        self, config: MLAConfig, heads: int, fuse_qkv_a: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        made = {"dtype": dtype, "device": device}
        width, lora, latent = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
        queries = heads * config.qk_head_dim
        self.q_lora_rank = lora
        self.fused = fuse_qkv_a and lora is not None
        if lora is None:
            self.q_proj = Linear(width, queries, False, **made)
        else:
            self.q_a_layernorm = RMSNorm(lora, config.latent_norm_eps, **made)
            self.q_b_proj = Linear(lora, queries, False, **made)
        if self.fused:
            self.qkv_a_proj = Linear(width, (lora or 0) + config.latent_width, config.attention_bias, **made)
        else:
            if lora is not None:
                self.q_a_proj = Linear(width, lora, config.attention_bias, **made)
            self.kv_a_proj_with_mqa = Linear(width, config.latent_width, config.attention_bias, **made)
        self.kv_a_layernorm = RMSNorm(latent, config.latent_norm_eps, **made)
        self.kv_b_proj = Linear(latent, heads * (config.qk_nope_head_dim + config.v_head_dim), False, **made)

    def down(self, hidden_TD: Tensor) -> tuple[Tensor | None, Tensor]:
        """(query latent [T, Q] before its norm or None, [latent | rope key] [T, L + R] before its norm)."""
        if self.fused:
            q_a_TQ, kv_a_TX = self.qkv_a_proj(hidden_TD).tensor_split([self.q_lora_rank], dim=-1)
            return q_a_TQ, kv_a_TX
        q_a_TQ = None if self.q_lora_rank is None else self.q_a_proj(hidden_TD)
        return q_a_TQ, self.kv_a_proj_with_mqa(hidden_TD)

    def up(self, x_TX: Tensor) -> Tensor:
        """All query heads [T, H * E], from the normed query latent or, without q LoRA, from the hidden
        states.
        """
        return self.q_proj(x_TX) if self.q_lora_rank is None else self.q_b_proj(x_TX)


def _frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
