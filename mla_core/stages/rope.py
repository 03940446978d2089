"""Stage rope: rotary embedding of the query's and key's rope dims, and the position-dependent query scale.

Formulas: RoPE (arXiv 2104.09864), YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753).
Legend: T tokens, H heads, R rope dims, F = R/2 frequencies.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mla_core.backend import RopeInputs
from mla_core.config import LongRope, MLAConfig, Yarn, yarn_mscale

if TYPE_CHECKING:
    from mla_core.batch import Batch
    from mla_core.layer import MLA
    from mla_core.stages.project import Projected
    from mla_core.step import Step

__all__ = ["query_factors", "rope", "rope_inputs", "rotate", "scale_queries"]


def rope(layer: MLA, projected: Projected, step: Step) -> None:
    """Rotate the rope dims of queries and keys in place."""
    if step.rope is None:
        return
    style, cos_TF, sin_TF = step.rope.style, step.rope.cos_TF, step.rope.sin_TF
    query_THR = projected.query_THE[..., layer.config.qk_nope_head_dim :]
    _rotate(query_THR, style, cos_TF.unsqueeze(1), sin_TF.unsqueeze(1))
    _rotate(projected.k_rope_TR, style, cos_TF, sin_TF)


def rotate(x_THR: Tensor, inputs: RopeInputs) -> None:
    """Rotate each pair by its angle, in place, in float32; interleaved pairs are (2i, 2i+1), half-split (i,
    i + R/2).
    """
    _rotate(x_THR, inputs.style, inputs.cos_TF.unsqueeze(1), inputs.sin_TF.unsqueeze(1))


def _rotate(x: Tensor, style: str, cos: Tensor, sin: Tensor) -> None:
    half = x.shape[-1] // 2
    if style == "interleaved":
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., :half], x[..., half:]
    rotated = first * cos - second * sin
    second.copy_(second * cos + first * sin)
    first.copy_(rotated)


def scale_queries(projected: Projected, step: Step) -> None:
    """Multiply whole queries by their position's factor, in place; it commutes with the rotation."""
    if step.query_factors_T is not None:
        projected.query_THE.mul_(step.query_factors_T[:, None, None])


def rope_inputs(config: MLAConfig, batch: Batch) -> RopeInputs | None:
    """Cosines and sines of a step's tokens; None when nothing rotates. Angles are float32 products, as
    checkpoints were trained.
    """
    if config.rope.style == "none" or config.qk_rope_head_dim == 0:
        return None
    positions = batch.positions
    table, amplitude = frequencies(config, positions.device)
    if table.dim() == 2:
        table = table[_is_long(config, batch).long()]
    angles = positions.float().unsqueeze(1) * table
    return RopeInputs(config.rope.style, angles.cos() * amplitude, angles.sin() * amplitude, positions)


def query_factors(config: MLAConfig, batch: Batch) -> Tensor | None:
    """Llama-4 query scale [T] in float32: 1 + beta * ln(1 + floor((position + offset) / floor_scale)); None
    when not configured.
    """
    scaling = config.query_scaling
    if scaling is None:
        return None
    steps = torch.floor((batch.positions + scaling.offset).float() / scaling.floor_scale)
    return 1.0 + scaling.beta * torch.log1p(steps)


def frequencies(config: MLAConfig, device: torch.device) -> tuple[Tensor, float]:
    """Inverse frequencies [F] (LongRoPE: [2, F], short and long), and the amplitude of cosine and sine."""
    width, scaling = config.qk_rope_head_dim, config.rope.scaling
    period = config.rope.theta ** (torch.arange(0, width, 2, device=device).float() / width)
    if isinstance(scaling, Yarn):
        return _yarn(period, scaling, config), _yarn_amplitude(scaling)
    if isinstance(scaling, LongRope):
        factors = torch.tensor([scaling.short_factor, scaling.long_factor], device=device)
        return 1.0 / (factors * period), _longrope_amplitude(scaling, config.max_position_embeddings)
    return 1.0 / period, 1.0


def _yarn(period: Tensor, scaling: Yarn, config: MLAConfig) -> Tensor:
    width = config.qk_rope_head_dim
    low, high = (_rotations_dim(turns, scaling, config) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    index = torch.arange(width // 2, dtype=torch.float32, device=period.device)
    keep = 1.0 - ((index - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 / (scaling.factor * period)) * (1.0 - keep) + (1.0 / period) * keep


def _rotations_dim(turns: float, scaling: Yarn, config: MLAConfig) -> float:
    """The dim whose wave turns `turns` times over the original context."""
    width, theta = config.qk_rope_head_dim, config.rope.theta
    return width * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_amplitude(scaling: Yarn) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(
            scaling.factor, scaling.mscale_all_dim
        )
    return yarn_mscale(scaling.factor, 1.0)


def _longrope_amplitude(scaling: LongRope, max_position: int) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    stretch = max_position / scaling.original_max_position
    return 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(scaling.original_max_position))


def _is_long(config: MLAConfig, batch: Batch) -> Tensor:
    """Per token: has its request outgrown the original context?"""
    scaling = config.rope.scaling
    limit = scaling.original_max_position if scaling is not None else 0
    queries = torch.tensor(batch.query_lens, dtype=torch.int64, device=batch.positions.device)
    long = torch.tensor([length > limit for length in batch.lengths], device=batch.positions.device)
    padded = torch.zeros(batch.num_rows, dtype=torch.bool, device=batch.positions.device)
    padded[: batch.num_tokens] = torch.repeat_interleave(long, queries)
    return padded
