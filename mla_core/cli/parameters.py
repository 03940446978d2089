"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

__all__ = ["Backend", "Cache", "DType", "Debug", "Json", "Model", "PrefillForm"]

Model = Annotated[str | None, typer.Option(help="A preset, such as deepseek-v3.")]
Backend = Annotated[
    str | None,
    typer.Option(help='Backend string, such as "a|b" or "prefill=a;decode=b"; default: MLA_BACKEND, then auto.'),
]
Cache = Annotated[str, typer.Option(help="Cache layout; auto stores the dtype.")]
DType = Annotated[Literal["float32", "float16", "bfloat16"], typer.Option(help="What the layer computes in.")]
PrefillForm = Annotated[
    Literal["auto", "expand", "absorb"], typer.Option(help="Attention over expanded keys, or over latents.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
