"""The fused launch leaves the very bytes that the core's rope and append stages leave."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mla_core import LatentCache, RopeInputs, Scales, SlotTargets
from mla_core.cache import layout_for
from mla_core.stages.rope import rotate
from mla_trtllm_like.launch_rope import rope_append

TOKENS, HEADS, NOPE = 7, 3, 10
SCALES = Scales(k_scale=0.3, global_scale=0.013)
SLOTS = torch.tensor([5, -1, 130, 64, 0, -1, 191])
DIMS = {"fp8_ds_mla": (512, 64), "nvfp4": (48, 16), "nvfp4_rope_bf16": (48, 16)}
LAYOUTS = ("fp32", "fp16", "bf16", "fp8_e4m3", "fp8_ds_mla", "nvfp4", "nvfp4_rope_bf16")
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@dataclass
class Written:
    """What a writer left: cache bytes, rotated queries and keys."""

    data: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor


class Tokens:
    """New tokens as strided views, with awkward values, for one layout."""

    def __init__(self, layout, dtype, style, device, scales=SCALES):
        latent, rope = DIMS.get(layout, (24, 6))
        self.layout = layout_for(layout, dtype, latent, rope)
        self.scales, self.device, self.style = scales, device, style
        generator = torch.Generator().manual_seed(0)
        sizes = torch.logspace(-4, 3, TOKENS).unsqueeze(1)
        wide = torch.randn(TOKENS, latent + rope, generator=generator)
        wide[:, :latent] *= sizes
        wide[2, :latent] = 0.0
        wide[0, :4] = torch.tensor([0.25, -0.75, 2.5, 5.0])
        self.latent, self.key = wide.to(dtype).to(device).split([latent, rope], dim=1)
        query = torch.randn(TOKENS, HEADS, NOPE + rope, generator=generator)
        self.query = query.to(dtype).to(device)[..., NOPE:]
        angles = 6 * torch.rand(TOKENS, rope // 2, generator=generator).to(device)
        self.rope = None
        if style != "none":
            self.rope = RopeInputs(style, angles.cos() * 1.1, angles.sin() * 1.1, torch.arange(TOKENS))

    def copies(self):
        cache = LatentCache.allocate(self.layout, 3, 64, self.device, scales=self.scales)
        cache.data.view(torch.uint8).fill_(0xAA)
        targets = SlotTargets.split(SLOTS.to(self.device), cache.geometry)
        return cache, targets, self.query.clone(), self.latent, self.key.clone()

    def by_stages(self) -> Written:
        cache, targets, query, latent, key = self.copies()
        if self.rope is not None:
            rotate(query, self.rope)
            rotate(key.unsqueeze(1), self.rope)
        cache.write_targets(targets, latent, key)
        return Written(cache.data.view(torch.uint8), query, key)

    def by_kernel(self) -> Written:
        cache, targets, query, latent, key = self.copies()
        rope_append(cache, targets, query, latent, key, self.rope)
        return Written(cache.data.view(torch.uint8), query, key)


@TYPES
@pytest.mark.parametrize("style", ["interleaved", "half_split", "none"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_and_rotated_values_are_those_of_the_stages(device, layout, style, dtype):
    tokens = Tokens(layout, dtype, style, device)
    expected, found = tokens.by_stages(), tokens.by_kernel()
    assert int((found.data != expected.data).sum()) == 0
    assert torch.equal(found.query, expected.query)
    assert torch.equal(found.key, expected.key)


def test_scales_of_the_ds_layout_may_be_powers_of_two(device):
    tokens = Tokens("fp8_ds_mla", torch.bfloat16, "interleaved", device, Scales(power_of_two=True))
    assert torch.equal(tokens.by_kernel().data, tokens.by_stages().data)


@pytest.mark.parametrize("layout", ["fp8_e4m3", "fp8_ds_mla", "nvfp4", "nvfp4_rope_bf16"])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e38])
def test_values_that_no_format_holds_are_stored_as_the_reference_stores_them(device, layout, value):
    tokens = Tokens(layout, torch.float32, "none", device)
    tokens.latent[0, 5] = value
    assert torch.equal(tokens.by_kernel().data, tokens.by_stages().data)


@pytest.mark.parametrize("fault", ["style", "slot", "scale"])
def test_a_planted_fault_changes_bytes(device, fault):
    """Negative control: the comparison is exact, so one wrong convention must show."""
    right = Tokens("fp8_e4m3", torch.float32, "interleaved", device)
    style = "half_split" if fault == "style" else "interleaved"
    scale = 0.31 if fault == "scale" else 0.3
    wrong = Tokens("fp8_e4m3", torch.float32, style, device, Scales(k_scale=scale))
    data = wrong.by_kernel().data
    if fault == "slot":
        data = data.roll(1, 1)
    assert not torch.equal(data, right.by_stages().data)


def test_no_tokens_change_nothing(device):
    tokens = Tokens("fp32", torch.float32, "interleaved", device)
    cache, _, query, latent, key = tokens.copies()
    targets = SlotTargets.split(SLOTS[:0].to(device), cache.geometry)
    rope_append(cache, targets, query[:0], latent[:0], key[:0], None)
    assert bool((cache.data.view(torch.uint8) == 0xAA).all())


def test_a_cache_may_be_a_slice_of_a_larger_tensor(device):
    tokens = Tokens("fp8_ds_mla", torch.bfloat16, "half_split", device)
    cache, targets, query, latent, key = tokens.copies()
    wide = torch.full((3, 2, 64, 657), 0xAA, dtype=torch.uint8, device=device)
    sliced = LatentCache(wide[:, 1, :, 1:], cache.layout, cache.scales)
    rope_append(sliced, targets, query, latent, key, tokens.rope)
    assert torch.equal(sliced.data, tokens.by_stages().data)
    assert bool((wide[:, 0] == 0xAA).all() & (wide[..., 0] == 0xAA).all())
