"""From a user's cache name to a layout: names, widths, sizes and refusals."""

from __future__ import annotations

import re

import pytest
import torch

from mla_core.cache import LatentCache, layout_for, layout_ids
from mla_core.errors import CacheError

WIDTHS = {"512 + 64": (512, 64), "256 + 32": (256, 32), "256 + 64": (256, 64), "512 + 0": (512, 0)}
BYTES = {
    ("bf16", "512 + 64"): 1152,
    ("fp8_e4m3", "512 + 64"): 576,
    ("fp8_e4m3", "256 + 32"): 288,
    ("fp8_e4m3", "256 + 64"): 320,
    ("fp8_e4m3", "512 + 0"): 512,
    ("fp8_ds_mla", "512 + 64"): 656,
    ("nvfp4", "512 + 64"): 324,
    ("nvfp4", "256 + 32"): 162,
    ("nvfp4", "256 + 64"): 180,
    ("nvfp4", "512 + 0"): 288,
    ("nvfp4_rope_bf16", "512 + 64"): 416,
    ("nvfp4_rope_bf16", "256 + 32"): 208,
    ("nvfp4_rope_bf16", "256 + 64"): 272,
}


@pytest.mark.parametrize(("layout_id", "widths"), BYTES)
def test_a_token_takes_the_documented_bytes(layout_id, widths):
    layout = layout_for(layout_id, torch.bfloat16, *WIDTHS[widths])
    assert layout.bytes_per_token == BYTES[layout_id, widths]


@pytest.mark.parametrize(("layout_id", "widths"), BYTES)
def test_allocated_pages_take_exactly_their_tokens_bytes(layout_id, widths):
    layout = layout_for(layout_id, torch.bfloat16, *WIDTHS[widths])
    cache = LatentCache.allocate(layout, 3, 64, "cpu")
    assert cache.data.numel() * cache.data.element_size() == 3 * 64 * cache.bytes_per_token


def test_an_index_key_takes_132_bytes():
    assert layout_for("idx_fp8", torch.bfloat16, 128, 0).bytes_per_token == 132


@pytest.mark.parametrize(
    ("dtype", "layout_id"), [(torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")]
)
def test_auto_stores_the_layers_own_dtype(dtype, layout_id):
    assert layout_for("auto", dtype, 512, 64) == layout_for(layout_id, torch.float32, 512, 64)


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "fp8_e4m3fnuz", "int8", "BF16", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(CacheError, match=rf"unknown cache layout '{name}'.*auto, fp32, .*fp8_e4m3.*nvfp4"):
        layout_for(name, torch.bfloat16, 512, 64)


@pytest.mark.parametrize("widths", [(256, 32), (256, 64), (512, 0), (512, 32), (576, 64)])
def test_fp8_ds_mla_refuses_other_widths_and_says_what_fits(widths):
    latent, rope = widths
    wanted = (
        rf"512 latent and 64 rope values.*this model has {latent} and {rope}; layouts that fit: .*fp8_e4m3"
    )
    with pytest.raises(CacheError, match=wanted):
        layout_for("fp8_ds_mla", torch.bfloat16, latent, rope)


@pytest.mark.parametrize("layout_id", ["nvfp4", "nvfp4_rope_bf16"])
@pytest.mark.parametrize("widths", [(512, 8), (504, 64), (16, 4)])
def test_nvfp4_refuses_widths_that_groups_of_16_do_not_fill(layout_id, widths):
    with pytest.raises(CacheError, match=r"multiples of 16, this model has .*layouts that fit: .*fp8_e4m3"):
        layout_for(layout_id, torch.bfloat16, *widths)


def test_the_indexers_layout_refuses_latent_rows():
    with pytest.raises(CacheError, match=r"'idx_fp8' holds an indexer's keys.*got 512 and 64"):
        layout_for("idx_fp8", torch.bfloat16, 512, 64)


@pytest.mark.parametrize("layout_id", ["nvfp4", "nvfp4_rope_bf16"])
def test_nvfp4_refuses_pages_of_another_size(layout_id):
    layout = layout_for(layout_id, torch.bfloat16, 512, 64)
    with pytest.raises(CacheError, match=r"pages of 64 tokens, not page_size=16"):
        LatentCache.allocate(layout, 2, 16, "cpu")


def test_layouts_have_different_hashes():
    hashes = {layout_for(name, torch.bfloat16, 128, 0).hash for name in layout_ids() if name != "fp8_ds_mla"}
    assert len(hashes) == len(layout_ids()) - 1


@pytest.mark.parametrize("layout_id", ["bf16", "fp8_e4m3", "nvfp4"])
def test_a_hash_tells_widths_apart(layout_id):
    assert len({layout_for(layout_id, torch.bfloat16, *widths).hash for widths in WIDTHS.values()}) == 4


def test_e4m3_e5m2_and_fnuz_tensors_are_distinct():
    layout = layout_for("fp8_e4m3", torch.bfloat16, 512, 64)
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint8):
        data = torch.zeros(2, 4, 576, dtype=torch.uint8).view(dtype)
        with pytest.raises(
            CacheError, match=re.escape(f"needs [num_pages, page_size, 576] of {layout.storage}")
        ):
            LatentCache.from_tensor(data, layout, 4)


@pytest.mark.parametrize("shape", [(2, 20735), (2, 63 * 324), (2, 64, 324), (20736,)])
def test_a_tensor_of_another_shape_is_not_an_nvfp4_cache(shape):
    layout = layout_for("nvfp4", torch.bfloat16, 512, 64)
    with pytest.raises(CacheError, match=r"needs \[num_pages, 64 \* 324\] of torch.uint8, got"):
        LatentCache.from_tensor(torch.zeros(shape, dtype=torch.uint8), layout, 64)


def test_a_page_size_that_contradicts_the_tensor_is_refused():
    layout = layout_for("idx_fp8", torch.bfloat16, 128, 0)
    data = torch.zeros(2, 16 * 132, dtype=torch.uint8)
    with pytest.raises(CacheError, match="page_size=32 but the tensor has pages of 16 tokens"):
        LatentCache.from_tensor(data, layout, 32)
