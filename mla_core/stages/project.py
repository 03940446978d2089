"""Stage project: down and up projections with their norms.

Legend: T tokens, D model, Q q-lora, H heads, E = N + R query head, L latent, R rope.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from mla_core.quant.fp4_hidden import plain

if TYPE_CHECKING:
    from mla_core.batch import Batch
    from mla_core.layer import MLA

__all__ = ["Projected", "project", "with_latent"]


@dataclass(frozen=True, eq=False)
class Projected:
    """New tokens after projection. The rope parts are rotated in place by the rope stage.

    query_THE is [nope | rope] per head. q_lora_TQ is the normed query latent (None without q LoRA); an
    indexer uses it together with hidden_TD.
    """

    query_THE: Tensor
    latent_TL: Tensor
    k_rope_TR: Tensor
    hidden_TD: Tensor
    q_lora_TQ: Tensor | None


def project(layer: MLA, hidden: Tensor, batch: Batch) -> Projected:
    """q = q_b(norm(q_a(x))) or q_proj(x); [c | k_rope] = kv_a(x), c normed (arXiv 2405.04434, 2.1)."""
    config, modules = layer.config, layer.projections
    q_a_TQ, kv_a_TX = modules.down(hidden)
    query_input = hidden if q_a_TQ is None else modules.norm_query(q_a_TQ)
    query_THE = modules.up(query_input).view(-1, layer.num_heads, config.qk_head_dim)
    latent_TL, k_rope_TR = kv_a_TX.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
    latent_TL = modules.kv_a_layernorm(latent_TL)
    if config.query_scale != 1.0:
        query_THE = query_THE * config.query_scale
    if config.latent_scale != 1.0:
        latent_TL = latent_TL * config.latent_scale
    q_lora_TQ = None if q_a_TQ is None else plain(query_input)
    return Projected(query_THE, latent_TL, k_rope_TR, hidden, q_lora_TQ)


def with_latent(projected: Projected, latent_TX: Tensor | None) -> Projected:
    """The same queries with given rows [T, L + R] for the new tokens; unchanged without any."""
    if latent_TX is None:
        return projected
    # A copy: the rope stage rotates in place, and the rows are the caller's.
    latent_TL, k_rope_TR = latent_TX.clone().tensor_split([projected.latent_TL.shape[1]], dim=1)
    return replace(projected, latent_TL=latent_TL, k_rope_TR=k_rope_TR)
