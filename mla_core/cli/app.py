"""The command line's commands; each does its work in a module of its own."""

from __future__ import annotations

import typer

from mla_core.cli import run_command

__all__ = ["app"]

app = typer.Typer(
    name="mla",
    help="Multi-head Latent Attention with pluggable backends.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _commands() -> None:
    """Multi-head Latent Attention with pluggable backends."""


app.command(
    name="run",
    epilog="Examples:  mla run deepseek-v3 --dtype float32",
)(run_command.run)
