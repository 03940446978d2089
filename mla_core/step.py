"""An engine step, planned on the host once and shared by all layers: what `MLA.prepare` returns.

Requests are split by phase; each phase becomes parts, a set of token rows with the kernel that serves them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mla_core.backend import MhaSegments, MqaSegments, RopeInputs
from mla_core.batch import Batch
from mla_core.cache.latent import LatentCache, SlotTargets
from mla_core.cache.pool import CachePool
from mla_core.errors import BatchError

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

    def every_segments(self) -> list[MqaSegments]:
        return [self.segments]


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

    def every_segments(self) -> list[MhaSegments]:
        return [self.own, *(chunk.segments for chunk in self.chunks)]


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
    # Graph steps only: which rows are padding, [T] bool, refreshed in place.
    padding_T: Tensor | None = None

    def cache_of(self, layer: MLA) -> LatentCache:
        """The cache of one layer."""
        return self.cache.layer(layer.layer_idx) if isinstance(self.cache, CachePool) else self.cache

    def zero_padding(self, rows: Tensor, value: float = 0.0) -> Tensor:
        """Rows beyond the live tokens become 0 (or `value`), whatever flowed into them."""
        if self.padding_T is not None:
            return rows.masked_fill_(self.padding_T.view(-1, *(1 for _ in rows.shape[1:])), value)
        if self.batch.num_tokens < self.batch.num_rows:
            rows[self.batch.num_tokens :] = value
        return rows


# What a graph step keeps when it is refreshed.
_KEPT = ("cache", "signature", "kernel", "meta")


def copy_into(target: Any, source: Any, name: str = "step") -> None:
    """Copy a planned step into another one: tensors in place, host mirrors by value, through nested records.

    Raises BatchError when a tensor has another shape.
    """
    for item in fields(target):
        old, new = getattr(target, item.name), getattr(source, item.name)
        if item.name in _KEPT:
            continue
        if isinstance(old, Tensor):
            if old.shape != new.shape:
                raise BatchError(
                    f"{name}.{item.name} has shape {list(new.shape)}, but the graph step was prepared with "
                    f"{list(old.shape)}; pad every batch to the same max_tokens, max_requests and table width"
                )
            old.copy_(new)
        elif item.name == "parts":
            for old_part, new_part in zip(old, new, strict=True):
                copy_into(old_part, new_part, "segments")
        elif is_dataclass(old):
            copy_into(old, new, item.name)
        else:
            object.__setattr__(target, item.name, new)
