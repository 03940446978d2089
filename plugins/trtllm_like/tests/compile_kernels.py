"""Compiles the kernels for a GPU that need not be there, and prints what each one takes as JSON.

Run as a script, because kernels that are interpreted cannot be compiled: `compile_kernels.py 90`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

sys.path.append(str(Path(__file__).parents[1] / "src"))

from mla_trtllm_like.kernels.combine import combine
from mla_trtllm_like.kernels.mha import mha
from mla_trtllm_like.kernels.mqa_columns import mqa_columns
from mla_trtllm_like.kernels.mqa_rows import mqa_rows
from mla_trtllm_like.kernels.rope_append import rope_append
from mla_trtllm_like.kernels.schedule import plan_parts
from mla_trtllm_like.tuning import mha_shape, mqa_shape

# Bytes of shared memory a program may use, by architecture.
SHARED_MEMORY = {80: 166912, 89: 101376, 90: 232448}
_ELEMENTS = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32"}
_INT32 = {"table", "query_start", "key_start", "key_lens", "first_request"}
_INT64 = {"bounds", "span_at", "span_out", "slots"}
_FLOAT = {"lse", "partial", "partial_lse", "cos", "sin"}
_VALUES = {"query", "out", "key", "value", "latent"}
_WIDTHS = {"LATENT": 512, "ROPE": 64, "LATENT_PAD": 512, "ROPE_PAD": 64, "PAGE_SIZE": 64}
_UNIT = re.compile(r"(_stride_[xev]|unit_stride|slot_stride)$")
_ALIGNED = re.compile(r"(query|key|value|out|latent)_stride_[th]$|(page|token)_stride$")


def compile_kernel(
    kernel: Any, arch: int, dtype: str, layout: str, constants: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Shared memory and, read from ptxas, spilled bytes."""
    names = kernel.arg_names
    constants = constants | {name: 1 for name in names if _UNIT.search(name)}
    constants = {name: value for name, value in constants.items() if name in names}
    types = {name: "constexpr" if name in constants else _type(name, dtype, layout) for name in names}
    aligned = [name for name in names if types[name].startswith("*") or _ALIGNED.search(name)]
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants
    }
    source = ASTSource(kernel, types, constants, attributes)
    options = {"enable_fp_fusion": True, **options}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return {"shared": built.metadata.shared, "spilled": _spilled(built.asm["ptx"], arch)}


def _type(name: str, dtype: str, layout: str) -> str:
    if name in _VALUES:
        return _ELEMENTS[dtype]
    if name == "data":
        return _ELEMENTS.get(layout, "*u8")
    for names, kind in ((_INT32, "*i32"), (_INT64, "*i64"), (_FLOAT, "*fp32")):
        if name in names:
            return kind
    return "fp32" if name.endswith("_scale") else "i32"


def _spilled(ptx: str, arch: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx, encoding="utf-8")
        gpu = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
        command = [
            get_ptxas(arch).path,
            "-v",
            f"--gpu-name={gpu}",
            str(path),
            "-o",
            str(path) + ".o",
        ]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", report))


def compile_mqa(arch: int, dtype: str, layout: str, max_rows: int) -> dict[str, Any]:
    packed = layout not in _ELEMENTS
    shape = mqa_shape("auto", max_rows, 4 if dtype == "fp32" else 2, packed, SHARED_MEMORY[arch])
    kernel = {"rows": mqa_rows, "columns": mqa_columns}[shape.form]
    constants = _WIDTHS | {
        "LAYOUT": layout if packed else "plain", "TYPED": True, "CAUSAL": True, "HAS_LSE": True,
        "GROUP": shape.group, "ROWS": shape.rows, "KEYS": shape.keys, "DEPTH": shape.depth,
    }  # fmt: skip
    options = {"num_warps": shape.warps, "num_stages": shape.depth}
    return compile_kernel(kernel, arch, dtype, layout, constants, options)


def compile_mha(arch: int, dtype: str) -> dict[str, Any]:
    shape = mha_shape(4 if dtype == "fp32" else 2, SHARED_MEMORY[arch])
    constants = {
        "CAUSAL": True, "HAS_LSE": True, "WIDTH": 192, "HEAD_PAD": 128, "REST_PAD": 64, "VALUE": 128,
        "VALUE_PAD": 128, "ROWS": shape.rows, "KEYS": shape.keys, "DEPTH": shape.depth,
    }  # fmt: skip
    return compile_kernel(
        mha, arch, dtype, "", constants, {"num_warps": shape.warps, "num_stages": shape.depth}
    )


def compile_rope(arch: int, layout: str, style: str) -> dict[str, Any]:
    constants = _WIDTHS | {
        "LAYOUT": "plain" if layout in _ELEMENTS else layout, "STYLE": style, "POWER_OF_TWO": True,
        "HEADS": 16,
    }  # fmt: skip
    return compile_kernel(
        rope_append, arch, "bf16", layout, constants, {"num_warps": 2, "enable_fp_fusion": False}
    )


def compile_schedule(arch: int) -> dict[str, Any]:
    return compile_kernel(plan_parts, arch, "bf16", "", {"TILE_ROWS": 128, "KEYS": 64, "CHUNK": 1024}, {})


def compile_combine(arch: int) -> dict[str, Any]:
    constants = _WIDTHS | {"HAS_LSE": True, "TILE_ROWS": 128, "KEYS": 64, "ROWS": 4}
    return compile_kernel(combine, arch, "bf16", "", constants, {})


VARIANTS = {
    "many heads, bf16": lambda arch: compile_mqa(arch, "bf16", "bf16", 128),
    "many heads, fp8_ds_mla": lambda arch: compile_mqa(arch, "bf16", "fp8_ds_mla", 128),
    "few heads, bf16": lambda arch: compile_mqa(arch, "bf16", "bf16", 16),
    "few heads, nvfp4": lambda arch: compile_mqa(arch, "bf16", "nvfp4", 16),
    "32 rows, bf16": lambda arch: compile_mqa(arch, "bf16", "bf16", 32),
    "float32": lambda arch: compile_mqa(arch, "fp32", "fp32", 128),
    "prefill, bf16": lambda arch: compile_mha(arch, "bf16"),
    "prefill, float32": lambda arch: compile_mha(arch, "fp32"),
    "rope and append, bf16": lambda arch: compile_rope(arch, "bf16", "interleaved"),
    "rope and append, fp8_ds_mla": lambda arch: compile_rope(arch, "fp8_ds_mla", "half_split"),
    "rope and append, nvfp4": lambda arch: compile_rope(arch, "nvfp4", "interleaved"),
    "schedule": compile_schedule,
    "combine": compile_combine,
}


if __name__ == "__main__":
    arch = int(sys.argv[1])
    json.dump({name: build(arch) for name, build in VARIANTS.items()}, sys.stdout)
