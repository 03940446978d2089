"""Which cells a declaration gives."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mla_core.capabilities import Capabilities, IntSet, Limit
from mla_core.conformance.cells import cells_of
from mla_core.conformance.mixes import pairwise
from mla_core.conformance.values import PROBES
from mla_core.request import DeviceInfo, KernelRequest
from tests.unit.fakes import capabilities

CPU = DeviceInfo(kind="cpu")
LAYOUTS = ("fp32", "bf16")


def cells(offered: Capabilities, *, quick: bool = False, seed: int = 0) -> dict[str, str]:
    """Claim of every cell by id."""
    found = cells_of(offered, CPU, LAYOUTS, quick=quick, seed=seed)
    return {cell.id: cell.claim for cell in found}


def values(field: str, kernel: str = "mqa_decode", **changes: object) -> dict[str, str]:
    """Claims of the cells of one field by value."""
    prefix = f"{kernel}/{field}="
    found = cells(capabilities(**changes))
    return {name.removeprefix(prefix): claim for name, claim in found.items() if name.startswith(prefix)}


def test_every_field_of_a_kernel_request_has_probes():
    assert PROBES.keys() == KernelRequest.model_fields.keys() - {"kernel"}


def test_a_range_is_tried_at_both_edges_and_one_step_outside():
    found = values("heads", heads={"low": 2, "high": 9})
    assert found == {"1": "undeclared", "2": "declared", "9": "declared", "10": "undeclared"}


def test_multiples_are_tried_beside_the_grid():
    found = values("latent", latent={"low": 64, "high": 128, "step": 64})
    undeclared = {int(value) for value, claim in found.items() if claim == "undeclared"}
    assert {63, 65, 127, 129, 192} == undeclared


def test_an_open_range_is_tried_at_real_models_dims():
    assert {"16", "128"} <= values("heads", heads={"low": 1}).keys()


def test_quick_leaves_real_models_dims_out():
    found = cells(capabilities(heads={"low": 1}), quick=True)
    assert "mqa_decode/heads=128" not in found


def test_every_dtype_is_tried():
    found = values("dtype", dtypes={"float32", "bfloat16"})
    assert found == {"float32": "declared", "bfloat16": "declared", "float16": "undeclared"}


def test_layouts_of_the_core_that_are_not_declared_are_tried():
    assert values("layout") == {"fp32": "declared", "bf16": "undeclared"}


def test_page_sizes_are_tried_layout_by_layout():
    found = values("page_size", layouts={"fp32": [16], "bf16": {"low": 8, "high": 8}})
    assert (found["16(fp32)"], found["15(fp32)"], found["8(bf16)"]) == ("declared", "undeclared", "declared")


def test_an_architecture_range_is_tried_at_its_ends_and_neighbours():
    found = values("device", devices={"sm_80..sm_90"})
    assert found == {
        "cpu": "undeclared",
        "cuda:sm_75": "undeclared",
        "cuda:sm_80": "declared",
        "cuda:sm_90": "declared",
        "cuda:sm_100a": "undeclared",
    }


def test_a_longest_query_is_tried_with_one_more():
    found = values("max_query_len", query_len={"varlen", "single"}, max_query_len=4)
    assert (found["4"], found["5"]) == ("declared", "undeclared")


def test_kernels_that_are_not_declared_are_tried():
    found = {name: claim for name, claim in cells(capabilities()).items() if "/kernel=" in name}
    assert found["mqa_prefill/kernel=mqa_prefill"] == "undeclared"
    assert found["mqa_decode/kernel=mqa_decode"] == "declared"


def test_a_promise_that_is_not_given_is_tried():
    assert values("deterministic") == {"True": "undeclared"}


def test_a_limit_is_tried_on_both_sides():
    limit = Limit(
        name="few heads", when={"page_size": [64]}, then={"heads": IntSet.range(1, 16)}, because="registers"
    )
    found = {name: c for name, c in cells(capabilities(limits=(limit,))).items() if "/limit:" in name}
    assert found["mqa_decode/limit:few heads=kept"] == "declared"
    assert found["mqa_decode/limit:few heads=heads=17"] == "undeclared"


@pytest.mark.parametrize("devices", [["cuda"], ["sm_90"], ["sm_80..sm_90"]])
def test_a_limit_may_speak_about_devices(devices):
    limit = Limit(name="x", when={"device": devices}, then={"dtype": ["bfloat16"]}, because="x")
    offered = capabilities(devices={"cuda"}, dtypes={"float32", "bfloat16"}, limits=(limit,))
    found = {name: claim for name, claim in cells(offered).items() if name.startswith("mqa_decode/limit:")}
    assert found == {
        "mqa_decode/limit:x=kept": "declared",
        "mqa_decode/limit:x=dtype=float32": "undeclared",
    }


def test_a_limit_about_a_kernel_is_tried_with_that_kernel():
    limit = Limit(
        name="x", when={"kernel": ["mqa_decode"]}, then={"heads": IntSet.range(1, 16)}, because="registers"
    )
    found = {name: c for name, c in cells(capabilities(limits=(limit,))).items() if "/limit:" in name}
    assert found == {"mqa_decode/limit:x=kept": "declared", "mqa_decode/limit:x=heads=17": "undeclared"}


def test_a_limit_that_leaves_out_a_kernel_is_tried_with_it():
    limit = Limit(name="x", when={"heads": [16]}, then={"kernel": ["mha_prefill"]}, because="slow")
    found = {name: c for name, c in cells(capabilities(limits=(limit,))).items() if "/limit:" in name}
    assert found == {
        "mha_prefill/limit:x=kept": "declared",
        "mqa_decode/limit:x=kernel=mqa_decode": "undeclared",
    }


def test_values_are_tried_where_limits_allow_them():
    """bf16 pages fit 16-bit types only, so the base request's float32 must give way."""
    limit = Limit(name="x", when={"layout": ["bf16"]}, then={"dtype": ["bfloat16"]}, because="as it lies")
    found = values(
        "layout", dtypes={"float32", "bfloat16"}, layouts={"fp32": [16], "bf16": [16]}, limits=(limit,)
    )
    assert found == {"fp32": "declared", "bf16": "declared"}


