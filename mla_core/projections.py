"""The layer's weight modules under their Hugging Face names.

Legend: D model, Q q-lora, L latent, N nope, R rope, E = N + R query head, H heads of this rank, V value.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mla_core.config import MLAConfig
from mla_core.projections_quantised import QuantisedLinear, SplitUp
from mla_core.quant.fp4_hidden import Fp4Hidden, plain, rms_norm_fp4

__all__ = ["Direct", "Linear", "Projections", "QuantisedLinear", "RMSNorm", "SplitUp"]

Input = Tensor | Fp4Hidden


class Direct(nn.Module):
    """A module whose parameters and submodules are plain attributes too.

    nn.Module finds them in Python code, after Python has failed to; a small layer spends a twentieth of its
    time there. Buffers are left out: nn.Module may replace them without setting the attribute.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__.pop(name, None)
        super().__setattr__(name, value)
        if isinstance(value, nn.Parameter | nn.Module):
            self.__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self.__dict__.pop(name, None)


class Linear(Direct):
    """y = x W^T + b with uninitialised, frozen parameters."""

    def __init__(self, width: int, out: int, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _frozen(torch.empty(out, width, dtype=dtype, device=device))
        self.bias = _frozen(torch.empty(out, dtype=dtype, device=device)) if bias else None

    def forward(self, x: Input) -> Tensor:
        return F.linear(plain(x), self.weight, self.bias)


class RMSNorm(Direct):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = _frozen(torch.empty(width, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        return torch.rms_norm(x, weight.shape, weight, self.eps)


class Projections(Direct):
    """Down and up projections and their norms; with q LoRA the two down projections may be one fused
    matrix.

    `norm_fp4` is the fused norm and quantisation in front of an NVFP4 q_b_proj; kernels may replace it.
    """

    def __init__(
        self, config: MLAConfig, heads: int, fuse_qkv_a: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        made = {"dtype": dtype, "device": device}
        width, lora, latent = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
        queries = heads * config.qk_head_dim
        self.q_lora_rank = lora
        self.norm_fp4 = rms_norm_fp4
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

    def down(self, hidden_TD: Input) -> tuple[Tensor | None, Tensor]:
        """(query latent [T, Q] before its norm or None, [latent | rope key] [T, L + R] before its norm)."""
        if self.fused:
            q_a_TQ, kv_a_TX = self.qkv_a_proj(hidden_TD).tensor_split([self.q_lora_rank], dim=-1)
            return q_a_TQ, kv_a_TX
        q_a_TQ = None if self.q_lora_rank is None else self.q_a_proj(hidden_TD)
        return q_a_TQ, self.kv_a_proj_with_mqa(hidden_TD)

    def norm_query(self, q_a_TQ: Tensor) -> Input:
        """The normed query latent, quantised on the way when q_b_proj takes NVFP4."""
        norm, up = self.q_a_layernorm, self.q_b_proj
        if isinstance(up, QuantisedLinear) and up.takes_fp4:
            return self.norm_fp4(q_a_TQ, norm.weight, norm.eps, up.input_scale)
        return norm(q_a_TQ)

    def up(self, x_TX: Input) -> Tensor:
        """All query heads [T, H * E], from the normed query latent or, without q LoRA, from the hidden
        states.
        """
        return self.q_proj(x_TX) if self.q_lora_rank is None else self.q_b_proj(x_TX)

    def unfuse(self, replaced: Collection[str]) -> None:
        """Two down projections instead of one fused matrix: quantised ones stay apart. The weights of those
        about to be `replaced` are not copied.
        """
        if not self.fused:
            return
        rows = {"q_a_proj": slice(0, self.q_lora_rank), "kv_a_proj_with_mqa": slice(self.q_lora_rank, None)}
        for name, own in rows.items():
            setattr(self, name, _part(self.qkv_a_proj, own, copy=name not in replaced))
        del self.qkv_a_proj
        self.fused = False


def _part(module: Linear, rows: slice, *, copy: bool) -> Linear:
    """Some output rows of a module, as a module of its own."""
    weight, bias = module.weight[rows], module.bias
    own = Linear(weight.shape[1], weight.shape[0], bias is not None, weight.dtype, weight.device)
    if copy:
        own.weight.copy_(weight)
    if own.bias is not None and bias is not None:
        own.bias.copy_(bias[rows])
    return own


def _frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)
