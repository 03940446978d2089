"""What a backend is told, and how it refuses in one line."""

from __future__ import annotations

import pytest
import torch

from mla_core import LayerContext
from mla_core.errors import UnsupportedError
from mla_core.layer_request import layer_request
from mla_core.request import DeviceInfo
from tests import fakes
from tests.support import tiny_config


def context_of(*kernels: str) -> LayerContext:
    config = tiny_config()
    request = layer_request(config, device=DeviceInfo(kind="cpu"), dtype="float32", layout="fp32")
    return LayerContext(
        request, frozenset(kernels), {}, config.softmax_scale, torch.device("cpu"), torch.float32
    )


def info(**changes: object):
    return fakes.info("mine", fakes.Counting, **changes)


def test_a_request_within_the_declaration_is_not_refused():
    context_of("mha_prefill", "mqa_decode").require(info())


def test_a_request_outside_the_declaration_is_refused_with_backend_kernel_and_field():
    with pytest.raises(
        UnsupportedError, match=r"'mine' does not support this mqa_decode\n +latent: wanted 16, offered 512"
    ):
        context_of("mha_prefill", "mqa_decode").require(info(latent=[512]))


def test_only_the_kernels_it_was_chosen_for_are_judged():
    context_of("mha_prefill").require(info(latent=[512]))


def test_a_page_size_is_judged_when_it_is_known():
    only_64 = info(layouts={"fp32": [64]})
    context = context_of("mqa_decode")
    context.require(only_64)
    context.require(only_64, page_size=64)
    with pytest.raises(UnsupportedError, match="page_size: wanted 16, offered 64"):
        context.require(only_64, page_size=16)
