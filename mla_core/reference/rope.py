"""Rotary embedding from a config's raw fields: plain, YaRN (arXiv 2309.00071), LongRoPE (arXiv 2402.13753).

Legend: T tokens, R rope; pair i of R/2 turns by position * frequency_i.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

__all__ = ["mscale", "rotate", "rotation"]


def rotation(config: Any, positions_T: Tensor, angle_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every token's angles, [T, R/2] in float64, amplitude included.

    Angles are formed in angle_dtype. float64 is the mathematics; float32 rounds frequencies and angles as
    transformers does, which is visible beyond position 20,000.
    """
    length = int(positions_T.max()) + 1 if positions_T.numel() else 0
    frequency = _frequencies(config, length, angle_dtype, positions_T.device)
    angle = positions_T.to(angle_dtype)[:, None] * frequency
    amplitude = _amplitude(config)
    return amplitude * angle.cos().double(), amplitude * angle.sin().double()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    """Turn each pair of the last dim and leave it where the style keeps it.

    interleaved: pair i is dims (2i, 2i+1); half_split: dims (i, i + R/2); none: nothing turns.
    """
    if style == "none":
        return x
    if style == "interleaved":
        first, second = x[..., 0::2], x[..., 1::2]
    elif style == "half_split":
        first, second = x.chunk(2, dim=-1)
    else:
        raise ValueError(f"rope style {style!r} is unknown; known: interleaved, half_split, none")
    turned = (first * cos - second * sin, first * sin + second * cos)
    return torch.stack(turned, dim=-1).flatten(-2) if style == "interleaved" else torch.cat(turned, dim=-1)


def mscale(factor: float, weight: float) -> float:
    """YaRN's temperature: 0.1 * weight * ln(factor) + 1 for a factor above 1."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _frequencies(config: Any, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians per position of each pair: theta^(-2i/R), stretched as the scaling says."""
    width, theta, scaling = config.qk_rope_head_dim, config.rope.theta, config.rope.scaling
    wavelength = theta ** (torch.arange(0, width, 2, dtype=dtype, device=device) / width)
    if scaling is None:
        return 1.0 / wavelength
    if scaling.kind == "yarn":
        keep = 1.0 - _interpolated_share(scaling, width, theta, dtype).to(device)
        return 1.0 / (scaling.factor * wavelength) * (1.0 - keep) + 1.0 / wavelength * keep
    if scaling.kind == "longrope":
        is_long = length > scaling.original_max_position
        stretch = scaling.long_factor if is_long else scaling.short_factor
        return 1.0 / (torch.tensor(stretch, dtype=dtype, device=device) * wavelength)
    raise ValueError(f"rope scaling {scaling.kind!r} is unknown; known: yarn, longrope")


def _interpolated_share(scaling: Any, width: int, theta: float, dtype: torch.dtype) -> Tensor:
    """YaRN's ramp: 0 for pairs that turn over beta_fast times in the original length, 1 below beta_slow."""

    def pair_that_turns(times: float) -> float:
        """The pair index i with original_length * theta^(-2i/R) = 2 pi times."""
        return width * math.log(scaling.original_max_position / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(width // 2, dtype=dtype) - low) / (high - low)).clamp(0, 1)


def _amplitude(config: Any) -> float:
    """Factor on cos and sin: an explicit attention_factor, else what the scaling's paper derives."""
    scaling = config.rope.scaling
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "longrope":
        return _longrope_amplitude(config.max_position_embeddings, scaling.original_max_position)
    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.factor, scaling.mscale) / mscale(scaling.factor, scaling.mscale_all_dim)
    return mscale(scaling.factor, 1.0)


def _longrope_amplitude(length: int, original: int) -> float:
    return math.sqrt(1 + math.log(length / original) / math.log(original)) if length > original else 1.0
