"""What every layout owes: values within half a step, bytes only where asked, strided tensors, saturation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mla_core.cache import LatentCache, Scales, layout_for
from tests.byte_rows import E2M1, Page, cached_rows, e4m3_value, half_step, token_row

E4M3 = [e4m3_value(code) for code in range(127)]
QUANTISED = ["fp8_e4m3", "fp8_ds_mla", "nvfp4", "nvfp4_rope_bf16", "idx_fp8"]
EVERY = ["fp32", "fp16", "bf16", *QUANTISED]
SCALES = Scales(k_scale=0.03, global_scale=0.002)


def new_cache(layout_id: str, num_pages: int = 3, scales: Scales = SCALES) -> LatentCache:
    latent, rope = (128, 0) if layout_id == "idx_fp8" else (512, 64)
    layout = layout_for(layout_id, torch.float32, latent, rope)
    return LatentCache.allocate(layout, num_pages, 64, "cpu", scales=scales)


def rows(cache: LatentCache, tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, cache.layout.width, generator=generator)
    return x[:, : cache.layout.latent], x[:, cache.layout.latent :]


def raw_bytes(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.uint8).clone()


def bf16_half_step(x: float) -> float:
    """bf16 has 8 significant bits."""
    return math.ldexp(1.0, math.frexp(x)[1] - 9)


def allowed(layout_id: str, row: list[float], scales: list[float]) -> list[float]:
    """Half a quantisation step of each value, given the scale it was stored with (0: stored as bf16)."""
    table = E2M1 if layout_id.startswith("nvfp4") else E4M3
    return [
        half_step(table, x / scale) * scale if scale else bf16_half_step(x)
        for x, scale in zip(row, scales, strict=True)
    ]


def stored_scales(cache: LatentCache, raw: bytes, offset: int) -> list[float]:
    """The scale of each value of a token, from the page's bytes."""
    layout, data = cache.layout, torch.tensor(list(raw), dtype=torch.uint8)
    if layout.id == "fp8_e4m3":
        return [cache.scales.k_scale] * layout.width
    if layout.id == "fp8_ds_mla":
        tiles = data[offset * 656 + 512 : offset * 656 + 528].clone().view(torch.float32).tolist()
        return [tiles[i // 128] for i in range(512)] + [0.0] * 64
    if layout.id == "idx_fp8":
        start = 64 * 128 + 4 * offset
        return data[start : start + 4].clone().view(torch.float32).tolist() * 128
    groups, before = (36, 288) if layout.id == "nvfp4" else (32, 256 + 128)
    start = 64 * before + groups * offset
    found = [e4m3_value(byte) * cache.scales.global_scale for byte in raw[start : start + groups]]
    return [found[i // 16] for i in range(16 * groups)] + [0.0] * (layout.width - 16 * groups)


@pytest.mark.parametrize("layout_id", QUANTISED)
def test_values_come_back_within_half_a_quantisation_step(layout_id):
    cache = new_cache(layout_id)
    latent, rope = rows(cache, 6)
    cache.write(torch.arange(6), latent, rope)
    raw = bytes(raw_bytes(cache.data[0]).flatten().tolist())
    decoded = torch.cat(cache.read(torch.tensor([0]), 6), dim=1)
    for token, row in enumerate(torch.cat([latent, rope], dim=1).tolist()):
        bounds = allowed(layout_id, row, stored_scales(cache, raw, token))
        errors = [abs(a - b) for a, b in zip(decoded[token].tolist(), row, strict=True)]
        worst = max(error - bound * (1 + 1e-4) - 1e-6 for error, bound in zip(errors, bounds, strict=True))
        assert worst <= 0, f"token {token} is {worst} beyond half a step"


@pytest.mark.parametrize("layout_id", QUANTISED)
def test_values_moved_by_one_percent_are_beyond_half_a_step(layout_id):
    cache = new_cache(layout_id)
    latent, rope = rows(cache, 1)
    cache.write(torch.arange(1), latent, rope)
    raw = bytes(raw_bytes(cache.data[0]).flatten().tolist())
    row, decoded = torch.cat([latent, rope], dim=1)[0], torch.cat(cache.read(torch.tensor([0]), 1), dim=1)[0]
    bounds = torch.tensor(allowed(layout_id, row.tolist(), stored_scales(cache, raw, 0)))
    assert ((1.01 * decoded - row).abs() > bounds * (1 + 1e-4) + 1e-6).any()


@pytest.mark.parametrize("layout_id", EVERY)
def test_reading_agrees_with_a_reader_of_bytes(layout_id):
    cache = new_cache(layout_id)
    cache.write(torch.arange(64, 74), *rows(cache, 10))
    expected = torch.cat(cached_rows(cache, [1], 10), dim=1)
    read = torch.cat(cache.read(torch.tensor([1]), 10, torch.float32), dim=1)
    assert torch.allclose(read.double(), expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("layout_id", EVERY)
def test_reading_every_possible_byte_agrees_with_a_reader_of_bytes(layout_id):
    cache = new_cache(layout_id, num_pages=1)
    layout = cache.layout
    raw = torch.randint(256, (64 * layout.bytes_per_token,), generator=torch.Generator().manual_seed(0))
    cache.data.view(torch.uint8).view(-1).copy_(raw)
    page = Page(bytes(raw.tolist()), 64, layout.latent, layout.rope, SCALES.k_scale, SCALES.global_scale)
    expected = torch.tensor([token_row(layout.id, page, token) for token in range(64)], dtype=torch.float64)
    read = torch.cat(cache.read(torch.tensor([0]), 64, torch.float32), dim=1)
    assert torch.allclose(read, expected.float(), rtol=1e-6, atol=1e-45, equal_nan=True)


@pytest.mark.parametrize("layout_id", EVERY)
def test_writing_touches_only_the_slots_it_is_given(layout_id):
    cache = new_cache(layout_id)
    cache.data.view(torch.uint8).fill_(0xA5)
    latent, rope = rows(cache, 4)
    cache.write(torch.tensor([70, -1, 129, 0]), latent, rope)
    written = cache.layout.read(cache.data, torch.tensor([1, 2, 0]), torch.tensor([6, 1, 0]))
    again = new_cache(layout_id)
    again.data.view(torch.uint8).fill_(0xA5)
    again.layout.write(again.data, torch.tensor([1, 2, 0]), torch.tensor([6, 1, 0]), written)
    assert torch.equal(raw_bytes(again.data), raw_bytes(cache.data))
    assert int((raw_bytes(cache.data) != 0xA5).sum()) <= 3 * cache.bytes_per_token


@pytest.mark.parametrize("layout_id", EVERY)
def test_gathering_pages_gives_their_tokens_rows_in_order(layout_id):
    cache = new_cache(layout_id)
    cache.write(torch.arange(192), *rows(cache, 192))
    gathered = cache.layout.gather_pages(cache.data, torch.tensor([2, 0]))
    offsets = torch.arange(64)
    for index, page in enumerate((2, 0)):
        single = cache.layout.read(cache.data, torch.full((64,), page), offsets)
        assert torch.equal(raw_bytes(gathered[index]), raw_bytes(single))


@pytest.mark.parametrize("layout_id", EVERY)
def test_a_cache_may_be_every_second_page_of_a_larger_tensor(layout_id):
    plain = new_cache(layout_id)
    shape = (6, *plain.data.shape[1:])
    whole = torch.zeros(shape, dtype=torch.uint8 if plain.data.element_size() == 1 else plain.data.dtype)
    whole.view(torch.uint8).fill_(0x5A)
    strided = LatentCache.from_tensor(whole.view(plain.data.dtype)[::2], plain.layout, 64, scales=SCALES)
    for cache in (plain, strided):
        cache.write(torch.arange(192), *rows(cache, 192))
    assert torch.equal(raw_bytes(strided.data), raw_bytes(plain.data))
    assert (whole[1::2].contiguous().view(torch.uint8) == 0x5A).all()


@pytest.mark.parametrize("layout_id", EVERY)
def test_no_tokens_change_nothing_and_read_as_nothing(layout_id):
    cache = new_cache(layout_id)
    before = raw_bytes(cache.data)
    cache.write(torch.tensor([], dtype=torch.int64), *rows(cache, 0))
    assert torch.equal(raw_bytes(cache.data), before)
    assert cache.read(torch.tensor([0]), 0)[0].shape == (0, cache.layout.latent)


@pytest.mark.parametrize("layout_id", QUANTISED)
@pytest.mark.parametrize("x", [1e30, -math.inf])
def test_writers_saturate_instead_of_writing_what_reads_as_nan(layout_id, x):
    cache = new_cache(layout_id)
    latent, rope = rows(cache, 1)
    latent[0, 3] = x
    cache.write(torch.tensor([0]), latent, rope)
    read = cache.read(torch.tensor([0]), 1)[0]
    assert read.isfinite().all()
    assert abs(read[0, 3]) == read.abs().max() > 0
    assert torch.sign(read[0, 3]) == math.copysign(1, x)


@pytest.mark.parametrize("layout_id", QUANTISED)
def test_a_nan_is_not_hidden(layout_id):
    cache = new_cache(layout_id)
    latent, rope = rows(cache, 1)
    latent[0, 3] = math.nan
    cache.write(torch.tensor([0]), latent, rope)
    assert cache.read(torch.tensor([0]), 1)[0][0, 3].isnan()


@pytest.mark.parametrize("layout_id", EVERY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_rows_write_the_same_bytes_as_their_float32_values(layout_id, dtype):
    halves, floats = new_cache(layout_id), new_cache(layout_id)
    latent, rope = (part.to(dtype) for part in rows(halves, 5))
    halves.write(torch.arange(5), latent, rope)
    floats.write(torch.arange(5), latent.float(), rope.float())
    assert torch.equal(raw_bytes(halves.data), raw_bytes(floats.data))


@pytest.mark.parametrize("layout_id", EVERY)
def test_rows_may_be_strided_views(layout_id):
    plain, strided = new_cache(layout_id), new_cache(layout_id)
    latent, rope = rows(plain, 5)
    plain.write(torch.arange(5), latent.contiguous(), rope.contiguous())
    whole = torch.cat([rope, latent], dim=1).repeat_interleave(2, dim=0)[::2]
    strided.write(torch.arange(5), whole[:, rope.shape[1] :], whole[:, : rope.shape[1]])
    assert torch.equal(raw_bytes(plain.data), raw_bytes(strided.data))


@pytest.mark.parametrize("part", ["latent", "rope"])
@pytest.mark.parametrize("layout_id", ["fp8_e4m3", "nvfp4"])
def test_calibrated_scales_cover_the_largest_value_of_latent_and_rope(layout_id, part):
    cache = new_cache(layout_id)
    latent, rope = rows(cache, 8)
    (latent if part == "latent" else rope)[2, 5] = -70000.0
    scales = cache.layout.calibrate(latent, rope)
    covered = new_cache(layout_id, scales=scales)
    covered.write(torch.arange(8), latent, rope)
    read = dict(zip(("latent", "rope"), covered.read(torch.tensor([0]), 8), strict=True))
    assert read[part][2, 5].item() == pytest.approx(-70000.0, rel=1e-3)


@pytest.mark.parametrize("layout_id", ["fp8_e4m3", "nvfp4"])
def test_scales_calibrated_on_the_latent_alone_would_clip_the_rope(layout_id):
    cache = new_cache(layout_id)
    latent, rope = rows(cache, 8)
    rope[2, 5] = -70000.0
    scales = cache.layout.calibrate(latent, rope[:0])
    clipped = new_cache(layout_id, scales=scales)
    clipped.write(torch.arange(8), latent, rope)
    assert clipped.read(torch.tensor([0]), 8)[1][2, 5].item() > -100.0


@pytest.mark.parametrize("layout_id", EVERY)
def test_calibrating_on_zeros_gives_scales_of_one(layout_id):
    cache = new_cache(layout_id)
    latent, rope = (torch.zeros_like(part) for part in rows(cache, 2))
    assert cache.layout.calibrate(latent, rope) == Scales()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(("latent", "rope"), [(16, 16), (48, 32), (16, 0), (256, 32), (256, 64)])
@pytest.mark.parametrize("layout_id", ["fp8_e4m3", "nvfp4", "nvfp4_rope_bf16"])
def test_rows_of_other_widths_agree_with_a_reader_of_bytes(layout_id, latent, rope, tokens):
    """A row of nvfp4_rope_bf16 may have an odd number of bytes."""
    layout = layout_for(layout_id, torch.float32, latent, rope)
    cache = LatentCache.allocate(layout, 2, 64, "cpu", scales=SCALES)
    cache.write(torch.arange(64, 64 + tokens), *rows(cache, tokens))
    expected = torch.cat(cached_rows(cache, [1], tokens), dim=1)
    read = torch.cat(cache.read(torch.tensor([1]), tokens, torch.float32), dim=1)
    assert torch.allclose(read.double(), expected, rtol=1e-6, atol=0.0)
