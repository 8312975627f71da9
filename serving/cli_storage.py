"""`preread storage`: what is stored."""

from __future__ import annotations

import typer

from serving import cli_storage_view

app = typer.Typer(help="Stored KV: show.", no_args_is_help=True, rich_markup_mode=None)
cli_storage_view.register(app)


@app.callback()
def _group() -> None:
    """Keeps this a group while it has one command."""
