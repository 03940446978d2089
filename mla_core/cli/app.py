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


@app.command(
    epilog=parameter.examples(
        "mla matrix",
        "mla matrix vanilla --format html --write matrix.html",
        "mla matrix vanilla --write docs/capability-matrix.md",
        "mla matrix vanilla --check docs/capability-matrix.md",
    )
)
def matrix(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Backends; default: all installed ones.")
    ] = None,
    evidence: Annotated[Path, typer.Option(help="Folder of reports of conformance runs.")] = Path(
        "docs/evidence"
    ),
    style: Annotated[
        Literal["text", "md", "json", "html"] | None,
        typer.Option("--format", help="Default: text, or what the name of the file says."),
    ] = None,
    write: Annotated[Path | None, typer.Option(help="Write it to this file.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Compare this file with what it would be now; exit code 1: stale.")
    ] = None,
    as_json: parameter.Json = False,
    debug: parameter.Debug = False,
) -> None:
    """Show what every backend declares, and which claims a conformance run has verified."""
    from mla_core.cli import matrix as matrices
    from mla_core.registry import default

    with reporting(debug):
        found = matrices.matrix(default(), names or [], matrices.read_evidence(evidence))
        command = matrices.command_line(names or [], evidence, write or check)
        if check is None:
            matrices.show(found, "json" if as_json else style, write, command)
            return
        stale = matrices.check(found, check, command)
    if stale:
        typer.echo("\n".join([*stale[:40], f"{check} is stale; write it again with: {command}"]), err=True)
        raise typer.Exit(FAILED)


@app.command(
    epilog=parameter.examples(
        "mla conformance vanilla", "mla conformance vanilla --quick --report docs/evidence/vanilla-cpu.json"
    )
)
def conformance(
    name: Annotated[str, typer.Argument(help="A backend as mla list names it, with options or without.")],
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:sm_90a; default: the best declared one here.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and mixes.")] = False,
    require_verified: Annotated[
        bool, typer.Option("--require-verified", help="An unverified cell fails.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write the evidence to this JSON file.")] = None,
    known_gaps: Annotated[
        Path | None, typer.Option(help="Default: known_gaps.toml of the plugin's package.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the pairwise mixes.")] = 0,
    timeout: Annotated[float, typer.Option(help="Time limit of one cell, in seconds.")] = 120.0,
    as_json: parameter.Json = False,
    debug: parameter.Debug = False,
) -> None:
    """Try every claim of a backend and its refusals. Exit code 1: some are not true."""
    from mla_core.cli.conformance import run as run_conformance
    from mla_core.conformance.session import Options

    with reporting(debug):
        options = Options(
            backend=name,
            device=device,
            quick=quick,
            seed=seed,
            seconds=timeout,
            require_verified=require_verified,
            known_gaps=known_gaps,
        )
        result, row = run_conformance(options, report)
        if as_json:
            print_json(result.report.model_dump(mode="json") | {"problems": list(result.problems)})
        else:
            typer.echo("\n".join([*result.lines(), "", *row]))
    if result.problems:
        raise typer.Exit(FAILED)


@app.command(epilog=parameter.examples("mla new my_backend", "mla new my_backend --into ~/plugins"))
def new(
    name: Annotated[str, typer.Argument(help="Of the backend: small letters, digits, underscores.")],
    into: Annotated[Path, typer.Option(help="Where the package's folder is made.")] = Path(),
    debug: parameter.Debug = False,
) -> None:
    """Write a complete plugin package: manifest, one kernel, tests, CI. It passes its tests as it is."""
    from mla_core.cli.new import create
    from mla_core.registry import default

    with reporting(debug):
        files = create(name, into, default())
    folder = next(path.parent for path in files if path.name == "pyproject.toml")
    typer.echo("\n".join(f"wrote {path}" for path in sorted(files)))
    typer.echo(f"\nnext:\n  cd {folder}\n  pip install -e '.[test]'\n  mla conformance {name}\n  pytest")
