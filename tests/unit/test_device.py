"""Devices: what selection learns of them, and which ones a layer refuses."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from mla_core.device import device_info, usable_device
from mla_core.errors import ConfigError
from mla_core.request import DeviceInfo


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_a_cpu_is_a_cpu_however_it_is_spelt(device):
    assert usable_device(device).type == "cpu"
    assert device_info(torch.device(device)) == DeviceInfo(kind="cpu")


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 3), "sm_103a")]
)
def test_architectures_from_hopper_on_have_the_suffix_of_their_own_instructions(capability, arch):
    with (
        patch.object(torch.cuda, "get_device_capability", lambda device: capability),
        patch.object(torch.cuda, "get_device_name", lambda device: "Some GPU"),
    ):
        assert device_info(torch.device("cuda", 0)) == DeviceInfo(kind="cuda", arch=arch, name="Some GPU")


@pytest.mark.parametrize("device", ["meta", "mps"])
def test_a_device_that_layers_do_not_run_on_is_refused_by_name(device):
    with pytest.raises(ConfigError, match=f"cpu and cuda devices, not on '{device}'"):
        usable_device(device)


def test_cuda_is_refused_where_torch_sees_none():
    with (
        patch.object(torch.cuda, "is_available", lambda: False),
        pytest.raises(ConfigError, match=r"device 'cuda:1' was asked for, but torch .* sees no CUDA"),
    ):
        usable_device("cuda:1")
