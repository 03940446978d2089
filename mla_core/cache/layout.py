"""Names of layouts: the one place that knows them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from mla_core.cache.base import Layout
from mla_core.cache.ds_mla import DsMlaLayout
from mla_core.cache.fp8 import Fp8Layout
from mla_core.cache.index_fp8 import IndexFp8Layout
from mla_core.cache.nvfp4 import Nvfp4Layout, Nvfp4RopeBf16Layout
from mla_core.cache.plain import PlainLayout
from mla_core.cache.scales import Scales
from mla_core.errors import CacheError

__all__ = ["Layout", "Scales", "layout_for", "layout_ids"]

_PLAIN = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LAYOUTS: dict[str, Callable[[str, int, int], Layout]] = {
    **{name: partial(PlainLayout, element=element) for name, element in _PLAIN.items()},
    "fp8_e4m3": Fp8Layout,
    "fp8_ds_mla": DsMlaLayout,
    "nvfp4": Nvfp4Layout,
    "nvfp4_rope_bf16": Nvfp4RopeBf16Layout,
    "idx_fp8": IndexFp8Layout,
}


def layout_ids() -> list[str]:
    """Names that `layout_for` knows, besides "auto"."""
    return list(_LAYOUTS)


def layout_for(name: str, dtype: torch.dtype, latent: int, rope: int) -> Layout:
    """The one place that turns a user's cache name into a layout; "auto" stores the layer's own dtype.

    Raises CacheError for a name that does not exist, and for widths that the layout cannot hold.
    """
    if name == "auto":
        name = _name_of(dtype)
    if name not in _LAYOUTS:
        raise CacheError(f"unknown cache layout {name!r}; known layouts: auto, {', '.join(layout_ids())}")
    try:
        return _LAYOUTS[name](name, latent, rope)
    except CacheError as refusal:
        raise CacheError(f"{refusal}; layouts that fit: {', '.join(_fitting(latent, rope))}") from None


def _name_of(dtype: torch.dtype) -> str:
    for name, element in _PLAIN.items():
        if element == dtype:
            return name
    known = ", ".join(str(element) for element in _PLAIN.values())
    raise CacheError(f"cache 'auto' stores the layer's own dtype, which must be one of {known}, not {dtype}")


def _fitting(latent: int, rope: int) -> list[str]:
    return [name for name in layout_ids() if _fits(name, latent, rope)]


def _fits(name: str, latent: int, rope: int) -> bool:
    try:
        _LAYOUTS[name](name, latent, rope)
    except CacheError:
        return False
    return True
