"""`preread config`: every setting, where it comes from and what it is for, and whether one could start with them; and the table
of token ids that belongs into the data folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.api.token_ids import install_table
from serving.cli_output import Json, show, table
from serving.oidc_file import read_oidc
from serving.settings import PREFIX, Given, Settings, given_settings, load_settings
from storage.catalogue.engine import parse_url
from storage.errors import PrereadError, UserError
from storage.policy.file import read_policy
from storage.policy.source import PolicyError

app = typer.Typer(help="The settings of this installation.", no_args_is_help=True, rich_markup_mode=None)
MISTAKES = 2  # exit code
HIDDEN = "(set)"


@app.command()
def check(as_json: Json = False) -> None:
    """Explain each setting, and say what is wrong with them. Connects to nothing and changes nothing."""
    given = given_settings()
    settings = load_settings()
    mistakes = [mistake for probe in PROBES if (mistake := _mistake(probe, settings)) is not None]
    found = {"settings": [_row(each, settings, given) for each in fields(Settings)], "mistakes": mistakes}
    show(found, as_json, _lines)
    if mistakes:
        raise typer.Exit(MISTAKES)


@app.command()
def token_table(file: Annotated[Path, typer.Argument(help="The table, as tiktoken has it in its cache.")]) -> None:
    """Lay OpenAI's cl100k_base, which clients' token ids for embeddings are of, into the data folder."""
    typer.echo(f"installed {install_table(file, load_settings().data_dir)}")


def _row(field: Any, settings: Settings, given: dict[str, Given]) -> dict[str, Any]:
    value = getattr(settings, field.name)
    shown = HIDDEN if field.metadata["secret"] and value else str(value) if isinstance(value, Path) else value
    where = given[field.name].where if field.name in given else "default"
    if field.name in ("database_url", "broker_url"):
        shown = _without_password(shown)
    return {"name": PREFIX + field.name.upper(), "value": shown, "from": where, "about": field.metadata["about"]}


def _without_password(url: str) -> str:
    scheme, found, rest = url.partition("://")
    who, at, place = rest.rpartition("@")
    return f"{scheme}://{who.split(':')[0]}:***@{place}" if found and at and ":" in who else url


def _lines(found: dict[str, Any]) -> str:
    rows: list[list[object]] = [["setting", "value", "from", "what it is for"]]
    rows += [[row["name"], row["value"] if row["value"] != "" else "-", row["from"], row["about"]] for row in found["settings"]]
    return "\n".join([table(rows, ""), "", *found["mistakes"], *(() if found["mistakes"] else ("No mistake was found.",))])


def _mistake(probe: Callable[[Settings], None], settings: Settings) -> str | None:
    try:
        probe(settings)
    except PolicyError as refused:
        return f"{PREFIX}POLICY_FILE: {refused.mistakes[0]}"
    except PrereadError as error:
        return str(error)
    return None


def _database(settings: Settings) -> None:
    parse_url(settings.database)


def _policy(settings: Settings) -> None:
    if settings.policy_file:
        read_policy(Path(settings.policy_file))


def _logins(settings: Settings) -> None:
    if settings.oidc_file:
        read_oidc(Path(settings.oidc_file))


def _models(settings: Settings) -> None:
    for name in ("model", "embedder", "reranker"):
        value = getattr(settings, name)
        if value not in ("", "embedded") and not Path(value).is_dir():
            raise UserError(f"{PREFIX}{name.upper()}: there is no folder {value!r}; a model is a folder on disk")


def _roots(settings: Settings) -> None:
    for root in filter(None, settings.source_roots.split(":")):
        if not Path(root).is_dir():
            raise UserError(f"{PREFIX}SOURCE_ROOTS: there is no folder {root!r}")


PROBES = (_database, _policy, _logins, _models, _roots)
