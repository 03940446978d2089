"""The formats of quantised checkpoint weights, and which one a module's tensors are in.

Presence of tensors decides, never a list of names in a config. W is the weight, N by K.
fp8:           weight e4m3; weight_scale_inv or weight_scale, for all, a row, or a block; W = weight * scale
nvfp4:         weight uint8, two columns a byte; weight_scale e4m3 per 16 columns; weight_scale_2
               W = e2m1 * (weight_scale * weight_scale_2)
nvfp4_packed:  the same as weight_packed, and weight_global_scale: W = e2m1 * (weight_scale / global_scale)
int4_packed:   weight_packed int32, eight columns a word; weight_scale per group; W = (nibble - 8) * scale
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mla_core.quant import e2m1, e4m3, int4, nvfp4
from mla_core.quant.weight import Format, Part, QuantisedWeight, Tensors, times

__all__ = [
    "INPUT_NAMES",
    "WEIGHT_NAMES",
    "fp8",
    "int4_packed",
    "is_quantised",
    "nvfp4_packed",
    "nvfp4_plain",
    "read",
]

# Tensors of a module that are there only when its weight is quantised.
WEIGHT_NAMES = frozenset(
    {
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_scale_2",
        "weight_global_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
    }
)
# The static step of the module's input, and its inverse.
INPUT_NAMES = frozenset({"input_scale", "input_global_scale"})

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_STEPS = (torch.float32, torch.bfloat16, torch.float16)
_POWERS = (torch.float8_e8m0fnu,)


def fp8(scale: str, rows: int, columns: int) -> Format:
    """One scale, under this name, for every block of rows by columns; 0 for all."""
    parts = {"weight": Part(1, 1, _FP8), scale: Part(rows, columns, _STEPS + _POWERS)}
    return Format("fp8", parts, _decode_fp8)


def nvfp4_plain() -> Format:
    """As modelopt writes it: the scale of the whole tensor multiplies."""
    return Format("nvfp4", _nvfp4_parts("weight", "weight_scale_2"), _decode_nvfp4, fp4=True)


def nvfp4_packed() -> Format:
    """As compressed-tensors writes it: the scale of the whole tensor divides."""
    parts = _nvfp4_parts("weight_packed", "weight_global_scale")
    return Format("nvfp4_packed", parts, _decode_nvfp4_packed, fp4=True)


def int4_packed(group: int) -> Format:
    """One scale for every `group` columns of a row; 0 for the whole row."""
    parts = {
        "weight_packed": Part(1, int4.PER_WORD, (torch.int32,)),
        "weight_scale": Part(1, group, _STEPS),
    }
    return Format("int4_packed", parts, _decode_int4)


def is_quantised(given: Tensors) -> bool:
    """Is a module with these tensors (by name after the module's) quantised?"""
    weight = given.get("weight")
    return not WEIGHT_NAMES.isdisjoint(given) or (weight is not None and weight.dtype.itemsize < 2)


def read(
    given: Tensors, shape: tuple[int, int], block: tuple[int, int]
) -> tuple[QuantisedWeight | None, list[str]]:
    """The weight [N, K] that a module's tensors hold, or what is wrong with them.

    block: rows and columns of a block where scales are per block; only the config knows.
    """
    found = _recognise(given, shape, block)
    if found is None:
        names = ", ".join(f"{name} ({_type(given[name])})" for name in sorted(given))
        return None, [f"has the tensors {names}, which is no known format of a quantised weight"]
    problems = _problems(given, found, shape)
    if problems:
        return None, problems
    tensors = {name: given[name].reshape(part.shape(shape)) for name, part in found.parts.items()}
    return QuantisedWeight(found, tensors, shape, input_scale=_input_scale(given)), []


def _recognise(given: Tensors, shape: tuple[int, int], block: tuple[int, int]) -> Format | None:
    if "weight_packed" in given:
        if "weight_global_scale" in given:
            return nvfp4_packed()
        is_words = given["weight_packed"].dtype == torch.int32
        return int4_packed(_group(given.get("weight_scale"), shape)) if is_words else None
    if "weight_scale_2" in given:
        return nvfp4_plain()
    if "weight" not in given or given["weight"].dtype in _FP8:
        name = "weight_scale" if "weight_scale" in given else "weight_scale_inv"
        return fp8(name, *_scale_block(given.get(name), shape, block))
    return None


def _scale_block(scale: Tensor | None, shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that one scale covers, from how many scales there are."""
    if scale is not None and scale.numel() == 1:
        return 0, 0
    if scale is not None and _essential(scale.shape) == (shape[0],):
        return 1, 0
    return block


def _group(scale: Tensor | None, shape: tuple[int, int]) -> int:
    """Columns a scale covers, for as many scales a row as there are; 0: one scale a row."""
    groups = 1 if scale is None else max(1, scale.numel() // shape[0])
    return 0 if groups == 1 else shape[1] // groups


def _problems(given: Tensors, found: Format, shape: tuple[int, int]) -> list[str]:
    """Every tensor that is missing, of a wrong type or shape, or not of this format."""
    problems = []
    for name, part in found.parts.items():
        wanted = part.shape(shape)
        if name not in given:
            problems.append(f"lacks {name} {list(wanted)}, which the format {found.id} needs")
            continue
        if _essential(given[name].shape) != _essential(wanted):
            covers = f" for blocks of {part.rows} x {part.columns}" if min(part.steps) > 1 else ""
            problems.append(f"{name} has shape {list(given[name].shape)}, expected {list(wanted)}{covers}")
        if given[name].dtype not in part.dtypes:
            types = " or ".join(_name(dtype) for dtype in part.dtypes)
            problems.append(f"{name} is {_type(given[name])}, expected {types}")
    stored = given.get("weight_shape")
    if found.id == "int4_packed" and stored is not None and tuple(stored.tolist()) != shape:
        problems.append(f"weight_shape says {stored.tolist()}, expected {list(shape)}")
    known = found.parts.keys() | INPUT_NAMES | ({"weight_shape"} if found.id == "int4_packed" else set())
    problems += [
        f"has {name}, which the format {found.id} does not know" for name in sorted(given.keys() - known)
    ]
    return problems


def _input_scale(given: Tensors) -> Tensor | None:
    """The step of the input in float32: what its largest value is divided by, as far as 6 * 448 goes."""
    if "input_global_scale" in given:
        return given["input_global_scale"].float().reshape(()).reciprocal()
    return given["input_scale"].float().reshape(()) if "input_scale" in given else None


def _essential(shape: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its ones: writers differ in [N], [N, 1] and [N, 1, 1, 1]."""
    return tuple(size for size in shape if size != 1)


def _nvfp4_parts(codes: str, scale: str) -> dict[str, Part]:
    return {
        codes: Part(1, 2, (torch.uint8,)),
        "weight_scale": Part(1, nvfp4.GROUP, (torch.float8_e4m3fn,)),
        scale: Part(0, 0, (torch.float32,)),
    }


def _decode_fp8(tensors: Tensors, parts: Mapping[str, Part]) -> Tensor:
    (name,) = parts.keys() - {"weight"}
    codes = tensors["weight"]
    values = e4m3.decode(codes) if codes.dtype == torch.float8_e4m3fn else codes.float()
    return times(values, tensors[name], parts[name])


def _decode_nvfp4(tensors: Tensors, parts: Mapping[str, Part]) -> Tensor:
    steps = tensors["weight_scale"].float() * tensors["weight_scale_2"]
    return times(e2m1.decode_pairs(tensors["weight"]), steps, parts["weight_scale"])


def _decode_nvfp4_packed(tensors: Tensors, parts: Mapping[str, Part]) -> Tensor:
    steps = tensors["weight_scale"].float() / tensors["weight_global_scale"]
    return times(e2m1.decode_pairs(tensors["weight_packed"]), steps, parts["weight_scale"])


def _decode_int4(tensors: Tensors, parts: Mapping[str, Part]) -> Tensor:
    return times(int4.unpack(tensors["weight_packed"]), tensors["weight_scale"], parts["weight_scale"])


def _type(tensor: Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
