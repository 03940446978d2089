"""An engine step, planned on the host once and shared by all layers: what `MLA.prepare` returns.

Requests are split by phase; each phase becomes parts, a set of token rows with the kernel that serves them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from mla_core.backend import MhaSegments, MqaSegments, RopeInputs
from mla_core.batch import Batch
from mla_core.cache.latent import LatentCache, SlotTargets
from mla_core.cache.pool import CachePool

if TYPE_CHECKING:
    from mla_core.layer import MLA

__all__ = ["AbsorbedPart", "ContextChunk", "ExpandedPart", "Step"]

Rows = slice | Tensor


@dataclass(frozen=True, eq=False)
class AbsorbedPart:
    """Rows served by multi-query attention over the paged cache: kernel "mqa" (decode) or "mqa_prefill"."""

    kernel: str
    rows: Rows
    segments: MqaSegments


@dataclass(frozen=True, eq=False)
class ContextChunk:
    """A piece of the cached prefix: where its rows lie, and which of the part's query rows attend to it."""

    targets: SlotTargets
    rows: slice
    segments: MhaSegments


@dataclass(frozen=True, eq=False)
class ExpandedPart:
    """Rows served by multi-head attention: among themselves (`own`), then over chunks of their cached
    prefix.
    """

    kernel: str
    rows: Rows
    own: MhaSegments
    chunks: tuple[ContextChunk, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """Everything about a batch that does not depend on the layer. `signature` says which layers it fits."""

    batch: Batch
    cache: LatentCache | CachePool
    signature: object
    targets: SlotTargets
    rope: RopeInputs | None
    query_factors_T: Tensor | None
    parts: tuple[AbsorbedPart | ExpandedPart, ...]

    def cache_of(self, layer: MLA) -> LatentCache:
        """The cache of one layer."""
        return self.cache.layer(layer.layer_idx) if isinstance(self.cache, CachePool) else self.cache

    def zero_padding(self, rows: Tensor, value: float = 0.0) -> Tensor:
        """Rows beyond the live tokens become 0 (or `value`), whatever flowed into them."""
        if self.batch.num_tokens < self.batch.num_rows:
            rows[self.batch.num_tokens :] = value
        return rows
