"""The liars' kernels: request by request in plain torch, with one fault each.

Legend: T query rows, S keys, H heads, L latent, R rope, X = L + R.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any, ClassVar

import torch
from torch import Tensor

from mla_core import BackendInfo, CacheGeometry, LatentCache, LayerContext, MqaSegments, UnsupportedError
from mla_core.request import Reason
from mla_liars import manifest

__all__ = ["Honest"]


class Honest:
    """Absorbed decode that refuses what its manifest does not offer."""

    manifest: ClassVar[BackendInfo] = manifest.HONEST
    # Declarations that the constructor accepts besides its own.
    allows: ClassVar[dict[str, Any]] = {}

    def __init__(self, context: LayerContext) -> None:
        self.context, self.latent = context, context.request.latent
        self.info = self.accepted()
        context.require(self.info)

    def accepted(self) -> BackendInfo:
        offered = self.manifest.capabilities.model_dump() | self.allows
        return self.manifest.model_copy(
            update={"capabilities": type(self.manifest.capabilities).model_validate(offered)}
        )

    def prepare(self, kernel: str, segments: Any, geometry: CacheGeometry) -> None:
        self.context.require(self.info, page_size=geometry.page_size)

    def mqa(
        self,
        q_THX: Tensor,
        cache: LatentCache,
        segments: MqaSegments,
        scale: float,
        out_THL: Tensor,
        lse_TH: Tensor | None,
    ) -> None:
        row = 0
        for request, (queries, keys) in enumerate(zip(segments.query_lens, segments.key_lens, strict=True)):
            key_SX = self.rows(cache, segments, request, keys)
            for t in range(queries):
                seen = self.seen(keys, queries, t, segments.causal)
                values, lse = self.attend(q_THX[row], key_SX[:seen], key_SX[:seen, : self.latent], scale)
                self.store(out_THL, row, values)
                if lse_TH is not None:
                    lse_TH[row] = lse
                row += 1

    def rows(self, cache: LatentCache, segments: MqaSegments, request: int, keys: int) -> Tensor:
        return torch.cat(cache.read(segments.block_table[request], keys, torch.float32), dim=-1)

    def seen(self, keys: int, queries: int, t: int, causal: bool) -> int:
        return keys - (queries - 1 - t if causal else 0)

    def attend(self, q_HX: Tensor, key_SX: Tensor, value_SL: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        scores_HS = q_HX.float() @ key_SX.T * scale
        lse_H = scores_HS.logsumexp(dim=-1)
        return torch.exp(scores_HS - lse_H.nan_to_num(neginf=0.0)[:, None]) @ value_SL, lse_H

    def store(self, out: Tensor, row: int, values: Tensor) -> None:
        out[row] = values.to(out.dtype)


class OverClaimer(Honest):
    """Wrong at the largest number of heads that it declares."""

    manifest = manifest.OVER_CLAIMER

    def attend(self, q_HX: Tensor, key_SX: Tensor, value_SL: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        values, lse = super().attend(q_HX, key_SX, value_SL, scale)
        return (values * 0.9 if len(q_HX) == 8 else values), lse


class UnderClaimer(Honest):
    """Right in bfloat16, which it does not declare."""

    manifest = manifest.UNDER_CLAIMER
    allows: ClassVar[dict[str, Any]] = {"dtypes": {"float32", "bfloat16"}}


class SilentAcceptor(UnderClaimer):
    """Takes bfloat16, which it does not declare, and answers nonsense."""

    manifest = manifest.SILENT_ACCEPTOR

    def store(self, out: Tensor, row: int, values: Tensor) -> None:
        out[row] = 0.0 if out.dtype == torch.bfloat16 else values


class Crasher(UnderClaimer):
    """Ends the process when it gets bfloat16."""

    manifest = manifest.CRASHER

    def store(self, out: Tensor, row: int, values: Tensor) -> None:
        if out.dtype == torch.bfloat16:
            os.abort()
        super().store(out, row, values)


class Hanger(UnderClaimer):
    """Never comes back from bfloat16."""

    manifest = manifest.HANGER

    def store(self, out: Tensor, row: int, values: Tensor) -> None:
        while out.dtype == torch.bfloat16:
            time.sleep(1)
        super().store(out, row, values)


class Raiser(UnderClaimer):
    """Refuses bfloat16 with the wrong kind of exception."""

    manifest = manifest.RAISER

    def store(self, out: Tensor, row: int, values: Tensor) -> None:
        if out.dtype == torch.bfloat16:
            raise AssertionError("no bfloat16")
        super().store(out, row, values)


class VagueRefuser(UnderClaimer):
    """Refuses bfloat16 without saying that the dtype is the reason."""

    manifest = manifest.VAGUE_REFUSER

    def __init__(self, context: LayerContext) -> None:
        super().__init__(context)
        if context.dtype == torch.bfloat16:
            raise UnsupportedError(self.info.name, [Reason(field="heads", wanted="3", offered="other")])


class LateRefuser(UnderClaimer):
    """Refuses bfloat16 properly, but after writing into the output."""

    manifest = manifest.LATE_REFUSER

    def store(self, out: Tensor, row: int, values: Tensor) -> None:
        super().store(out, row, values)
        if out.dtype == torch.bfloat16:
            reason = Reason(field="dtype", wanted="bfloat16", offered="float32")
            raise UnsupportedError(self.info.name, [reason])


class OutsideWriter(Honest):
    """Also writes the row after the last one."""

    manifest = manifest.OUTSIDE_WRITER

    def store(self, out: Tensor, row: int, values: Tensor) -> None:
        super().store(out, row, values)
        width = out.shape[1] * out.shape[2]
        beyond = out.as_strided((width,), (1,), out.storage_offset() + out.numel())
        beyond.zero_()


class Mutator(Honest):
    """Scales its queries in place."""

    manifest = manifest.MUTATOR

    def attend(self, q_HX: Tensor, key_SX: Tensor, value_SL: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        q_HX.mul_(scale)
        return super().attend(q_HX, key_SX, value_SL, 1.0)


class WrongBase(Honest):
    """lse in base 2."""

    manifest = manifest.WRONG_BASE

    def attend(self, q_HX: Tensor, key_SX: Tensor, value_SL: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        values, lse = super().attend(q_HX, key_SX, value_SL, scale)
        return values, lse / math.log(2)


class PageTruster(Honest):
    """Multiplies whole pages, so that garbage beyond the last token comes in as 0 * garbage."""

    manifest = manifest.PAGE_TRUSTER

    def rows(self, cache: LatentCache, segments: MqaSegments, request: int, keys: int) -> Tensor:
        whole = -(-keys // cache.page_size) * cache.page_size
        rows = super().rows(cache, segments, request, whole)
        return rows[:keys] + 0.0 * rows.sum(dim=0)


class NeighbourReader(Honest):
    """Multiplies the last request's rows by 0 and adds them, as a kernel does that masks a tile too late."""

    manifest = manifest.NEIGHBOUR_READER

    def rows(self, cache: LatentCache, segments: MqaSegments, request: int, keys: int) -> Tensor:
        rows = super().rows(cache, segments, request, keys)
        before = max(request - 1, 0)
        return rows + 0.0 * super().rows(cache, segments, before, segments.key_lens[before]).sum(dim=0)


