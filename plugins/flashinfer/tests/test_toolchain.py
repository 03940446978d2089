"""Can kernels be compiled here, and where are they kept?"""

from __future__ import annotations

import pytest

from mla_flashinfer.toolchain import problems


@pytest.fixture(autouse=True)
def _not_precompiled(versions):
    """No distribution of compiled kernels is installed."""


def fields(environ: dict[str, str]) -> list[str]:
    return [reason.field for reason in problems(environ)]


def compiler(folder):
    nvcc = folder / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch(mode=0o755)
    return folder


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_compiler_under_the_toolkit_of_the_environment_is_enough(tmp_path, variable):
    home = compiler(tmp_path / "cuda")
    assert fields({variable: str(home), "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}) == []


def test_a_compiler_in_the_path_is_enough(tmp_path):
    folder = compiler(tmp_path / "cuda") / "bin"
    assert fields({"PATH": str(folder), "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}) == []


def test_a_toolkit_without_a_compiler_is_named(tmp_path):
    (reason,) = problems({"CUDA_HOME": str(tmp_path), "FLASHINFER_WORKSPACE_BASE": str(tmp_path)})
    assert reason.field == "nvcc"
    assert str(tmp_path) in reason.offered
    assert "CUDA_HOME" in (reason.hint or "")


def test_compiled_kernels_need_no_compiler(tmp_path, versions):
    versions["flashinfer-jit-cache"] = "0.7.4"
    assert fields({"CUDA_HOME": str(tmp_path), "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}) == []


def test_a_kernel_cache_that_cannot_be_a_folder_is_reported(tmp_path):
    file = tmp_path / "file"
    file.touch()
    (reason,) = problems(
        {"CUDA_HOME": str(compiler(tmp_path / "cuda")), "FLASHINFER_WORKSPACE_BASE": str(file)}
    )
    assert reason.field == "kernel cache"
    assert "FLASHINFER_WORKSPACE_BASE" in (reason.hint or "")
