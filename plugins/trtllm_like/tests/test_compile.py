"""Every kernel compiles for every declared generation of GPUs, and fits its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mla_core import DeviceInfo, KernelRequest
from mla_core.request import reasons
from mla_trtllm_like.manifest import INFO

SCRIPT = Path(__file__).with_name("compile_kernels.py")
SHARED_MEMORY = {80: 166912, 89: 101376, 90: 232448}


@cache
def compiled(arch: int) -> dict[str, dict[str, int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(arch)]
    found = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=600)
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_kernel_compiles_and_fits_the_shared_memory(arch):
    used = {name: result["shared"] for name, result in compiled(arch).items()}
    assert used, "no kernel was compiled"
    assert {name: size for name, size in used.items() if size > SHARED_MEMORY[arch]} == {}


@pytest.mark.slow
def test_prefill_and_the_fused_append_spill_nothing_on_sm_90():
    names = (
        "prefill, bf16",
        "rope and append, bf16",
        "rope and append, fp8_ds_mla",
        "rope and append, nvfp4",
    )
    spilled = {name: compiled(90)[name]["spilled"] for name in names}
    assert set(spilled.values()) == {0}, spilled


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_every_compiled_architecture_is_declared(arch):
    request = KernelRequest(kernel="append", device=DeviceInfo.parse(f"cuda:sm_{arch}"), dtype="bfloat16")
    assert [reason for reason in reasons(INFO.capabilities, request) if reason.field == "device"] == []
