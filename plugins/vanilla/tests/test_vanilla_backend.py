"""The vanilla kernels under the backend contract: ragged segments, canaries around outputs, hostile caches.

Legend: T query rows, S keys, H heads, E = N + R, X = L + R, L latent, V value.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mla_vanilla.backend as module
from mla_core import LatentCache, LayerContext, LayerRequest, MhaSegments, MqaSegments
from mla_core.cache import layout_for
from mla_core.errors import UnsupportedError
from mla_core.request import DeviceInfo
from mla_vanilla.backend import Vanilla

HEADS, LATENT, NOPE, ROPE, VALUE, SCALE, PAGE = 3, 8, 5, 2, 4, 0.41, 4
LAYOUT = layout_for("fp32", torch.float32, LATENT, ROPE)


def backend(**changes: object) -> Vanilla:
    dims = {"heads": HEADS, "latent": LATENT, "nope": NOPE, "rope": ROPE, "value": VALUE, "max_query_len": 16}
    fields = {"device": DeviceInfo(kind="cpu"), "dtype": "float32", "layout": "fp32", **dims, **changes}
    kernels = frozenset({"mha_prefill", "mqa_decode", "mqa_prefill"})
    return Vanilla(
        LayerContext(LayerRequest(**fields), kernels, {}, SCALE, torch.device("cpu"), torch.float32)
    )


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def attend_one(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """One request in float64: q [T, H, .], k and v [S, H, .]."""
    scores = SCALE * torch.einsum("the,she->hts", q.double(), k.double())
    if causal:
        rows, keys = scores.shape[1:]
        scores = scores.masked_fill(
            torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1), -torch.inf
        )
    lse = scores.logsumexp(dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], -torch.inf)
    shares = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None])
    return torch.einsum("hts,shv->thv", shares, v.double()), lse.T


def framed(*shape: int) -> tuple[Tensor, Tensor]:
    """(an output full of NaN inside a larger tensor, the whole with canaries around it)."""
    whole = torch.full([size + 2 for size in shape], 123.0)
    inside = whole[tuple(slice(1, 1 + size) for size in shape)]
    inside.fill_(torch.nan)
    return inside, whole


def canaries_alive(inside: Tensor, whole: Tensor) -> bool:
    kept = whole.clone()
    kept[tuple(slice(1, 1 + size) for size in inside.shape)] = 123.0
    return bool((kept == 123.0).all())


def check(found: tuple[Tensor, Tensor], wanted: list[tuple[Tensor, Tensor]]) -> float:
    """Worst difference; equal infinities do not differ."""
    outs, lses = torch.cat([out for out, _ in wanted]), torch.cat([lse for _, lse in wanted])
    pairs = ((found[0], outs), (found[1], lses))
    differences = [torch.where(a == b, 0.0, a.double() - b).abs().nan_to_num(nan=torch.inf) for a, b in pairs]
    return max(float(d.max()) if d.numel() else 0.0 for d in differences)


def run_mha(queries: list[int], keys: list[int], causal: bool, scale: float = SCALE) -> float:
    q = torch.randn(sum(queries), HEADS, NOPE + ROPE)
    k, v = torch.randn(sum(keys), HEADS, NOPE + ROPE), torch.randn(sum(keys), HEADS, VALUE)
    out, whole = framed(sum(queries), HEADS, VALUE)
    lse, lse_whole = framed(sum(queries), HEADS)
    segments = MhaSegments(starts(queries), starts(keys), tuple(queries), tuple(keys), causal)
    kernel = backend()
    segments.meta = kernel.prepare("mha", segments, LatentCache.allocate(LAYOUT, 1, PAGE, "cpu").geometry)
    kernel.mha(q, k, v, segments, scale, out, lse)
    assert canaries_alive(out, whole)
    assert canaries_alive(lse, lse_whole)
    wanted = [
        attend_one(*part, causal) for part in zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    ]
    return check((out, lse), wanted)


RAGGED = {
    "one": ([4], [4]),
    "several": ([3, 1, 5], [3, 6, 5]),
    "no_queries": ([0, 2, 0], [3, 2, 0]),
    "no_keys": ([2, 3, 1], [0, 4, 0]),
    "nothing": ([0], [0]),
    "more_queries_than_keys": ([5, 4], [2, 1]),
}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", RAGGED)
def test_expanded_attention_of_ragged_requests_matches_float64(lengths, causal):
    torch.manual_seed(0)
    assert run_mha(*RAGGED[lengths], causal) < 1e-5


def test_a_scale_one_percent_off_is_noticed():
    torch.manual_seed(0)
    assert run_mha([3, 2], [3, 6], True, 1.01 * SCALE) > 1e-3


@dataclass
class Paged:
    """Requests in a cache whose other memory is NaN, with queries for each."""

    cache: LatentCache
    table: Tensor
    rows: list[Tensor]
    queries: list[int]
    q_THX: Tensor

    @classmethod
    def make(cls, queries: list[int], keys: list[int], seed: int = 0, page: int = PAGE) -> Paged:
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-length // page) for length in keys]
        order = torch.randperm(sum(needed) + 2, generator=generator).tolist()
        cache = LatentCache.allocate(LAYOUT, len(order), page, "cpu")
        cache.data.fill_(torch.nan)
        width = max(needed, default=0) + 2
        table = torch.full((len(keys), width), 2**31 - 1, dtype=torch.int32)
        rows = [torch.randn(length, LATENT + ROPE, generator=generator) for length in keys]
        for b, length in enumerate(keys):
            pages = torch.tensor([order.pop() for _ in range(needed[b])], dtype=torch.int64)
            table[b, : needed[b]] = pages
            where = torch.arange(length)
            cache.write(pages[where // page] * page + where % page, rows[b][:, :LATENT], rows[b][:, LATENT:])
        q_THX = torch.randn(sum(queries), HEADS, LATENT + ROPE, generator=generator)
        return cls(cache, table, rows, queries, q_THX)

    def run(self, causal: bool = True, scale: float = SCALE) -> tuple[Tensor, Tensor]:
        keys = tuple(len(rows) for rows in self.rows)
        lengths = torch.tensor(keys, dtype=torch.int32)
        segments = MqaSegments(starts(self.queries), lengths, self.table, tuple(self.queries), keys, causal)
        kernel = backend()
        segments.meta = kernel.prepare("mqa_prefill", segments, self.cache.geometry)
        out, whole = framed(len(self.q_THX), HEADS, LATENT)
        lse, lse_whole = framed(len(self.q_THX), HEADS)
        kernel.mqa(self.q_THX, self.cache, segments, scale, out, lse)
        assert canaries_alive(out, whole)
        assert canaries_alive(lse, lse_whole)
        return out, lse

    def error(self, causal: bool = True, scale: float = SCALE) -> float:
        parts = zip(self.q_THX.split(self.queries), self.rows, strict=True)
        shared = [(q, rows[:, None].expand(-1, HEADS, -1)) for q, rows in parts]
        wanted = [attend_one(q, rows, rows[..., :LATENT], causal) for q, rows in shared]
        return check(self.run(causal, scale), wanted)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("lengths", RAGGED)
def test_absorbed_attention_of_ragged_requests_matches_float64(lengths, causal):
    assert Paged.make(*RAGGED[lengths]).error(causal) < 1e-5


@settings(max_examples=40)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), min_size=1, max_size=7),
    page=st.integers(1, 6),
    causal=st.booleans(),
    gathered=st.sampled_from([1, 500, 1 << 22]),
)
def test_any_mix_of_lengths_groups_and_pieces_matches_float64(lengths, page, causal, gathered):
    queries, keys = [q for q, _ in lengths], [k for _, k in lengths]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module._MAX_GATHERED, "cpu", gathered)
        assert Paged.make(queries, keys, page=page).error(causal) < 1e-5


@pytest.mark.parametrize("change", ["scale", "page", "newest_key"])
def test_faults_of_absorbed_attention_are_noticed(change):
    paged = Paged.make([1, 3], [9, 14])
    if change == "page":
        paged.table[:, 0] = paged.table[:, 1]
    if change == "newest_key":
        paged.rows = [rows.clone() for rows in paged.rows]
        paged.rows[0][-1] += 1.0
    assert paged.error(scale=1.01 * SCALE if change == "scale" else SCALE) > 1e-3


def test_lse_is_only_written_when_there_is_room_for_it():
    paged = Paged.make([1, 2], [3, 6])
    kernel, out = backend(), torch.empty(3, HEADS, LATENT)
    segments = MqaSegments(starts([1, 2]), torch.tensor([3, 6]), paged.table, (1, 2), (3, 6))
    segments.meta = kernel.prepare("mqa_decode", segments, paged.cache.geometry)
    kernel.mqa(paged.q_THX, paged.cache, segments, SCALE, out, None)
    torch.testing.assert_close(out, paged.run()[0])


def test_requests_of_similar_length_share_a_group_and_others_do_not():
    groups = module._similar([1, 1, 1, 0, 2], [100, 10, 110, 50, 100])
    assert sorted(map(sorted, groups)) == [[0, 2], [1], [4]]


@given(lengths=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100)), max_size=8))
def test_every_request_with_queries_is_in_exactly_one_group(lengths):
    queries, keys = [q for q, _ in lengths], [k for _, k in lengths]
    groups = module._similar(queries, keys)
    assert sorted(b for group in groups for b in group) == [b for b, q in enumerate(queries) if q]
    for group in groups:
        assert len({queries[b] for b in group}) == 1
        assert max(keys[b] for b in group) <= module._MAX_PADDING * min(keys[b] for b in group)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "unheard_of"}, "layout: wanted unheard_of"),
        ({"device": DeviceInfo.parse("cuda:sm_90"), "layout": "nope"}, "layout: wanted nope"),
        ({"cuda_graph": "full"}, "cuda_graph: wanted full"),
        ({"layout": "fp8_ds_mla"}, "latent: wanted 8, offered 512"),
    ],
    ids=["layout", "cuda", "graph", "width"],
)
def test_the_constructor_refuses_what_the_manifest_does_not_offer(changes, message):
    with pytest.raises(UnsupportedError, match=f"(?s)'vanilla' does not support.*{message}"):
        backend(**changes)


def test_prepare_refuses_a_page_size_that_the_layout_does_not_have():
    kernel = backend(layout="nvfp4", latent=16, rope=16)
    layout = layout_for("nvfp4", torch.float32, 16, 16)
    geometry = LatentCache.allocate(layout, 1, 64, "cpu").geometry
    segments = MqaSegments(starts([1]), torch.tensor([1]), torch.zeros(1, 1, dtype=torch.int32), (1,), (1,))
    kernel.prepare("mqa_decode", segments, geometry)
    other = type(geometry)(geometry.layout, 32, 2, geometry.device)
    with pytest.raises(UnsupportedError, match="page_size: wanted 32, offered 64"):
        kernel.prepare("mqa_decode", segments, other)
