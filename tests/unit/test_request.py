"""Requests, and the one checker: every declared field refuses what it does not offer, and nothing else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from mla_core.capabilities import Capabilities
from mla_core.errors import ConfigError
from mla_core.request import CHECKERS, DeviceInfo, KernelRequest, LayerRequest, Reason, reasons
from tests.unit import fakes

LIMIT = {
    "name": "small pages",
    "when": {"layout": ["fp32"], "heads": [16, 32]},
    "then": {"page_size": [16]},
    "because": "a tile holds 16 rows",
}
DECLINED = {"field": "heads", "value": 16, "because": "slower than padding to 32"}
VERSIONS = {"torch": "2.11.1", "numpy": "1.26"}


def reason(field: str, wanted: str, offered: str, hint: str | None = None) -> Reason:
    return Reason(field=field, wanted=wanted, offered=offered, hint=hint)


def asked(kernel: str = "mqa_decode", **changes: object) -> KernelRequest:
    """What fakes.LAYER asks of a kernel, with changes."""
    return KernelRequest(**{**fakes.LAYER.kernel_request(kernel).model_dump(), **changes})


# Capabilities field: what is declared instead of fakes.FULL, the request, and the one reason it gives.
CASES: dict[str, list[tuple[dict[str, object], KernelRequest, Reason]]] = {
    "devices": [
        ({"devices": {"sm_90", "sm_80"}}, asked(), reason("device", "cpu", "sm_80, sm_90")),
        ({"devices": set()}, asked(), reason("device", "cpu", "none")),
        ({"devices": {"sm_90a"}}, asked(device="cuda:sm_90"), reason("device", "cuda:sm_90", "sm_90a")),
    ],
    "kernels": [
        ({"kernels": {"mqa_prefill"}}, asked(), reason("kernel", "mqa_decode", "mqa_prefill")),
        ({}, asked("append"), reason("kernel", "append", "mha_prefill, mqa_decode")),
    ],
    "dtypes": [
        ({"dtypes": {"bfloat16", "float16"}}, asked(), reason("dtype", "float32", "bfloat16, float16"))
    ],
    "layouts": [
        ({"layouts": {"bf16": [64]}}, asked(), reason("layout", "fp32", "bf16")),
        ({"layouts": {}}, asked(), reason("layout", "fp32", "none")),
        (
            {"layouts": {"fp32": [16], "bf16": [64]}},
            asked(),
            reason("page_size", "64", "16", "with layout fp32"),
        ),
    ],
    "query_len": [({}, asked(query_len="varlen"), reason("query_len", "varlen", "single"))],
    "max_query_len": [({"max_query_len": 4}, asked(max_query_len=5), reason("max_query_len", "5", "1..4"))],
    "heads": [({"heads": {"low": 1, "high": 8}}, asked(), reason("heads", "16", "1..8"))],
    "latent": [({"latent": 256}, asked(), reason("latent", "512", "256"))],
    "nope": [({"nope": []}, asked("mha_prefill"), reason("nope", "128", "none"))],
    "rope": [({"rope": {"low": 48, "step": 48}}, asked(), reason("rope", "64", "multiples of 48"))],
    "value": [
        ({"value": [64, 96]}, asked("mha_prefill"), reason("value", "128", "64, 96")),
        ({"value": 64, "owns": {"v_up"}}, asked(), reason("value", "128", "64")),
    ],
    "owns": [
        ({"owns": {"append"}}, asked("append", rope_style="interleaved"), reason("owns", "rope", "append")),
    ],
    "rope_styles": [
        (fakes.ROPE_OWNER, asked(rope_style="half_split"), reason("rope_style", "half_split", "interleaved")),
    ],
    "returns": [({"returns": set()}, asked(lse=True), reason("lse", "returned", "not returned"))],
    "sparse": [
        (
            {"kernels": {"mqa_sparse"}},
            asked("mqa_sparse", sparse="token_topk"),
            reason("sparse", "token_topk", "none"),
        )
    ],
    "cuda_graph": [
        ({}, asked(cuda_graph="decode"), reason("cuda_graph", "decode", "none")),
        ({"cuda_graph": "decode"}, asked(cuda_graph="full"), reason("cuda_graph", "full", "decode")),
    ],
    "deterministic": [({}, asked(deterministic=True), reason("deterministic", "yes", "no"))],
    "batch_invariant": [({}, asked(batch_invariant=True), reason("batch_invariant", "yes", "no"))],
    "requires": [
        (
            {"requires": ("quick>=1",)},
            asked(),
            reason("requires", "quick>=1", "not installed", "pip install 'quick>=1'"),
        ),
        (
            {"requires": ("numpy>=2",)},
            asked(),
            reason("requires", "numpy>=2", "numpy 1.26", "pip install 'numpy>=2'"),
        ),
    ],
    "known_bad": [
        (
            {"known_bad": ("torch==2.11.1",)},
            asked(),
            reason("known_bad", "not torch==2.11.1", "torch 2.11.1"),
        )
    ],
    "limits": [
        ({"limits": [LIMIT]}, asked(), reason("page_size", "64", "16", "a tile holds 16 rows")),
        (
            {"limits": [{**LIMIT, "when": {"device": ["cpu"]}, "then": {"device": ["sm_90"]}}]},
            asked(),
            reason("device", "cpu", "sm_90", "a tile holds 16 rows"),
        ),
    ],
    "declined": [
        ({"declined": [DECLINED]}, asked(), reason("heads", "16", "declined", "slower than padding to 32")),
        (
            {"declined": [DECLINED], "heads": 32},
            asked(),
            reason("heads", "16", "32", "slower than padding to 32"),
        ),
    ],
}
CASE_LIST = [pytest.param(*case, id=f"{field}-{i}") for field in CASES for i, case in enumerate(CASES[field])]


def test_every_field_of_capabilities_has_a_checker():
    assert list(CHECKERS) == list(Capabilities.model_fields)


def test_every_field_of_capabilities_has_a_case():
    assert list(CASES) == list(Capabilities.model_fields)


@pytest.mark.parametrize(("declared", "request_", "expected"), CASE_LIST)
def test_a_field_that_does_not_fit_gives_exactly_its_reason(declared, request_, expected):
    assert reasons(fakes.capabilities(**declared), request_, VERSIONS.get) == [expected]


@pytest.mark.parametrize(("declared", "request_", "expected"), CASE_LIST)
def test_the_reason_of_a_case_comes_from_the_checker_of_its_field(declared, request_, expected, request):
    field = request.node.callspec.id.rpartition("-")[0]
    found = list(CHECKERS[field](fakes.capabilities(**declared), request_, VERSIONS.get))
    assert [(r.field, r.wanted) for r in found] == [(expected.field, expected.wanted)]


@pytest.mark.parametrize("kernel", ["mha_prefill", "mqa_decode"])
def test_a_declaration_that_fits_gives_no_reason(kernel):
    assert reasons(fakes.capabilities(), asked(kernel)) == []


FITS = [
    ({"devices": {"cuda"}}, {"device": "cuda:sm_75"}),
    ({"devices": {"sm_80..sm_90"}}, {"device": "cuda:sm_90a"}),
    ({"owns": {"append"}}, {"kernel": "append"}),
    ({"layouts": {"fp32": [16]}}, {"page_size": None}),
    ({"layouts": {}}, {"layout": None}),
    ({"max_query_len": 4}, {"max_query_len": 4}),
    ({}, {"max_query_len": 10**6}),
    # The absorb form returns latents: it never sees the value width, unless it owns v_up.
    ({"value": []}, {}),
    # Who does not own rope gets rotated keys.
    ({"rope_styles": set()}, {"rope_style": "half_split"}),
    (fakes.ROPE_OWNER, {"kernel": "append", "rope_style": "interleaved"}),
    ({"cuda_graph": "full"}, {"cuda_graph": "decode"}),
    ({"deterministic": True}, {"deterministic": True}),
    ({"batch_invariant": True}, {"batch_invariant": False}),
    ({"requires": ("torch>=2.11",)}, {}),
    ({"requires": ("quick>=1; python_version < '3'",)}, {}),
    ({"known_bad": ("torch==2.12", "quick==1")}, {}),
    ({"limits": [LIMIT]}, {"page_size": 16}),
    ({"limits": [LIMIT]}, {"page_size": None}),
    ({"limits": [LIMIT]}, {"heads": 64}),
    ({"limits": [LIMIT]}, {"heads": None}),
    ({"limits": [LIMIT], "layouts": {"bf16": [64]}}, {"layout": "bf16"}),
    ({"declined": [DECLINED]}, {"heads": 32}),
    ({"declined": [{**DECLINED, "field": "deterministic", "value": True}]}, {}),
]


@pytest.mark.parametrize(("declared", "changes"), FITS, ids=str)
def test_a_value_on_the_right_side_gives_no_reason(declared, changes):
    assert reasons(fakes.capabilities(**declared), asked(**changes), VERSIONS.get) == []


def test_all_fields_are_checked_whatever_failed_before():
    found = reasons(Capabilities(), asked(lse=True, deterministic=True))
    assert [r.field for r in found] == [
        "device",
        "kernel",
        "dtype",
        "layout",
        "query_len",
        "heads",
        "latent",
        "rope",
        "lse",
        "deterministic",
    ]


def test_installed_versions_are_read_from_the_environment_by_default():
    declared = fakes.capabilities(requires=("pydantic>=2", "surely-not-installed>=1"))
    assert [r.wanted for r in reasons(declared, asked())] == ["surely-not-installed>=1"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (reason("heads", "12", "16, 32"), "heads: wanted 12, offered 16, 32"),
        (reason("heads", "12", "16", "pad them"), "heads: wanted 12, offered 16 (pad them)"),
    ],
)
def test_a_reason_reads_as_a_sentence(given, text):
    assert str(given) == text


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", DeviceInfo(kind="cpu")),
        ("cuda", DeviceInfo(kind="cuda")),
        ("cuda:sm_90", DeviceInfo(kind="cuda", arch="sm_90")),
        ("cuda:sm_100a", DeviceInfo(kind="cuda", arch="sm_100a")),
    ],
)
def test_a_device_is_read_from_text_and_written_back(text, device):
    assert (DeviceInfo.parse(text), str(device)) == (device, text)


@pytest.mark.parametrize("text", ["", "gpu", "cuda:0", "cuda:", "cpu:0", "cpu:", "sm_90", "cuda:sm_90x"])
def test_a_text_that_is_no_device_is_refused_with_what_is_one(text):
    with pytest.raises(ConfigError) as caught:
        DeviceInfo.parse(text)
    assert str(caught.value) == (
        f"not a device to plan for: {text!r}; write cpu, cuda, cuda:sm_90 or cuda:sm_90a"
    )


@pytest.mark.parametrize(
    "device", [{"kind": "cpu", "arch": "sm_90"}, {"kind": "cuda", "arch": "90"}, {"kind": "tpu"}]
)
def test_a_device_that_cannot_exist_is_refused(device):
    with pytest.raises(ValidationError):
        DeviceInfo(**device)


def test_a_layer_request_round_trips_through_json():
    layer = fakes.LAYER.model_copy(update={"device": DeviceInfo(kind="cuda", arch="sm_90a", name="H200")})
    assert LayerRequest.model_validate_json(layer.model_dump_json()) == layer


ASKED_FIELDS = {
    "mha_prefill": {"heads", "nope", "rope", "value", "rope_style", "lse"},
    "mqa_prefill": {"heads", "latent", "rope", "value", "rope_style", "layout", "page_size", "lse"},
    "mqa_decode": {
        "heads",
        "latent",
        "rope",
        "value",
        "rope_style",
        "layout",
        "page_size",
        "query_len",
        "max_query_len",
    },
    "append": {"latent", "rope", "layout", "page_size"},
}


@pytest.mark.parametrize("kernel", ASKED_FIELDS)
def test_a_kernel_is_asked_only_for_what_it_sees(kernel):
    given = fakes.LAYER.kernel_request(kernel).model_dump(exclude_none=True, exclude_defaults=True)
    assert set(given) == ASKED_FIELDS[kernel] | {"kernel", "device", "dtype"}


def test_a_sparse_kernel_is_asked_like_decode_and_for_its_sparse_input():
    layer = fakes.LAYER.model_copy(update={"sparse": "token_topk"})
    decode = layer.kernel_request("mqa_decode").model_dump()
    assert layer.kernel_request("mqa_sparse").model_dump() == {
        **decode,
        "kernel": "mqa_sparse",
        "sparse": "token_topk",
    }


@pytest.mark.parametrize(("lse", "kernel", "wanted"), [
    (False, "mha_prefill", True),
    (False, "mqa_prefill", True),
    (False, "mqa_decode", False),
    (True, "mqa_decode", True),
])  # fmt: skip
def test_prefill_always_returns_lse_and_decode_when_asked(lse, kernel, wanted):
    layer = fakes.LAYER.model_copy(update={"lse": lse})
    assert layer.kernel_request(kernel).lse is wanted


@pytest.mark.parametrize(("level", "kernel", "wanted"), [
    ("decode", "mqa_decode", "decode"),
    ("decode", "mha_prefill", None),
    ("full", "mha_prefill", "full"),
    ("full", "mqa_prefill", "full"),
    (None, "mqa_decode", None),
])  # fmt: skip
def test_prefill_is_asked_for_graphs_at_the_full_level_only(level, kernel, wanted):
    layer = fakes.LAYER.model_copy(update={"cuda_graph": level})
    assert layer.kernel_request(kernel).cuda_graph == wanted


@pytest.mark.parametrize(("given", "longest", "wanted"), [
    (None, 1, "single"),
    (None, 2, "varlen"),
    ("uniform", 2, "uniform"),
])  # fmt: skip
def test_query_lengths_are_single_unless_decode_verifies_drafts(given, longest, wanted):
    layer = fakes.LAYER.model_copy(update={"query_len": given, "max_query_len": longest})
    assert layer.kernel_request("mqa_decode").query_len == wanted
