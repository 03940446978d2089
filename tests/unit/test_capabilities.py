"""Declarations: closed world, validated where they are written, and the same after a trip through JSON."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from mla_core.capabilities import Arch, Capabilities, Declined, DevicePattern, IntSet, Limit, Requirement
from tests.unit import fakes

RICH = fakes.capabilities(
    devices={"cpu", "sm_80..sm_90", "sm_100a..sm_103a"},
    kernels={"mha_prefill", "mqa_decode", "mqa_sparse"},
    max_query_len=4,
    owns={"rope", "append"},
    rope_styles={"interleaved"},
    requires=("torch>=2.11",),
    known_bad=("torch==2.11.1",),
    limits=[
        {
            "name": "small pages",
            "when": {"layout": ["fp8_ds_mla"], "heads": [16, 32]},
            "then": {"page_size": [64], "deterministic": [False]},
            "because": "one TMA box holds 64 rows",
        }
    ],
    declined=[{"field": "heads", "value": 8, "because": "slower than padding to 16"}],
)


def test_an_empty_declaration_offers_nothing():
    offered = {name: value for name, value in Capabilities() if value and value != "none"}
    assert offered == {}


def test_json_round_trips():
    assert Capabilities.model_validate_json(RICH.model_dump_json()) == RICH


def test_json_is_the_same_in_every_process():
    code = "from tests.unit.test_capabilities import RICH; print(RICH.model_dump_json())"
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(texts) == 1


def test_a_declaration_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        RICH.deterministic = True


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": {"cpu"}}, "Extra inputs are not permitted"),
        ({"devices": {"tpu"}}, "not a CUDA architecture: 'tpu'"),
        ({"devices": {"sm_90..sm_80"}}, "not a range of architectures: 'sm_90..sm_80'"),
        ({"devices": {"sm_90a..sm_100"}}, "not a range of architectures: 'sm_90a..sm_100'"),
        ({"kernels": {"mla"}}, "Input should be 'mha_prefill'"),
        ({"dtypes": {"fp16"}}, "Input should be 'float32'"),
        ({"owns": {"rope"}, "rope_styles": {"none"}}, "owns rope but not append"),
        ({"owns": {"rope", "append"}}, "declares no rope_styles"),
        ({"max_query_len": 0}, "greater than 0"),
        ({"requires": ("torch >>> 2",)}, "not a PEP 508 requirement: 'torch >>> 2'"),
        ({"known_bad": ("not a name",)}, "not a PEP 508 requirement: 'not a name'"),
    ],
    ids=str,
)
def test_a_declaration_that_cannot_be_meant_is_refused(changes, message):
    with pytest.raises(ValidationError, match=message):
        fakes.capabilities(**changes)


@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("cpu", [("cpu", None)], [("cuda", "sm_90"), ("cuda", None)]),
        ("cuda", [("cuda", "sm_75"), ("cuda", "sm_90a"), ("cuda", None)], [("cpu", None)]),
        (
            "sm_90",
            [("cuda", "sm_90"), ("cuda", "sm_90a")],
            [("cuda", "sm_89"), ("cuda", None), ("cpu", None)],
        ),
        ("sm_90a", [("cuda", "sm_90a")], [("cuda", "sm_90"), ("cuda", "sm_100a")]),
        ("sm_80..sm_90", [("cuda", "sm_80"), ("cuda", "sm_89"), ("cuda", "sm_90a")], [("cuda", "sm_100a")]),
        (
            "sm_100a..sm_103a",
            [("cuda", "sm_100a"), ("cuda", "sm_103a")],
            [("cuda", "sm_103"), ("cuda", "sm_110a")],
        ),
        ("sm_100f", [("cuda", "sm_100f")], [("cuda", "sm_100a"), ("cuda", "sm_100")]),
    ],
)
def test_a_device_pattern_fits_exactly_the_devices_it_means(pattern, fitting, others):
    parsed = DevicePattern.parse(pattern)
    assert [d for d in (*fitting, *others) if parsed.fits(*d)] == fitting


@pytest.mark.parametrize("text", ["sm90", "sm_90b", "sm_", "90", "sm_90a.."])
def test_an_architecture_that_does_not_exist_is_refused(text):
    with pytest.raises(ValueError, match="not a CUDA architecture"):
        DevicePattern.parse(text)


def test_an_architecture_has_a_number_and_a_suffix():
    assert Arch.parse("sm_100f") == Arch(100, "f")


@pytest.mark.parametrize(
    ("text", "version", "allowed"),
    [
        ("torch>=2.11", "2.13.0", True),
        ("torch>=2.11", "2.10", False),
        ("torch>=2.11,!=2.12", "2.12", False),
        ("torch>=2.11", "2.12.0rc1", True),
        ("torch", "0.1", True),
    ],
)
def test_a_requirement_allows_the_versions_of_its_specifier(text, version, allowed):
    assert Requirement(text).allows(version) is allowed


@pytest.mark.parametrize(
    ("marker", "applies"), [("python_version >= '3'", True), ("python_version < '3'", False)]
)
def test_a_requirement_applies_where_its_marker_holds(marker, applies):
    assert Requirement(f"torch>=2.11; {marker}").applies() is applies


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"when": {"colour": ["red"]}}, "unknown request field 'colour'"),
        ({"when": {"dtype": [True]}}, "dtype takes a list of words"),
        ({"then": {"lse": ["yes"]}}, "lse takes a list of true or false"),
        ({"then": {"device": ["tpu"]}}, "not a CUDA architecture"),
        ({"then": {"heads": ["many"]}}, "valid integer"),
    ],
    ids=str,
)
def test_a_limit_about_nothing_is_refused(rule, message):
    with pytest.raises(ValidationError, match=message):
        Limit.model_validate({"name": "x", "when": {}, "then": {}, "because": "x", **rule})


def test_a_limit_reads_numbers_as_an_intset():
    limit = Limit(name="x", when={}, then={"heads": [16, 32], "rope": IntSet.range(1, 64)}, because="x")
    assert limit.then == {"heads": IntSet.of(16, 32), "rope": IntSet.range(1, 64)}


def test_declining_an_unknown_field_is_refused():
    with pytest.raises(ValidationError, match="unknown request field 'colour'"):
        Declined(field="colour", value="red", because="x")
