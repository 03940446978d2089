"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

__all__ = ["Backend", "Cache", "DType", "Debug", "Json", "Model", "Positional", "PrefillForm", "examples"]

Positional = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="A preset, such as deepseek-v3, or a path.")
]
Model = Annotated[str | None, typer.Option(help="A preset, such as deepseek-v3.")]
Backend = Annotated[
    str | None,
    typer.Option(help='Such as "a|b" or "prefill=a;decode=b"; default: MLA_BACKEND, the config, then auto.'),
]
Cache = Annotated[str, typer.Option(help="Cache layout; auto stores the dtype.")]
DType = Annotated[Literal["float32", "float16", "bfloat16"], typer.Option(help="What the layer computes in.")]
PrefillForm = Annotated[
    Literal["auto", "expand", "absorb"], typer.Option(help="Attention over expanded keys, or over latents.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def examples(*lines: str) -> str:
    """The end of a help text; the mark keeps its lines apart."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
