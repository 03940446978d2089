"""What the backend declares, what it is refused for, and that nobody needs FlashInfer to learn it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from mla_core import BackendInfo, LayerRequest, registry
from mla_core.cli.app import app
from mla_core.cli.doctor import diagnose
from mla_core.registry import Registry
from mla_core.request import reasons
from mla_flashinfer.manifest import INFO

DIMS = {"heads": 16, "latent": 512, "nope": 128, "rope": 64, "value": 128}


def request(**changes) -> LayerRequest:
    base = {"device": "cuda:sm_90a", "dtype": "bfloat16", "layout": "bf16", **DIMS}
    return LayerRequest(**{**base, **changes})


def refused(kernel: str, info: BackendInfo = INFO, **changes) -> dict[str, str]:
    """Fields that keep a kernel from being served, and what is offered instead."""
    found = reasons(info.capabilities, request(**changes).kernel_request(kernel))
    return {reason.field: reason.offered for reason in found}


@pytest.fixture(autouse=True)
def _installed(versions):
    """FlashInfer 0.7.4 counts as installed."""


@pytest.fixture
def listed(monkeypatch):
    """A registry with this backend and the one everybody has."""
    known = Registry(environ={})
    known.add(INFO, override=True)
    monkeypatch.setattr(registry, "_default", known)
    return known


def explain(*arguments: str) -> dict:
    shown = CliRunner().invoke(app, ["explain", *arguments, "--json"])
    return json.loads(shown.stdout)


def test_the_manifest_loads_neither_torch_nor_flashinfer():
    code = (
        "import sys, mla_flashinfer.manifest, mla_flashinfer.engines, mla_flashinfer.toolchain\n"
        "print([name for name in ('torch', 'flashinfer') if name in sys.modules])"
    )
    paths = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=paths)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kernel", ["mha_prefill", "mqa_decode", "mqa_prefill"])
@pytest.mark.parametrize(
    "device", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_90a", "cuda:sm_100a", "cuda:sm_120a"]
)
def test_deepseek_dims_are_served_from_ampere_to_blackwell(kernel, device):
    assert refused(kernel, device=device) == {}


@pytest.mark.parametrize("device", ["cpu", "cuda:sm_75", "cuda:sm_110a"])
def test_other_devices_are_refused(device):
    assert list(refused("mqa_decode", device=device)) == ["device"]


def test_fp8_caches_are_served_on_hopper_only():
    assert refused("mqa_decode", layout="fp8_e4m3") == {}
    assert refused("mqa_decode", layout="fp8_e4m3", device="cuda:sm_100a") == {"device": "sm_90"}
    assert refused("mqa_decode", layout="fp8_e4m3", dtype="float16") == {"dtype": "bfloat16"}
    assert refused("mqa_decode", layout="fp8_e4m3", latent=256) == {"latent": "512"}


@pytest.mark.parametrize("layout", ["fp32", "fp8_ds_mla", "nvfp4", "nvfp4_rope_bf16"])
def test_other_caches_are_refused(layout):
    assert list(refused("mqa_decode", layout=layout)) == ["layout"]


@pytest.mark.parametrize(("layout", "dtype"), [("bf16", "float16"), ("fp16", "bfloat16")])
def test_a_cache_of_the_other_16_bit_type_is_refused(layout, dtype):
    assert list(refused("mqa_decode", layout=layout, dtype=dtype)) == ["dtype"]


@pytest.mark.parametrize(("nope", "value"), [(64, 128), (128, 128), (192, 256)])
def test_prefill_widths_that_kernels_exist_for_are_served(nope, value):
    assert refused("mha_prefill", nope=nope, value=value) == {}


@pytest.mark.parametrize(("nope", "value"), [(192, 128), (128, 256), (64, 256)])
def test_other_pairs_of_prefill_widths_are_refused(nope, value):
    assert list(refused("mha_prefill", nope=nope, value=value)) == ["nope"]


def test_decode_does_not_care_about_prefill_widths():
    assert refused("mqa_decode", nope=192, value=128) == {}


@pytest.mark.parametrize("heads", [1, 12, 20, 40, 96, 128])
def test_any_number_of_heads_up_to_128_is_served(heads):
    assert refused("mqa_decode", heads=heads) == {}


def test_graphs_of_decode_are_served_and_graphs_of_prefill_refused():
    assert refused("mqa_decode", cuda_graph="decode") == {}
    assert list(refused("mha_prefill", cuda_graph="full")) == ["cuda_graph"]


@pytest.mark.parametrize("version", ["0.6.18", "0.7.2", "0.7.5", "0.8.0"])
def test_versions_outside_the_range_are_refused_with_the_installed_one(versions, version):
    versions["flashinfer-python"] = version
    assert refused("mqa_decode") == {"requires": f"flashinfer-python {version}"}


def test_a_missing_flashinfer_is_refused_with_the_way_to_get_it(versions):
    del versions["flashinfer-python"]
    (reason,) = reasons(INFO.capabilities, request().kernel_request("mqa_decode"))
    assert (reason.field, reason.offered) == ("requires", "not installed")
    assert "pip install 'flashinfer-python" in (reason.hint or "")


def test_a_version_known_to_be_bad_is_refused():
    worse = INFO.capabilities.model_copy(update={"known_bad": ("flashinfer-python==0.7.4",)})
    info = INFO.model_copy(update={"capabilities": worse})
    assert refused("mqa_decode", info) == {"known_bad": "flashinfer-python 0.7.4"}


@pytest.mark.parametrize("device", ["cuda:sm_90", "cuda:sm_100a"])
def test_explain_plans_both_phases_for_a_gpu_that_is_not_here(listed, device):
    found = explain("deepseek-v3", "--device", device, "--backend", "flashinfer")
    assert (found["choices"]["mha"], found["choices"]["mqa"]) == ("flashinfer", "flashinfer")
    assert (found["choices"]["rope"], found["choices"]["append"]) == ("core", "core")
    assert found["versions"]["flashinfer-python"] == "0.7.4"


def test_explain_refuses_an_fp8_cache_on_blackwell_and_says_where_it_works(listed):
    arguments = ("--device", "cuda:sm_100a", "--cache", "fp8_e4m3", "--backend", "flashinfer")
    found = explain("deepseek-v3", *arguments)
    rows = [reason for row in found["rejected"] for reason in row["reasons"] if reason["field"] == "device"]
    assert not found["fits"]
    assert [row["offered"] for row in rows] == ["sm_90"]


def test_without_flashinfer_auto_plans_with_another_backend(listed, versions):
    del versions["flashinfer-python"]
    found = explain("deepseek-v3", "--device", "cuda:sm_90")
    assert found["choices"]["mqa"] == "vanilla"
    assert "requires" in {r["field"] for row in found["rejected"] for r in row["reasons"]}


def test_mla_doctor_notes_a_missing_flashinfer_and_a_missing_compiler(
    listed, versions, monkeypatch, tmp_path
):
    del versions["flashinfer-python"]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = diagnose(listed, {})
    assert found.problems == ()
    told = [note.what for note in found.notes if note.what.startswith("flashinfer ")]
    assert [what.split()[:2] for what in told] == [["flashinfer", "requires"], ["flashinfer", "needs"]]


def test_mla_doctor_takes_a_missing_compiler_for_a_problem_when_the_backend_is_named(
    listed, monkeypatch, tmp_path
):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    (problem,) = diagnose(listed, {"MLA_BACKEND": "flashinfer|vanilla"}).problems
    assert problem.what.startswith("flashinfer needs nvcc")
    assert "CUDA_HOME" in problem.remedy


def test_an_unknown_option_is_refused_with_a_caret_under_it(listed):
    shown = CliRunner().invoke(
        app, ["explain", "deepseek-v3", "--device", "cuda:sm_90", "--backend", "flashinfer[imlp=fa3]"]
    )
    assert shown.exit_code == 2
    assert "did you mean 'impl'" in shown.output


def test_an_option_is_part_of_the_plan(listed):
    found = explain("deepseek-v3", "--device", "cuda:sm_90", "--backend", "flashinfer[impl=fa2]")
    assert found["options"]["flashinfer"] == {"impl": "fa2"}
