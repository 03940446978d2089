"""The command `mla run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mla_core.cli import parameters as parameter
from mla_core.cli.console import FAILED, print_json, progress_bar, quiet, reporting
from mla_core.cli.run_options import RunOptions, parse_layers
from mla_core.cli.scenario import EXAMPLE

__all__ = ["EXAMPLES", "run"]

EXAMPLES = parameter.examples(
    "mla run --model deepseek-v3 --dtype float32",
    "mla run path/to/checkpoint --layers 0-2 --backend vanilla",
    f"mla run deepseek-v2-lite --requests {EXAMPLE}",
)


def run(
    named: parameter.Positional = None,
    model: parameter.Model = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Directory with config.json and *.safetensors; only attention weights are read."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Layers to run: 0 or 0,1 or 0-3; default: the first that is MLA.")
    ] = None,
    backend: parameter.Backend = None,
    cache: parameter.Cache = "auto",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens in a cache page.")] = 64,
    dtype: parameter.DType = "bfloat16",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:0.")] = "cpu",
    prefill_form: parameter.PrefillForm = "auto",
    requests: Annotated[
        str | None,
        typer.Option(help="One step over PHASE:NEW+CACHEDxCOUNT, ... instead of the default scenario."),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text to embed as input; default: the checkpoint's heldout.txt, else random."),
    ] = None,
    workspace_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Cached tokens expanded at once; default 64, 8192 with --requests."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of weights, inputs and page order.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: as torch has it.")] = None,
    verify: Annotated[bool, typer.Option(help="Compare every output with the float64 oracle.")] = True,
    write: Annotated[
        Path | None, typer.Option(help="Keep a preset's random checkpoint in this new directory.")
    ] = None,
    as_json: parameter.Json = False,
    debug: parameter.Debug = False,
) -> None:
    """Run attention layers end to end over a paged cache, and check them against the oracle.

    A checkpoint's own weights, or a preset's dims with random weights that are written as a checkpoint
    and read back. The default scenario prefills a request, continues it by a chunk, decodes it, and mixes
    all phases in one step. Pages are shuffled; memory that no token was written to is NaN. Exit code 1: an
    output is wrong.
    """
    # Here, so that listing plugins does not wait for the presets.
    from mla_core.cli.models import named_model

    with reporting(debug):
        preset, directory = named_model(named, model, checkpoint)
        options = RunOptions(
            model=preset,
            checkpoint=directory,
            layers=None if layers is None else parse_layers(layers),
            backend=backend,
            cache=cache,
            page_size=page_size,
            dtype=dtype,
            device=device,
            prefill_form=prefill_form,
            requests=requests,
            text=text,
            workspace_tokens=workspace_tokens,
            seed=seed,
            threads=threads,
            verify=verify,
            write=write,
        )
        # The torch wall: no other command pays for this import.
        from mla_core.cli.runner import Runner

        show = quiet if as_json else progress_bar
        report = Runner(options, show, (lambda _: None) if as_json else typer.echo).run()
        if as_json:
            print_json(report.as_json())
        else:
            typer.echo(report)
    if report.verified is False:
        raise typer.Exit(FAILED)
