"""FP8 tiles: runs of e4m3 values that share one float32 scale, chosen by their largest value."""

from __future__ import annotations

from torch import Tensor

from mla_core.quant import e4m3, ue8m0
from mla_core.quant.division import divide

__all__ = ["SMALLEST_SCALE", "decode", "encode"]

# The smallest normal float32, so that a tile of zeros has a positive scale.
SMALLEST_SCALE = 2.0**-126


def encode(x: Tensor, width: int, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Codes [..., W] (float8_e4m3fn) and scales [..., W / width] (float32) of values [..., W].

    scale = largest size in the tile / 448, at least 2^-126, rounded up to a power of two when asked;
    code = e4m3(x / scale). A NaN stays in its own place and does not touch the scale; an infinity counts
    as the largest float32. Scales are therefore always positive and finite.
    """
    tiles = x.float().unflatten(-1, (-1, width))
    largest = tiles.abs().nan_to_num(nan=0.0).amax(dim=-1)
    scales = divide(largest, e4m3.LARGEST).clamp(min=SMALLEST_SCALE)
    if power_of_two:
        scales = ue8m0.decode(ue8m0.encode(scales))
    return e4m3.encode(tiles / scales.unsqueeze(-1)).flatten(-2), scales


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """Values [..., W] in float32: code times its tile's scale, rounded once."""
    tiles = e4m3.decode(codes).unflatten(-1, (scales.shape[-1], -1))
    return (tiles * scales.unsqueeze(-1)).flatten(-2)
