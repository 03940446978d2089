"""Hands out cache pages to requests, and shares them between requests with a common prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mla_core.errors import CacheError

__all__ = ["BlockAllocator"]


@dataclass
class _Request:
    tokens: int
    pages: list[int] = field(default_factory=list)


class BlockAllocator:
    """Pages of `page_size` tokens, handed out by request and counted by users.

    A fork shares the parent's full pages and takes a page of its own for a partial last one, so that
    writers never meet; the caller copies that page (`fork` says which). Not thread-safe.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 0 or page_size < 1:
            raise CacheError(
                f"an allocator needs num_pages >= 0 and page_size >= 1, got {num_pages} and {page_size}"
            )
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._users: Counter[int] = Counter()
        self._requests: dict[Hashable, _Request] = {}

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def allocate(self, request: Hashable, tokens: int) -> list[int]:
        """Pages for a new request of `tokens` tokens, in order of position. Raises CacheError when too few
        are free.
        """
        if request in self._requests:
            raise CacheError(
                f"request {request!r} already has pages; use extend to grow it or free to end it"
            )
        pages = self._take(self._pages_for(tokens), request)
        self._requests[request] = _Request(tokens, pages)
        return list(pages)

    def extend(self, request: Hashable, tokens: int) -> list[int]:
        """Room for `tokens` more tokens; returns all pages of the request."""
        known = self._known(request)
        total = known.tokens + self._count(tokens)
        known.pages += self._take(self._pages_for(total) - len(known.pages), request)
        known.tokens = total
        return list(known.pages)

    def free(self, request: Hashable) -> list[int]:
        """End a request; returns the pages that nobody uses any more."""
        pages = self._known(request).pages
        del self._requests[request]
        self._users.subtract(pages)
        released = [page for page in pages if self._users[page] == 0]
        for page in released:
            del self._users[page]
        self._free.extend(reversed(released))
        return released

    def fork(self, parent: Hashable, child: Hashable) -> tuple[list[int], tuple[int, int] | None]:
        """Start `child` with the parent's tokens.

        Returns the child's pages, and (source, target) of the partial last page that the caller must copy,
        or None.
        """
        source = self._known(parent)
        if child in self._requests:
            raise CacheError(f"request {child!r} already has pages; fork needs a new name")
        full = source.tokens // self.page_size
        shared, rest = source.pages[:full], source.pages[full:]
        own = self._take(len(rest), child)
        self._users.update(shared)
        self._requests[child] = _Request(source.tokens, shared + own)
        partial = source.tokens % self.page_size
        return [*shared, *own], (rest[0], own[0]) if partial else None

    def pages(self, request: Hashable) -> list[int]:
        """The request's pages, in order of position."""
        return list(self._known(request).pages)

    def table(self, requests: Sequence[Hashable], device: torch.device | str = "cpu") -> Tensor:
        """A block table [B, P] int32 for these requests, -1 where a request has fewer pages."""
        rows = [self._known(request).pages for request in requests]
        width = max((len(row) for row in rows), default=0)
        filled = [row + [-1] * (width - len(row)) for row in rows]
        return torch.tensor(filled, dtype=torch.int32, device=device).reshape(len(rows), width)

    def _known(self, request: Hashable) -> _Request:
        if request not in self._requests:
            raise CacheError(
                f"request {request!r} has no pages; allocated requests: {list(self._requests)[:8]}"
            )
        return self._requests[request]

    def _count(self, tokens: int) -> int:
        if tokens < 0:
            raise CacheError(f"a request cannot have {tokens} tokens")
        return tokens

    def _pages_for(self, tokens: int) -> int:
        return -(-self._count(tokens) // self.page_size)

    def _take(self, count: int, request: Hashable) -> list[int]:
        if count > len(self._free):
            raise CacheError(
                f"request {request!r} needs {count} more pages but only {len(self._free)} are free"
            )
        taken = [self._free.pop() for _ in range(max(count, 0))]
        self._users.update(taken)
        return taken
