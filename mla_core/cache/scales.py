"""Factors that belong to one cache and not to its layout."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from torch import Tensor

from mla_core.errors import CacheError

__all__ = ["Scales", "largest_size"]

# Between these every decoded value is a normal float32, in every layout.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100


@dataclass(frozen=True)
class Scales:
    """What writers and readers of a quantised cache agree on; each layout uses what it needs, others nothing.

    k_scale: the per-tensor descale, stored = value / k_scale. global_scale: nvfp4's factor on all group
    scales. Both are rounded to float32 here, so that everybody computes with the same number.
    power_of_two: writers round scales that they choose themselves up to powers of two.
    """

    k_scale: float = 1.0
    global_scale: float = 1.0
    power_of_two: bool = False

    def __post_init__(self) -> None:
        for name in ("k_scale", "global_scale"):
            object.__setattr__(self, name, _float32(name, getattr(self, name)))

    @classmethod
    def of(
        cls,
        k_scale: float | None = None,
        v_scale: float | None = None,
        global_scale: float | None = None,
        *,
        power_of_two: bool = False,
    ) -> Scales:
        """Scales from what a checkpoint or user may leave out: None means 1.

        Keys and values of MLA are one stored latent. Raises CacheError for a v_scale of its own.
        """
        k_scale = 1.0 if k_scale is None else k_scale
        if v_scale is not None and v_scale != k_scale:
            raise CacheError(
                f"v_scale={v_scale} differs from k_scale={k_scale}, but MLA stores one latent for keys and "
                "values; leave v_scale out or make them equal"
            )
        return cls(k_scale, 1.0 if global_scale is None else global_scale, power_of_two)


def _float32(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise CacheError(f"{name} must be a positive finite number, got {value}; use 1.0 for no scaling")
    if not _SMALLEST <= value <= _LARGEST:
        raise CacheError(
            f"{name} must be a positive finite number in float32, from 2^-100 to 2^100, got {value}; "
            "use 1.0 for no scaling"
        )
    return float(struct.unpack("f", struct.pack("f", value))[0])


def largest_size(latent_TL: Tensor, k_rope_TR: Tensor) -> float:
    """The largest size among all values; 0 when there are none."""
    sizes = [float(part.abs().max()) for part in (latent_TL, k_rope_TR) if part.numel()]
    return max(sizes, default=0.0)
