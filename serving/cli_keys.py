"""`preread key`: API keys of the tenant."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from serving.cli_client import KeyFile, Url, connect
from serving.cli_output import Json, show, table

app = typer.Typer(help="API keys: create, list, revoke.", no_args_is_help=True, rich_markup_mode=None)


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="What the key is for.")] = "key",
    scope: Annotated[list[str] | None, typer.Option(help="read, write, admin or operator; may be repeated.")] = None,
    corpus: Annotated[
        list[str] | None, typer.Option(help="Only these corpora, by id; may be repeated.")
    ] = None,
    days: Annotated[float | None, typer.Option(help="After so many days it opens nothing.", min=0)] = None,
    principal: Annotated[
        list[str] | None, typer.Option(help="A name for access lists, e.g. group:legal; may be repeated.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Make a key; it is shown this once."""
    body: dict[str, Any] = {"name": name, "scopes": scope or ["read", "write"]}
    if corpus:
        body["corpora"] = corpus
    if days is not None:
        body["expires_at"] = time.time() + days * 86400
    more = {"principals": principal, "requests_per_minute": requests_per_minute, "tokens_per_minute": tokens_per_minute}
    body |= {name: value for name, value in more.items() if value is not None}
    made = connect(url, key_file).post("/api_keys", body)
    show(made, as_json, lambda k: f"{k['id']}  {k['key']}")


@app.command("list")
def list_(url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """List the keys, without their secrets."""
    keys = connect(url, key_file).get("/api_keys")["data"]
    show(keys, as_json, _listed)


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(metavar="ID")],
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Make a key useless from now on."""
    gone = connect(url, key_file).call("DELETE", f"/api_keys/{key_id}")
    show(gone, as_json, lambda _: f"revoked {key_id}")


def _listed(keys: list[dict[str, Any]]) -> str:
    head = ("ID", "NAME", "ENDS IN", "SCOPES", "CORPORA", "CREATED", "STATE")
    return table([head, *(_row(key) for key in keys)], "no keys")


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    corpora = "all" if key["corpora"] is None else ",".join(key["corpora"]) or "none"
    state = "active" if key["revoked_at"] is None else "revoked"
    if state == "active" and key["expires_at"] is not None and key["expires_at"] <= time.time():
        state = "expired"
    created = datetime.fromtimestamp(key["created_at"], UTC).strftime("%Y-%m-%d %H:%M")
    return key["id"], key["name"], key["hint"], ",".join(key["scopes"]), corpora, created, state
