"""The command `mla`."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line; exits with 0, 1 when a check failed, 2 when what was asked cannot be done."""
    # Here, so that importing the entry point costs nothing.
    from mla_core.cli.app import app

    app()
