"""Rows worked out by hand, byte for byte, written and read without the other direction's code."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from mla_core.cache import LatentCache, Layout, Scales, layout_for


def cache(layout_id: str, latent: int, rope: int, **scales: float) -> LatentCache:
    layout = layout_for(layout_id, torch.float32, latent, rope)
    return LatentCache.allocate(layout, 2, 64, "cpu", scales=Scales(**scales))


def sparse(width: int, **values: float) -> Tensor:
    """One row of zeros but for v0=..., v17=... ."""
    row = torch.zeros(1, width)
    for name, value in values.items():
        row[0, int(name[1:])] = value
    return row


def page_bytes(cache: LatentCache, page: int) -> list[int]:
    return cache.data[page].contiguous().view(torch.uint8).flatten().tolist()


def set_bytes(cache: LatentCache, page: int, changes: dict[int, int]) -> None:
    raw = cache.data[page].view(torch.uint8).view(-1)
    for position, byte in changes.items():
        raw[position] = byte


def nonzero(raw: list[int]) -> dict[int, int]:
    return {position: byte for position, byte in enumerate(raw) if byte}


def little_endian(code: str, value: float, at: int) -> dict[int, int]:
    return {at + i: byte for i, byte in enumerate(struct.pack(f"<{code}", value)) if byte}


def test_fp8_e4m3_stores_value_over_scale_latent_before_rope():
    written = cache("fp8_e4m3", 4, 2, k_scale=0.5)
    # Over 0.5: 1, -1.125, 448 (saturated from 500), 2^-9; then 3 and -240.
    latent, rope = torch.tensor([[0.5, -0.5625, 250.0, 2.0**-10]]), torch.tensor([[1.5, -120.0]])
    written.write(torch.tensor([64 + 3]), latent, rope)
    row = {0: 0x38, 1: 0xB9, 2: 0x7E, 3: 0x01, 4: 0x44, 5: 0xF7}
    assert nonzero(page_bytes(written, 1)) == {3 * 6 + i: byte for i, byte in row.items()}
    assert nonzero(page_bytes(written, 0)) == {}


def test_fp8_e4m3_reads_byte_times_scale():
    read = cache("fp8_e4m3", 4, 2, k_scale=0.5)
    set_bytes(read, 1, {18: 0x38, 19: 0xB9, 20: 0x7E, 21: 0x01, 22: 0x44, 23: 0xF7})
    latent, rope = read.read(torch.tensor([1]), 4)
    assert latent[3].tolist() == [0.5, -0.5625, 224.0, 2.0**-10]
    assert rope[3].tolist() == [1.5, -120.0]


# Tile 0 holds 448 (scale 1), tile 1 holds -7 (scale 1/64), tiles 2 and 3 are zeros (scale 2^-126).
DS_MLA_VALUES = {"v0": 448.0, "v1": 1.0, "v128": -7.0, "v255": 7 / 448}
DS_MLA_BYTES = {
    0: 0x7E,
    1: 0x38,
    128: 0xFE,
    255: 0x38,
    **little_endian("f", 1.0, 512),
    **little_endian("f", 1 / 64, 516),
    **little_endian("f", 2.0**-126, 520),
    **little_endian("f", 2.0**-126, 524),
    # bf16 1.0 at the first rope value, -2.5 at the last.
    529: 0x3F,
    528: 0x80,
    654: 0x20,
    655: 0xC0,
}


def test_fp8_ds_mla_stores_512_codes_4_scales_and_64_bf16_values():
    written = cache("fp8_ds_mla", 512, 64)
    written.write(torch.tensor([2]), sparse(512, **DS_MLA_VALUES), sparse(64, v0=1.0, v63=-2.5))
    assert nonzero(page_bytes(written, 0)) == {2 * 656 + i: byte for i, byte in DS_MLA_BYTES.items()}


def test_fp8_ds_mla_reads_code_times_the_scale_of_its_tile():
    read = cache("fp8_ds_mla", 512, 64)
    set_bytes(read, 0, {2 * 656 + i: byte for i, byte in DS_MLA_BYTES.items()})
    latent, rope = read.read(torch.tensor([0]), 3)
    assert torch.equal(latent[2:], sparse(512, **DS_MLA_VALUES))
    assert torch.equal(rope[2:], sparse(64, v0=1.0, v63=-2.5))


def test_fp8_ds_mla_reads_scales_that_are_no_powers_of_two():
    read = cache("fp8_ds_mla", 512, 64)
    set_bytes(read, 0, {384: 0x40, **little_endian("f", 0.3, 524)})
    assert read.read(torch.tensor([0]), 1)[0][0, 384] == 2 * torch.tensor(0.3)


def test_fp8_ds_mla_writes_powers_of_two_when_asked():
    written = cache("fp8_ds_mla", 512, 64, power_of_two=True)
    written.write(torch.tensor([0]), sparse(512, v0=449.0, v128=3.0), torch.zeros(1, 64))
    scales = struct.unpack("<4f", bytes(page_bytes(written, 0)[512:528]))
    assert scales == (2.0, 2.0**-7, 2.0**-126, 2.0**-126)


# Token 5: a group with largest 12 (scale 2), one of zeros (2^-9), ..., the first rope group with -3 (0.5).
NVFP4_LATENT, NVFP4_ROPE = {"v0": 12.0, "v1": -1.0, "v511": 6.0}, {"v1": -3.0}


def nvfp4_bytes(data_at: int, scales_at: int, groups: int) -> dict[int, int]:
    """Bytes of token 5's latent: codes 7 and 9 in byte 0; 7 in the high nibble of byte 255; its scales."""
    scales = {**dict.fromkeys(range(groups), 0x01), 0: 0x40, 31: 0x38}
    codes = {data_at: 0x97, data_at + 255: 0x70}
    return codes | {scales_at + group: byte for group, byte in scales.items()}


