"""The `preread` command. Commands live in the cli_*.py files beside this one; errors end here."""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from serving import (
    cli_access,
    cli_ask,
    cli_backup,
    cli_config,
    cli_demo,
    cli_documents,
    cli_jobs,
    cli_keys,
    cli_plan,
    cli_policy,
    cli_server,
    cli_sites,
    cli_sources,
    cli_storage,
    cli_storage_view,
    cli_webhooks,
    cli_work,
)
from serving.cli_output import note
from storage.errors import PrereadError

USAGE_ERROR = 2
# Typer carries its own copy of click or uses the installed one, depending on its version.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
BENCH = "bench.cli"  # stands above this room, so it is loaded by name when asked for

app = typer.Typer(
    help="Let a language model read shared knowledge once.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for room in (cli_server, cli_work, cli_ask, cli_documents, cli_jobs, cli_plan, cli_demo, cli_backup):
    room.register(app)
app.add_typer(cli_keys.app, name="key")
app.add_typer(cli_config.app, name="config")
app.add_typer(cli_access.audit, name="audit")
app.add_typer(cli_access.tenant, name="tenant")
app.add_typer(cli_policy.app, name="policy")
app.add_typer(cli_storage.app, name="storage")
app.command()(cli_storage_view.usage)
app.add_typer(cli_sites.app, name="site")
app.add_typer(cli_sources.app, name="source")
app.add_typer(cli_webhooks.app, name="webhook")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"preread {version('preread')}")
        raise typer.Exit


@app.callback()
def preread(
    show_version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Let a language model read shared knowledge once."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context, arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None) -> None:
    """Measure: `preread bench blend|ttft|storage|loads|ingest|parse|s3|trace|plan|peers|search|retrieval --help`."""
    commands = importlib.import_module(BENCH).app
    commands([*(arguments or []), *context.args], prog_name="preread bench", standalone_mode=False)


def main() -> NoReturn:
    """Run the command line. Mistakes and refusals are one line on standard error and exit code 2."""
    # Before torch is loaded: threads that wait must sleep. Where two processes compute on the same cores, as the API
    # and a worker do, waiting by spinning makes both ten times slower (2 cores: 53 instead of 540 tokens/s each).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        code = app(prog_name="preread", standalone_mode=False)
    except _ClickException as error:
        _fail(error.format_message().replace("\n", " "))
    except PrereadError as error:
        _fail(str(error))
    except BrokenPipeError:
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str) -> NoReturn:
    note(f"preread: {message}")
    sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
