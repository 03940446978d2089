"""What the framework itself costs: a layer call at tiny dims against the same torch calls in one function.

Legend: B requests, H heads, L latent, N nope, R rope, V value, E = N + R, X = L + R, S gathered rows.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from contestants import Paged
from timing import Call
from torch import Tensor, nn

from mla_core.stages.output import AttentionOutput

__all__ = ["Inline", "stages"]


class Inline:
    """The torch calls of one decode step of `paged`, its backend's included; all else is looked up before.

    modules: call the layer's nn.Modules for products and norms, as torch code usually does, instead of
    functions on bare tensors.
    """

    def __init__(self, paged: Paged, *, modules: bool) -> None:
        layer, step, config = paged.layer, paged.step, paged.layer.config
        self.hidden_BD, self.data = paged.problem.hidden_BD, paged.cache.data
        own = layer.projections
        linear, norm = (_itself, _itself) if modules else (_bare_linear, _bare_norm)
        self.qkv_a, self.q_b, self.o = (linear(x) for x in (own.qkv_a_proj, own.q_b_proj, layer.o_proj))
        self.q_norm, self.kv_norm = norm(own.q_a_layernorm), norm(own.kv_a_layernorm)
        self.w_uk_HNL, self.w_uv_HLV = layer.w_uk_HNL, layer.w_uv_HLV
        self.scale = layer.softmax_scale
        self.dims = (config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim)
        self.heads, self.nope, self.value = layer.num_heads, config.qk_nope_head_dim, config.v_head_dim
        self.pages, self.offsets = step.targets.pages, step.targets.offsets
        self.cos, self.sin = step.rope.cos_TF.unsqueeze(1), step.rope.sin_TF.unsqueeze(1)
        (self.group,) = step.parts[0].segments.meta
        (self.piece,) = self.group.pieces

    def decode(self) -> Tensor:
        hidden_BD, heads, nope = self.hidden_BD, self.heads, self.nope
        lora, latent, rope = self.dims
        requests, width = hidden_BD.shape[0], latent + rope

        output_BHV = hidden_BD.new_empty(requests, heads * self.value).view(requests, heads, self.value)
        q_a_BQ, kv_a_BX = self.qkv_a(hidden_BD).tensor_split([lora], dim=-1)
        query_BHE = self.q_b(self.q_norm(q_a_BQ)).view(requests, heads, nope + rope)
        latent_BL, k_rope_BR = kv_a_BX.split([latent, rope], dim=-1)
        latent_BL = self.kv_norm(latent_BL)

        for rotated in (query_BHE[..., nope:], k_rope_BR.unsqueeze(1)):
            first, second = rotated[..., 0::2], rotated[..., 1::2]
            new_first = first * self.cos - second * self.sin
            second.copy_(second * self.cos + first * self.sin)
            first.copy_(new_first)
        self.data[self.pages, self.offsets] = torch.cat([latent_BL, k_rope_BR], dim=-1).to(self.data.dtype)

        query_BHX = query_BHE.new_empty(requests, heads, width)
        absorbed_HBL = torch.bmm(query_BHE[..., :nope].transpose(0, 1), self.w_uk_HNL)
        query_BHX[..., :latent] = absorbed_HBL.transpose(0, 1)
        query_BHX[..., latent:] = query_BHE[..., nope:]
        out_BHL = self._attend(query_BHX)
        output_BHV.copy_(torch.bmm(out_BHL.transpose(0, 1), self.w_uv_HLV).transpose(0, 1))
        return self.o(output_BHV.flatten(1))

    def _attend(self, query_BHX: Tensor) -> Tensor:
        requests, heads, width = query_BHX.shape
        latent, piece = self.dims[1], self.piece
        out_BHL = query_BHX.new_empty(requests, heads, latent)
        rows_SX = torch.index_select(self.data, 0, piece.pages).to(query_BHX.dtype).view(-1, width)
        rows_SX.index_fill_(0, piece.unowned, 0.0)
        keys_B1SX = rows_SX.view(requests, 1, -1, width)
        mask = torch.arange(keys_B1SX.shape[2]) < piece.visible.unsqueeze(-1)
        bias = torch.zeros(1, dtype=query_BHX.dtype).where(mask, -torch.inf).unsqueeze(1)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_BHX.unsqueeze(1), keys_B1SX, keys_B1SX, 0.0, False, attn_mask=bias, scale=self.scale
        )
        empty = piece.visible == 0
        out, _ = out[:, 0].masked_fill(empty.unsqueeze(-1), 0.0), lse[:, 0].masked_fill(empty, -torch.inf)
        out_BHL[self.group.rows] = out.reshape(-1, heads, width)[..., :latent]
        return out_BHL


def _itself(module: nn.Module) -> nn.Module:
    return module


def _bare_linear(module: nn.Module) -> Call:
    return partial(F.linear, weight=module.weight)


def _bare_norm(module: nn.Module) -> Call:
    weight, eps = module.weight, module.eps
    return lambda x: torch.rms_norm(x, weight.shape, weight, eps)


def stages(paged: Paged) -> dict[str, Call]:
    """The stages of one layer call, each alone, in their order. Repeating them is harmless."""
    layer, step, hidden_BD = paged.layer, paged.step, paged.problem.hidden_BD
    run, batch = layer.program, step.batch
    projected = run.project(layer, hidden_BD, batch)
    values_BHV = run.create_output(layer, hidden_BD, batch).view(batch.num_rows, layer.num_heads, -1)
    output = AttentionOutput(values_BHV, None)
    return {
        "create_output": lambda: run.create_output(layer, hidden_BD, batch),
        "project": lambda: run.project(layer, hidden_BD, batch),
        "rope": lambda: run.rope(layer, projected, step),
        "append": lambda: run.append(layer, projected, step),
        "attend": lambda: run.attend(layer, projected, step, output),
        "gate": lambda: run.gate(layer, values_BHV, hidden_BD),
        "project_out": lambda: run.project_out(layer, values_BHV, batch),
    }
