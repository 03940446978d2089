"""A backend may refuse when it is built; selection then goes on as if its declaration had said so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mla_core import MLA, BackendInfo, MLAConfig, registry
from mla_core.errors import BrokenPlugin, NoBackendFits, UnsupportedError
from mla_core.request import Reason

CONFIG = MLAConfig(
    hidden_size=32, num_heads=2, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
)


class Refuser:
    """Declares everything that vanilla does, and refuses every layer."""

    def __init__(self, context: object) -> None:
        raise UnsupportedError("refuser", [Reason(field="heads", wanted="2", offered="none today")])


class Forger:
    """Refuses in another backend's name."""

    def __init__(self, context: object) -> None:
        raise UnsupportedError("somebody", [Reason(field="heads", wanted="2", offered="none")])


@pytest.fixture(autouse=True)
def _plugins() -> Iterator[None]:
    capabilities = registry.info("vanilla").capabilities
    here = {"refuser": f"{__name__}:Refuser", "forger": f"{__name__}:Forger", "broken": "no_such_module:X"}
    for name, target in here.items():
        registry.add(BackendInfo(name=name, target=target, capabilities=capabilities, priority=-200))
    yield
    for name in here:
        registry.remove(name)


def test_a_chain_goes_on_after_a_refusal_and_the_plan_says_why() -> None:
    layer = MLA(CONFIG, backend="refuser|vanilla", dtype=torch.float32)
    assert layer.plan.choices["mqa"] == "vanilla"
    assert layer.plan.rejected[0].backend == "refuser"
    assert [str(reason) for reason in layer.plan.rejected[0].reasons] == [
        "heads: wanted 2, offered none today"
    ]


def test_an_explicit_backend_that_refuses_is_not_replaced() -> None:
    with pytest.raises(NoBackendFits, match="none today"):
        MLA(CONFIG, backend="refuser", dtype=torch.float32)


def test_a_refusal_in_another_name_is_passed_on() -> None:
    with pytest.raises(UnsupportedError, match="somebody"):
        MLA(CONFIG, backend="forger|vanilla", dtype=torch.float32)


def test_auto_goes_on_after_kernels_that_do_not_import_and_the_plan_says_why() -> None:
    broken = registry.info("broken").model_copy(update={"priority": 5})
    registry.add(broken, override=True)
    layer = MLA(CONFIG, backend="auto", dtype=torch.float32)
    assert layer.plan.choices["mqa"] == "vanilla"
    assert "no_such_module" in str(layer.plan.rejected[0].reasons[0])


@pytest.mark.parametrize("spec", ["broken", "broken|vanilla"])
def test_kernels_that_do_not_import_are_an_error_to_who_names_them(spec: str) -> None:
    with pytest.raises(BrokenPlugin, match="no_such_module"):
        MLA(CONFIG, backend=spec, dtype=torch.float32)


def test_the_way_out_fits_a_plugin_that_was_added_in_code() -> None:
    with pytest.raises(
        BrokenPlugin, match="add it again with a target that imports, or set MLA_DISABLE=broken"
    ):
        MLA(CONFIG, backend="broken", dtype=torch.float32)
