"""The command line's commands; each does its work in a module of its own.

Imports inside commands keep the others quick: listing plugins must not wait for what running a layer needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mla_core.cli import parameters as parameter
from mla_core.cli.console import FAILED, USAGE, print_json, reporting
from mla_core.cli.run_command import EXAMPLES as RUN_EXAMPLES
from mla_core.cli.run_command import run
from mla_core.errors import NoBackendFits

__all__ = ["app"]

app = typer.Typer(
    name="mla",
    help="Multi-head Latent Attention with pluggable backends.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: it keeps the examples' lines, and a narrow terminal hides nothing.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command(epilog=RUN_EXAMPLES)(run)


@app.command("list", epilog=parameter.examples("mla list", "mla list --json", "MLA_DISABLE=vanilla mla list"))
def list_plugins(as_json: parameter.Json = False, debug: parameter.Debug = False) -> None:
    """List every installed backend and sparse hook, and why one cannot be used."""
    from mla_core.cli import listing
    from mla_core.registry import default

    with reporting(debug):
        if as_json:
            print_json(listing.listing_json(default()))
        else:
            typer.echo("\n".join(listing.listing_lines(default())))


@app.command(epilog=parameter.examples("mla show vanilla", "mla show vanilla --json"))
def show(
    name: Annotated[str, typer.Argument(help="A backend or sparse hook, as mla list names it.")],
    as_json: parameter.Json = False,
    debug: parameter.Debug = False,
) -> None:
    """Show everything that one plugin declares."""
    from mla_core.cli import listing
    from mla_core.registry import default

    with reporting(debug):
        info = listing.find(default(), name)
        if as_json:
            print_json(info.model_dump(mode="json"))
        else:
            typer.echo("\n".join(listing.plugin_lines(info)))


@app.command(
    epilog=parameter.examples(
        "mla explain deepseek-v3",
        "mla explain --model deepseek-v3 --device cuda:sm_90 --cache nvfp4 --max-decode-query-len 4",
        "mla explain --config path/to/config.json --backend 'prefill=a;decode=b' --tp 8 --json",
    )
)
def explain(
    named: parameter.Positional = None,
    model: parameter.Model = None,
    config: Annotated[
        Path | None, typer.Option(help="A config.json, or the directory that holds it.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:sm_90a, ...; it need not be in this machine.")
    ] = "cpu",
    cache: parameter.Cache = "auto",
    dtype: parameter.DType = "bfloat16",
    backend: parameter.Backend = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens in a cache page; default: any.")] = None,
    max_decode_query_len: Annotated[int, typer.Option(help="1 + draft tokens.")] = 1,
    prefill_form: parameter.PrefillForm = "auto",
    tp: Annotated[int, typer.Option(help="Ranks that share the heads.")] = 1,
    as_json: parameter.Json = False,
    debug: parameter.Debug = False,
) -> None:
    """Tell which backend would serve each kernel of a layer, and why the others would not.

    Decides from declarations alone: no kernel is loaded. Exit code 2: nothing fits.
    """
    from mla_core.cli.explain import Question, plan_json, plan_lines, refusal_json
    from mla_core.cli.models import named_model

    with reporting(debug):
        preset, path = named_model(named, model, config)
        question = Question(
            model=preset,
            config=path,
            device=device,
            cache=cache,
            dtype=dtype,
            backend=backend,
            page_size=page_size,
            max_decode_query_len=max_decode_query_len,
            prefill_form=prefill_form,
            tp=tp,
        )
        if not as_json:
            typer.echo("\n".join(plan_lines(question.plan())))
            return
        try:
            print_json(plan_json(question.plan()))
        except NoBackendFits as refusal:
            print_json(refusal_json(refusal))
            raise typer.Exit(USAGE) from refusal


@app.command(
    epilog=parameter.examples(
        "mla inspect path/to/checkpoint",
        "mla inspect path/to/checkpoint --device cuda:sm_90a --cache fp8_ds_mla --json",
    )
)
def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(help="Directory with config.json or params.json, and *.safetensors files.")
    ],
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:sm_90a, ...; default: this machine's.")
    ] = None,
    cache: parameter.Cache = "auto",
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="What a layer would compute in; default: what the checkpoint says."),
    ] = None,
    tp: Annotated[int, typer.Option(help="Ranks that share the heads.")] = 1,
    as_json: parameter.Json = False,
    debug: parameter.Debug = False,
) -> None:
    """Show what a checkpoint's attention is: dims, quantisation, cache sizes, and who could serve it.

    Reads the headers of its files only. Exit code 1: its weights do not fit its config.
    """
    from mla_core.cli.inspect_options import InspectOptions
    from mla_core.registry import default

    with reporting(debug):
        # The torch wall: quantised formats and cache layouts are tensor rooms.
        from mla_core.cli import inspect_checkpoint, inspect_report

        options = InspectOptions(checkpoint, device, dtype, cache, tp)
        found = inspect_checkpoint.inspect(options, default())
        if as_json:
            print_json(inspect_report.inspection_json(found))
        else:
            typer.echo("\n".join(inspect_report.inspection_lines(found)))
    if found.problems:
        raise typer.Exit(FAILED)


@app.command(epilog=parameter.examples("mla doctor", "mla doctor --json"))
def doctor(as_json: parameter.Json = False, debug: parameter.Debug = False) -> None:
    """Look for what is broken in this installation, and say what to do. Exit code 1: something is."""
    from mla_core.cli.doctor import diagnose
    from mla_core.registry import default

    with reporting(debug):
        diagnosis = diagnose(default())
        if as_json:
            print_json(diagnosis.as_json())
        else:
            typer.echo(diagnosis)
    if diagnosis.problems:
        raise typer.Exit(FAILED)
