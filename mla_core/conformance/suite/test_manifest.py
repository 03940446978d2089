"""The manifest: readable without kernels, storable, and of a contract that this core speaks."""

from __future__ import annotations

import pytest

from mla_core.conformance.session import Session, manifest_facts
from mla_core.manifest import BackendInfo, accepted_apis

__all__ = [
    "test_describing_the_backend_loads_no_torch",
    "test_the_backend_declares_something",
    "test_the_contract_version_is_accepted",
    "test_the_declaration_survives_json",
    "test_the_manifest_says_in_one_line_what_the_backend_is",
]


@pytest.fixture(scope="module")
def info(mla_session: Session) -> BackendInfo:
    return mla_session.info


def test_describing_the_backend_loads_no_torch(info: BackendInfo) -> None:
    loaded = manifest_facts(info.name)["loaded"]
    assert loaded == [], f"over-claim: a manifest is read without kernels, but importing it loads {loaded}"


def test_the_declaration_survives_json(info: BackendInfo) -> None:
    text = info.capabilities.model_dump_json()
    again = type(info.capabilities).model_validate_json(text)
    assert again == info.capabilities, f"the declaration changes when it is stored: {text}"


def test_the_contract_version_is_accepted(info: BackendInfo) -> None:
    assert info.api in accepted_apis()


def test_the_backend_declares_something(info: BackendInfo) -> None:
    offered = info.capabilities
    assert offered.devices, "no device is declared, so the backend can never be chosen"
    assert offered.kernels | offered.owns, "no kernel is declared, so the backend can never be chosen"


def test_the_manifest_says_in_one_line_what_the_backend_is(info: BackendInfo) -> None:
    assert info.summary, "summary is empty; mla list shows it"
    assert "\n" not in info.summary
