"""Cache writes: an owned append touches its slots and nothing else, and writes what the layout would.

Legend: T tokens, H heads, L latent, R rope.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mla_core.backend import RopeInputs
from mla_core.cache.latent import LatentCache, SlotTargets
from mla_core.conformance.bench import Bench, Unavailable, Wrong
from mla_core.conformance.guard import Watched
from mla_core.conformance.layers import LayerRun, forms
from mla_core.conformance.scenes import new_cache
from mla_core.errors import CacheError

__all__ = ["append", "round_trip", "untargeted_slots"]

_TOKENS, _NUM_PAGES = 9, 6


@dataclass(frozen=True, eq=False)
class _Rows:
    latent_TL: Tensor
    k_rope_TR: Tensor
    q_rope_THR: Tensor


def append(bench: Bench) -> None:
    """Tokens with and without a slot; every other byte stays, and the rows decode to what they were."""
    rows = _random_rows(bench, 1.0)
    _check_append(bench, rows)


def round_trip(bench: Bench) -> None:
    """The same with values that are large, tiny and zero."""
    for size in (0.0, 1e-4, 300.0):
        _check_append(bench, _random_rows(bench, size))


def untargeted_slots(bench: Bench) -> None:
    """A layer's steps write the slots of their live tokens and no other byte; padded rows write nowhere."""
    for form in forms(bench):
        run = LayerRun(bench, form=form)
        _step_writes_only_its_slots(run, [(0, 5), (1, 3)])
        _step_writes_only_its_slots(run, [(0, 1), (1, 1)])


def _step_writes_only_its_slots(run: LayerRun, counts: list[tuple[int, int]]) -> None:
    tokens = sum(count for _, count in counts)
    batch = run.batch(counts, max_tokens=tokens + 3, max_requests=len(counts) + 1)
    before = run.cache.data.clone()
    hidden = torch.randn(tokens + 3, run.config.hidden_size).to(run.dtype).to(run.cache.data.device)
    run.layer(hidden, run.layer.prepare(batch, run.cache))
    for request, count in counts:
        run.done[request] += count
    # Worked out here and not by the core's own splitting, which is on trial too.
    live = batch.slot_mapping[batch.slot_mapping >= 0]
    where = live // run.page_size, live % run.page_size
    restored, layout = run.cache.data.clone(), run.cache.layout
    layout.write(restored, *where, layout.read(before, *where))
    if not torch.equal(restored.view(torch.uint8), before.view(torch.uint8)):
        raise Wrong("a step wrote into slots that are not its own")


def _random_rows(bench: Bench, size: float) -> _Rows:
    generator = torch.Generator().manual_seed(3)
    layer, dtype = bench.layer, getattr(torch, bench.layer.dtype)
    shapes = ((layer.latent,), (layer.rope,), (layer.heads, layer.rope))
    made = (size * torch.randn(_TOKENS, *shape, generator=generator) for shape in shapes)
    return _Rows(*(x.to(dtype).to(bench.device) for x in made))


def _check_append(bench: Bench, rows: _Rows) -> None:
    bench.backend  # noqa: B018  a refusal comes before anything is made
    page_size = bench.layer.page_size or 16
    try:
        cache = new_cache(bench.layer, _NUM_PAGES, page_size, bench.device)
    except CacheError as error:
        raise Unavailable(f"this core has no such cache: {error}") from error
    slots = _slots(page_size, bench.device)
    targets = SlotTargets.split(slots, cache.geometry)
    expected = _Rows(rows.latent_TL, *_call(bench, cache, targets, rows))
    _check_bytes(bench, cache, targets, expected)


def _slots(page_size: int, device: torch.device) -> Tensor:
    """Slots anywhere in the cache, -1 among them."""
    order = torch.randperm(_NUM_PAGES * page_size, generator=torch.Generator().manual_seed(4))
    slots = order.repeat(_TOKENS)[:_TOKENS].clone()
    # Fewer slots than tokens: each at most once.
    slots[len(order) :] = -1
    slots[2] = slots[6] = -1
    return slots.to(device)