def test_ids_are_the_same_every_time():
    offered = capabilities(owns={"append"}, kernels={"mha_prefill", "mqa_decode", "append"})
    assert cells(offered) == cells(offered)


def test_ids_do_not_depend_on_the_seed():
    offered = capabilities(heads={"low": 1, "high": 9})
    assert cells(offered, seed=1).keys() == cells(offered, seed=1).keys()
    single = {name for name in cells(offered) if "/mix:" not in name}
    assert single == {name for name in cells(offered, seed=9) if "/mix:" not in name}


def test_a_missing_package_changes_no_claim():
    needy = capabilities(requires=("a-package-that-nobody-has",))
    assert cells(needy) == cells(capabilities())


def test_listing_cells_loads_no_torch():
    code = (
        "import sys, mla_core.conformance.cells, mla_core.conformance.report; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def test_mixes_cover_every_pair_when_rows_suffice():
    options = {"a": [1, 2, 3], "b": ["x", "y"], "c": [True, False]}
    rows = pairwise(options, seed=0, most=100)
    seen = {(one, row[one], other, row[other]) for row in rows for one in row for other in row if one < other}
    wanted = {
        (one, v, other, w) for one in options for other in options if one < other
        for v in options[one] for w in options[other]
    }  # fmt: skip
    assert seen == wanted


def test_mixes_need_fewer_rows_than_all_combinations():
    options = {name: [1, 2, 3, 4] for name in "abcdef"}
    assert len(pairwise(options, seed=0, most=1000)) < 60


@pytest.mark.parametrize("most", [1, 5])
def test_mixes_stop_at_the_limit(most):
    assert len(pairwise({"a": range(9), "b": range(9)}, seed=0, most=most)) == most


def test_a_seed_gives_the_same_mixes():
    options = {"a": [1, 2, 3], "b": [4, 5, 6]}
    assert pairwise(options, seed=3, most=9) == pairwise(options, seed=3, most=9)
