"""The plan as a record and as text."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from mla_core.plan import Plan, Rejection, rejection_lines
from mla_core.request import Reason
from tests.unit import fakes

DEVICE = Reason(field="device", wanted="cpu", offered="sm_90")
DTYPE = Reason(field="dtype", wanted="float32", offered="bfloat16", hint="use bfloat16")
PLAN = Plan(
    request=fakes.LAYER,
    spec="gpu|fast[page=64]+dsa",
    spec_source="MLA_BACKEND",
    choices={"mha": "fast", "mqa": "fast", "append": "core", "sparse": "dsa"},
    options={"fast": {"page": 64}, "dsa": {"topk": 2048, "mode": "exact"}},
    versions={"mla-fast": "2.1", "mla-core": "0.1.0"},
    rejected=(Rejection(backend="gpu", kernel="mqa_decode", reasons=(DEVICE, DTYPE)),),
    workspace_tokens=4096,
    overrides={"MLA_BACKEND": "gpu|fast[page=64]+dsa"},
)


def test_a_plan_round_trips_through_json():
    assert Plan.model_validate_json(PLAN.model_dump_json()) == PLAN


def test_a_plan_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        PLAN.spec = "slow"


def test_a_plan_prints_as_a_table():
    assert str(PLAN) == (
        "backend 'gpu|fast[page=64]+dsa' (MLA_BACKEND) on cpu\n"
        "  mha     fast [page=64]\n"
        "  mqa     fast [page=64]\n"
        "  append  core\n"
        "  sparse  dsa [topk=2048, mode=exact]\n"
        "rejected\n"
        "  gpu  mqa_decode  device: wanted cpu, offered sm_90\n"
        "  gpu  mqa_decode  dtype: wanted float32, offered bfloat16 (use bfloat16)\n"
        "versions\n"
        "  mla-core 0.1.0\n"
        "  mla-fast 2.1\n"
        "overrides\n"
        "  MLA_BACKEND=gpu|fast[page=64]+dsa"
    )


def test_a_plan_prints_no_empty_sections():
    bare = PLAN.model_copy(update={"versions": {}, "rejected": (), "overrides": {}, "options": {}})
    assert str(bare) == (
        "backend 'gpu|fast[page=64]+dsa' (MLA_BACKEND) on cpu\n"
        "  mha     fast\n"
        "  mqa     fast\n"
        "  append  core\n"
        "  sparse  dsa"
    )


def test_rejections_print_one_reason_a_line_in_columns():
    rejected = [
        Rejection(backend="gpu", kernel="mha_prefill", reasons=(DEVICE,)),
        Rejection(backend="slower", kernel="mqa_decode", reasons=(DEVICE, DTYPE)),
    ]
    assert rejection_lines(rejected) == [
        "gpu     mha_prefill  device: wanted cpu, offered sm_90",
        "slower  mqa_decode   device: wanted cpu, offered sm_90",
        "slower  mqa_decode   dtype: wanted float32, offered bfloat16 (use bfloat16)",
    ]


def test_no_rejections_print_no_lines():
    assert rejection_lines([]) == []