def _call(bench: Bench, cache: LatentCache, targets: SlotTargets, rows: _Rows) -> tuple[Tensor, Tensor]:
    """Append, and return what the keys and queries should be afterwards."""
    if "rope" not in bench.owned:
        watched = Watched({"latent": rows.latent_TL, "k_rope": rows.k_rope_TR})
        bench.backend.append(cache, targets, rows.latent_TL, rows.k_rope_TR)
        if watched.changed():
            raise Wrong(f"changed its inputs: {', '.join(watched.changed())}")
        return rows.k_rope_TR, rows.q_rope_THR
    rope = _rope_inputs(bench)
    key, query = _rotated(rows.k_rope_TR.unsqueeze(1), rope).squeeze(1), _rotated(rows.q_rope_THR, rope)
    watched = Watched({"latent": rows.latent_TL, "cos": rope.cos_TF, "sin": rope.sin_TF})
    bench.backend.rope_append(cache, targets, rows.q_rope_THR, rows.latent_TL, rows.k_rope_TR, rope)
    if watched.changed():
        raise Wrong(f"changed its inputs: {', '.join(watched.changed())}")
    _check_close(bench, "rotated query", rows.q_rope_THR, query)
    return key, query


def _rope_inputs(bench: Bench) -> RopeInputs:
    positions = torch.arange(_TOKENS) + 11
    period = 100.0 ** (torch.arange(0, bench.layer.rope, 2) / max(bench.layer.rope, 1))
    angles = (positions.unsqueeze(1) / period).to(bench.device)
    return RopeInputs(bench.layer.rope_style, angles.cos(), angles.sin(), positions.to(bench.device))


def _rotated(x_THR: Tensor, rope: RopeInputs) -> Tensor:
    """The rotation in float64, rounded to the dtype."""
    cos, sin = rope.cos_TF.double().unsqueeze(1), rope.sin_TF.double().unsqueeze(1)
    x = x_THR.double()
    if rope.style == "interleaved":
        first, second = x[..., 0::2], x[..., 1::2]
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)
    elif rope.style == "half_split":
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    else:
        turned = x
    return turned.to(x_THR.dtype)


def _check_bytes(bench: Bench, cache: LatentCache, targets: SlotTargets, rows: _Rows) -> None:
    """Written rows decode as well as the core's own; every other byte is as it was."""
    own = new_cache(bench.layer, cache.num_pages, cache.page_size, bench.device)
    own.write_targets(targets, rows.latent_TL, rows.k_rope_TR)
    stored = (
        rows
        if targets.rows is None
        else _Rows(rows.latent_TL[targets.rows], rows.k_rope_TR[targets.rows], rows.q_rope_THR)
    )
    where = replace(targets, rows=None)
    for part, wanted in enumerate((stored.latent_TL, stored.k_rope_TR)):
        theirs, ours = (c.read_targets(where, torch.float32)[part].double() for c in (cache, own))
        allowed = 2 * (ours - wanted.double()).norm()
        allowed = allowed + (
            bench.tolerance.row * wanted.double().norm() if part and "rope" in bench.owned else 0
        )
        error = (theirs - wanted.double()).norm().nan_to_num(nan=torch.inf)
        if error > allowed:
            name = ("latent", "rope key")[part]
            raise Wrong(f"stored {name} rows are off by {float(error):.3g}, allowed {float(allowed):.3g}")
    layout = cache.layout
    restored = cache.data.clone()
    layout.write(restored, where.pages, where.offsets, layout.read(own.data, where.pages, where.offsets))
    if not torch.equal(restored.view(torch.uint8), own.data.view(torch.uint8)):
        raise Wrong("append wrote outside its slots")


def _check_close(bench: Bench, name: str, actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected.double()).norm().nan_to_num(nan=torch.inf)
    allowed = bench.tolerance.row * expected.double().norm()
    if error > allowed:
        raise Wrong(f"{name} is off by {float(error):.3g}, allowed {float(allowed):.3g}")
