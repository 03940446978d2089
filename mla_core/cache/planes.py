"""Layouts whose pages hold planes: one field of all tokens, then the next field of all tokens.

Fields of odd sizes then start where wide loads can reach them. Legend: T tokens, S cached tokens, P pages.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mla_core.cache.base import Layout
from mla_core.errors import CacheError

__all__ = ["PlaneLayout"]


@dataclass(frozen=True)
class PlaneLayout(Layout):
    """data is [num_pages, page_size * row] bytes; in a page, plane i of token t starts at page_size * (sum of
    the planes before i) + t * planes[i]. A packed row is a token's fields in the order of the planes.
    """

    @property
    @abstractmethod
    def planes(self) -> tuple[int, ...]:
        """Bytes of one token in each plane."""

    @property
    def fixed_page_size(self) -> int | None:
        """The only page size of this layout, None for any."""
        return None

    @property
    def storage(self) -> torch.dtype:
        return torch.uint8

    @property
    def row(self) -> int:
        return sum(self.planes)

    def page_size_of(self, data: Tensor) -> int:
        tokens = self.fixed_page_size
        if data.dim() == 2 and data.dtype == self.storage and data.shape[1] % self.row == 0:
            found = data.shape[1] // self.row
            if tokens in (None, found):
                return found
        needed = f"page_size * {self.row}" if tokens is None else f"{tokens} * {self.row}"
        raise CacheError(
            f"layout {self.id!r} needs [num_pages, {needed}] of {self.storage}, "
            f"got {list(data.shape)} of {data.dtype}"
        )

    def allocate(self, num_pages: int, page_size: int, device: torch.device | str) -> Tensor:
        if self.fixed_page_size not in (None, page_size):
            raise CacheError(
                f"layout {self.id!r} has pages of {self.fixed_page_size} tokens, not page_size={page_size}"
            )
        return torch.zeros(num_pages, page_size * self.row, dtype=self.storage, device=device)

    def write(self, data: Tensor, pages_T: Tensor, offsets_T: Tensor, rows: Tensor) -> None:
        fields = rows.split(self.planes, dim=-1)
        for plane, field in zip(self._views(data), fields, strict=True):
            plane[pages_T, offsets_T] = field

    def read(self, data: Tensor, pages_S: Tensor, offsets_S: Tensor) -> Tensor:
        return torch.cat([plane[pages_S, offsets_S] for plane in self._views(data)], dim=-1)

    def gather_pages(self, data: Tensor, pages_P: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.cat(self._views(torch.index_select(data, 0, pages_P)), dim=-1, out=out)

    def _views(self, data: Tensor) -> list[Tensor]:
        """Each plane as [P, page_size, bytes], over data's own memory."""
        page_size = self.page_size_of(data)
        starts = accumulate((page_size * width for width in self.planes), initial=0)
        return [
            data[:, start : start + page_size * width].unflatten(1, (page_size, width))
            for start, width in zip(starts, self.planes, strict=False)
        ]