def test_nvfp4_stores_a_plane_of_pairs_and_a_plane_of_scales():
    written = cache("nvfp4", 512, 64, global_scale=1.0)
    written.write(torch.tensor([5]), sparse(512, **NVFP4_LATENT), sparse(64, **NVFP4_ROPE))
    data_at, scales_at = 5 * 288, 64 * 288 + 5 * 36
    expected = nvfp4_bytes(data_at, scales_at, 36) | {data_at + 256: 0xF0, scales_at + 32: 0x30}
    assert nonzero(page_bytes(written, 0)) == expected


def test_nvfp4_reads_code_times_group_scale_times_global_scale():
    read = cache("nvfp4", 512, 64, global_scale=0.25)
    data_at, scales_at = 5 * 288, 64 * 288 + 5 * 36
    set_bytes(read, 0, nvfp4_bytes(data_at, scales_at, 36) | {data_at + 256: 0xF0, scales_at + 32: 0x30})
    latent, rope = read.read(torch.tensor([0]), 6)
    assert torch.equal(4 * latent[5:], sparse(512, **NVFP4_LATENT))
    assert torch.equal(4 * rope[5:], sparse(64, **NVFP4_ROPE))


def test_nvfp4_rope_bf16_stores_planes_of_pairs_rope_and_scales():
    written = cache("nvfp4_rope_bf16", 512, 64)
    written.write(torch.tensor([5]), sparse(512, **NVFP4_LATENT), sparse(64, **NVFP4_ROPE))
    rope_at, scales_at = 64 * 256 + 5 * 128, 64 * (256 + 128) + 5 * 32
    # bf16 -3 is 0xC040.
    expected = nvfp4_bytes(5 * 256, scales_at, 32) | {rope_at + 2: 0x40, rope_at + 3: 0xC0}
    assert nonzero(page_bytes(written, 0)) == expected


def test_nvfp4_rope_bf16_reads_its_rope_without_scales():
    read = cache("nvfp4_rope_bf16", 512, 64, global_scale=0.25)
    rope_at, scales_at = 64 * 256 + 5 * 128, 64 * (256 + 128) + 5 * 32
    set_bytes(read, 0, nvfp4_bytes(5 * 256, scales_at, 32) | {rope_at + 2: 0x40, rope_at + 3: 0xC0})
    latent, rope = read.read(torch.tensor([0]), 6)
    assert torch.equal(4 * latent[5:], sparse(512, **NVFP4_LATENT))
    assert torch.equal(rope[5:], sparse(64, **NVFP4_ROPE))


IDX_BYTES = {64 * 7: 0x7E, 64 * 7 + 63: 0xB8, **little_endian("f", 0.5, 64 * 64 + 4 * 7)}


def test_idx_fp8_stores_a_plane_of_codes_and_a_plane_of_scales():
    written = cache("idx_fp8", 64, 0)
    written.write(torch.tensor([7]), sparse(64, v0=224.0, v63=-0.5), torch.zeros(1, 0))
    assert nonzero(page_bytes(written, 0)) == IDX_BYTES


def test_idx_fp8_reads_code_times_the_keys_scale():
    read = cache("idx_fp8", 64, 0)
    set_bytes(read, 0, IDX_BYTES)
    keys, rope = read.read(torch.tensor([0]), 8)
    assert torch.equal(keys[7:], sparse(64, v0=224.0, v63=-0.5))
    assert rope.shape == (8, 0)


def test_an_nvfp4_page_is_72_rows_of_288_bytes():
    layout: Layout = layout_for("nvfp4", torch.bfloat16, 512, 64)
    data = layout.allocate(5, 64, "cpu")
    assert data.view(-1, 288).shape == (5 * 72, 288)


@pytest.mark.parametrize("layout_id", ["nvfp4", "nvfp4_rope_bf16"])
def test_a_page_is_one_contiguous_block(layout_id):
    assert layout_for(layout_id, torch.bfloat16, 512, 64).allocate(3, 64, "cpu")[1].is_contiguous()
