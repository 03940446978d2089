"""Reads cache bytes token by token in plain Python, from docs/cache-layouts.md and nothing of the package.

Values come back as exact Python floats: every product here fits in 53 bits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["E2M1", "Page", "cached_rows", "e4m3_value", "half_step", "token_row"]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3_value(byte: int) -> float:
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def e2m1_values(packed: bytes) -> list[float]:
    codes = [nibble for byte in packed for nibble in (byte & 15, byte >> 4)]
    return [(-1.0 if code & 8 else 1.0) * E2M1[code & 7] for code in codes]


def bf16_values(raw: bytes) -> list[float]:
    return [struct.unpack("<f", bytes(2) + raw[i : i + 2])[0] for i in range(0, len(raw), 2)]


@dataclass(frozen=True)
class Page:
    """One page's bytes, and what one must know to read them."""

    raw: bytes
    page_size: int
    latent: int
    rope: int
    k_scale: float = 1.0
    global_scale: float = 1.0

    def row(self, offset: int, width: int) -> bytes:
        """A token's bytes where tokens lie one after the other."""
        return self.raw[offset * width : (offset + 1) * width]

    def plane(self, offset: int, width: int, before: int) -> bytes:
        """A token's bytes of a plane, behind planes of `before` bytes a token."""
        start = self.page_size * before + offset * width
        return self.raw[start : start + width]


def _fp8(page: Page, offset: int) -> list[float]:
    return [e4m3_value(byte) * page.k_scale for byte in page.row(offset, page.latent + page.rope)]


def _ds_mla(page: Page, offset: int) -> list[float]:
    row = page.row(offset, 656)
    scales = struct.unpack("<4f", row[512:528])
    return [e4m3_value(byte) * scales[i // 128] for i, byte in enumerate(row[:512])] + bf16_values(row[528:])


def _grouped(packed: bytes, scales: bytes, global_scale: float) -> list[float]:
    return [value * e4m3_value(scales[i // 16]) * global_scale for i, value in enumerate(e2m1_values(packed))]


def _nvfp4(page: Page, offset: int) -> list[float]:
    width = page.latent + page.rope
    packed = page.plane(offset, width // 2, 0)
    return _grouped(packed, page.plane(offset, width // 16, width // 2), page.global_scale)


def _nvfp4_rope_bf16(page: Page, offset: int) -> list[float]:
    data, rope = page.latent // 2, 2 * page.rope
    scales = page.plane(offset, page.latent // 16, data + rope)
    latent = _grouped(page.plane(offset, data, 0), scales, page.global_scale)
    return latent + bf16_values(page.plane(offset, rope, data))


def _index(page: Page, offset: int) -> list[float]:
    (scale,) = struct.unpack("<f", page.plane(offset, 4, page.latent))
    return [e4m3_value(byte) * scale for byte in page.plane(offset, page.latent, 0)]


def _plain(code: str, size: int) -> Callable[[Page, int], list[float]]:
    def read(page: Page, offset: int) -> list[float]:
        width = page.latent + page.rope
        return list(struct.unpack(f"<{width}{code}", page.row(offset, size * width)))

    return read


def _bf16(page: Page, offset: int) -> list[float]:
    return bf16_values(page.row(offset, 2 * (page.latent + page.rope)))


_READERS: dict[str, Callable[[Page, int], list[float]]] = {
    "fp32": _plain("f", 4),
    "fp16": _plain("e", 2),
    "bf16": _bf16,
    "fp8_e4m3": _fp8,
    "fp8_ds_mla": _ds_mla,
    "nvfp4": _nvfp4,
    "nvfp4_rope_bf16": _nvfp4_rope_bf16,
    "idx_fp8": _index,
}


def token_row(layout_id: str, page: Page, offset: int) -> list[float]:
    """The latent, then the rope values of one token."""
    return _READERS[layout_id](page, offset)


def cached_rows(cache, pages: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """(latent, rope) of a request's first tokens in float64, from the raw bytes of its pages."""
    layout, size = cache.layout, cache.page_size
    raw = [bytes(cache.data[page].contiguous().view(torch.uint8).flatten().tolist()) for page in pages]
    scales = (cache.scales.k_scale, cache.scales.global_scale)
    read = [Page(page, size, layout.latent, layout.rope, *scales) for page in raw]
    rows = [token_row(layout.id, read[where // size], where % size) for where in range(length)]
    values = torch.tensor(rows, dtype=torch.float64).reshape(length, layout.latent + layout.rope)
    return values[:, : layout.latent], values[:, layout.latent :]


def half_step(values: Sequence[float], x: float) -> float:
    """Half the gap between the two neighbours of |x| in an ascending list; beyond it, the overshoot."""
    size = abs(x)
    if size >= values[-1]:
        return size - values[-1]
    above = next(i for i, value in enumerate(values) if value > size)
    return (values[above] - values[above - 1]) / 2
