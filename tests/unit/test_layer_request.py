"""The request of a layer, made from a config without torch, is the one that the layer makes."""

from __future__ import annotations

import pytest
import torch

from mla_core import MLA
from mla_core.config import MLAConfig
from mla_core.errors import ConfigError
from mla_core.layer_request import heads_per_rank, layer_request, layout_id
from mla_core.request import DeviceInfo

CONFIG = MLAConfig(
    hidden_size=40,
    num_heads=6,
    kv_lora_rank=16,
    qk_nope_head_dim=10,
    qk_rope_head_dim=4,
    v_head_dim=8,
    rope={"style": "half_split"},
)
CPU = DeviceInfo(kind="cpu")


def refusal(**changes: object) -> str:
    with pytest.raises(ConfigError) as caught:
        layer_request(CONFIG, **{"device": CPU, "dtype": "float32", "layout": "fp32", **changes})
    return str(caught.value)


def test_it_is_the_request_of_the_layer_built_with_the_same_arguments():
    layer = MLA(
        CONFIG,
        dtype=torch.float32,
        backend="vanilla",
        workspace_tokens=77,
        max_decode_query_len=3,
        prefill_form="absorb",
        tp_size=2,
        reduce=torch.clone,
    )
    made = layer_request(
        CONFIG,
        device=CPU,
        dtype="float32",
        layout="fp32",
        workspace_tokens=77,
        max_decode_query_len=3,
        prefill_form="absorb",
        tp_size=2,
    )
    assert made == layer.request


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "float8"), ("page_size", 0), ("max_decode_query_len", 0), ("prefill_form", "both")],
)
def test_a_value_that_cannot_be_is_refused_with_its_name(name, value):
    field = "max_query_len" if name == "max_decode_query_len" else name
    assert f"{field}={value!r}: " in refusal(**{name: value})


def test_heads_are_shared_evenly():
    assert [heads_per_rank(CONFIG, ranks) for ranks in (1, 2, 3, 6)] == [6, 3, 2, 1]


@pytest.mark.parametrize("ranks", [0, 4, 12])
def test_heads_that_cannot_be_shared_are_refused_with_the_numbers(ranks):
    assert refusal(tp_size=ranks).startswith(f"6 heads cannot be split over tp_size={ranks} ranks")


@pytest.mark.parametrize(
    ("cache", "dtype", "layout"),
    [
        ("auto", "float32", "fp32"),
        ("auto", "bfloat16", "bf16"),
        ("auto", "float16", "fp16"),
        ("x", "float32", "x"),
    ],
)
def test_auto_stores_the_dtype_and_any_other_name_is_an_id(cache, dtype, layout):
    assert layout_id(cache, dtype) == layout