class FutureSeer(Honest):
    """Draft tokens see each other's future."""

    manifest = manifest.FUTURE_SEER

    def seen(self, keys: int, queries: int, t: int, causal: bool) -> int:
        return keys


class DiceRoller(Honest):
    """Declares determinism and rounds at random."""

    manifest = manifest.DICE_ROLLER

    def attend(self, q_HX: Tensor, key_SX: Tensor, value_SL: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(key_SX))
        return super().attend(q_HX * (1 + 1e-7 * int(order[0])), key_SX[order], value_SL[order], scale)


class Decliner(Honest):
    """Can do bfloat16, and says that it does not offer it."""

    manifest = manifest.DECLINER

    def accepted(self) -> BackendInfo:
        offered = self.manifest.capabilities.model_copy(update={"declined": ()})
        return self.manifest.model_copy(update={"capabilities": offered})


class LimitBreaker(Honest):
    """Declares a limit across fields and does not hold to it."""

    manifest = manifest.LIMIT_BREAKER

    def accepted(self) -> BackendInfo:
        offered = self.manifest.capabilities.model_copy(update={"limits": ()})
        return self.manifest.model_copy(update={"capabilities": offered})


class Limited(Honest):
    """Holds to a limit across fields."""

    manifest = manifest.LIMITED


class Needy(Honest):
    """Needs a package that is not here."""

    manifest = manifest.NEEDY
