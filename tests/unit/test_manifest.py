"""Manifests: what a plugin must state, and what happens to one from another version of the contract."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel, ValidationError

from mla_core.capabilities import Capabilities
from mla_core.errors import IncompatiblePlugin
from mla_core.manifest import HOOK_API, BackendInfo, SparseInfo, accepted_apis, validation_problems

GIVEN = {"name": "fast", "target": "mla_fast.backend:Fast", "capabilities": Capabilities()}


class Options(BaseModel):
    page: int = 64


def test_a_backend_needs_a_name_a_target_and_capabilities():
    with pytest.raises(ValidationError) as caught:
        BackendInfo()
    assert validation_problems(caught.value) == [
        "name: Field required",
        "target: Field required",
        "capabilities: Field required",
    ]


def test_a_plugin_speaks_the_first_api_unless_it_states_another():
    assert BackendInfo(**GIVEN).api == 1


@pytest.mark.parametrize(("current", "accepted"), [(1, (1,)), (2, (1, 2)), (5, (4, 5))])
def test_the_current_and_the_previous_api_are_accepted(current, accepted):
    assert accepted_apis(current) == accepted


@pytest.mark.parametrize("api", [0, HOOK_API + 1])
@pytest.mark.parametrize("kind", [BackendInfo, SparseInfo])
def test_a_plugin_of_another_api_is_incompatible(kind, api):
    with pytest.raises(IncompatiblePlugin, match=f"speaks API {api}; this mla_core accepts API 1"):
        kind(name="fast", target="mla_fast.backend:Fast", api=api)


def test_a_later_manifest_is_incompatible_even_with_fields_that_we_do_not_know():
    with pytest.raises(IncompatiblePlugin):
        BackendInfo(**GIVEN, api=HOOK_API + 1, invented_later=True)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"name": "auto"}, "name: Value error, 'auto' is reserved; so are auto, core, prefill, decode"),
        ({"name": "core"}, "name: Value error, 'core' is reserved; so are auto, core, prefill, decode"),
        ({"name": "a|b"}, "name: String should match pattern"),
        ({"name": ""}, "name: String should match pattern"),
        ({"target": "mla_fast.backend"}, "target: String should match pattern"),
        ({"options": {"page": 64}}, "options: Input should be a subclass of BaseModel"),
        ({"api": "one"}, "api: Input should be a valid integer"),
        ({"priorty": 3}, "priorty: Extra inputs are not permitted"),
    ],
    ids=str,
)
def test_a_manifest_with_a_wrong_field_is_refused(changes, problem):
    with pytest.raises(ValidationError) as caught:
        BackendInfo(**{**GIVEN, **changes})
    (found,) = validation_problems(caught.value)
    assert found.startswith(problem)


def test_a_manifest_is_written_as_json_with_the_schema_of_its_options():
    shown = json.loads(BackendInfo(**GIVEN, options=Options).model_dump_json())
    assert shown["options"]["properties"]["page"]["default"] == 64


def test_a_manifest_without_options_has_none_in_json():
    assert json.loads(BackendInfo(**GIVEN).model_dump_json())["options"] is None


def test_a_sparse_hook_needs_the_dense_parts_unless_it_says_otherwise():
    info = SparseInfo(name="dsa", target="mla_dsa.hook:Dsa")
    assert (info.needs_absorption, info.needs_dense_mha, info.needs_default_o_proj) == (True, True, True)
