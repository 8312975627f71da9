"""`preread site`: which other sites may hold this one's stored KV."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from serving.cli_client import Api, KeyFile, Url, connect
from serving.cli_output import Json, note, show, table
from storage.errors import NotFound

app = typer.Typer(
    help="Sites that may hold this one's stored KV: add, list, push, remove.", no_args_is_help=True, rich_markup_mode=None
)
Name = Annotated[str, typer.Argument(help="The site's name.")]
Corpora = Annotated[list[str] | None, typer.Option("--corpus", help="Only these, by name or id; may be repeated.")]


@app.command()
def add(name: Name, corpus: Corpora = None, url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Register a site; its key is shown this once."""
    made = connect(url, key_file).post("/sites", {"name": name, "corpora": corpus or None})
    show(made, as_json, lambda site: f"PREREAD_PARENT_KEY={site['key']}")
    if not as_json:
        note("give this to the site, with PREREAD_PARENT_URL set to this server's https:// address; it is not shown again")


@app.command("list")
def list_(url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """List the sites, and how far they are with what was deleted here."""
    show(connect(url, key_file).get("/sites")["data"], as_json, _listed)


@app.command()
def push(name: Name, corpus: Corpora = None, url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Have a site hold all KV of these corpora (default: of all it may hold), from now on."""
    api = connect(url, key_file)
    pushed = api.post(f"/sites/{_id(api, name)}/push", {"corpora": corpus or None})
    show(pushed, as_json, lambda site: f"{name} holds all of {', '.join(site['pushed']) or 'nothing: there is no corpus'}")


@app.command()
def remove(name: Name, url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Give a site nothing any more; it stops using stored KV when its lease is over."""
    api = connect(url, key_file)
    show(api.call("DELETE", f"/sites/{_id(api, name)}"), as_json, lambda _: f"removed {name}")


def _id(api: Api, name: str) -> str:
    for site in api.get("/sites")["data"]:
        if name in (site["name"], site["id"]):
            return str(site["id"])
    raise NotFound(f"no site named {name!r}")


def _listed(sites: list[dict[str, Any]]) -> str:
    head = ("ID", "NAME", "CORPORA", "PUSHED", "LAST SEEN", "TO ERASE")
    return table([head, *(_row(site) for site in sites)], "no sites")


def _row(site: dict[str, Any]) -> tuple[str, ...]:
    corpora = "all" if site["corpora"] is None else ",".join(site["corpora"])
    seen = site["seen_at"]
    shown = "never" if seen is None else datetime.fromtimestamp(seen, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return site["id"], site["name"], corpora, ",".join(site["pushed"]) or "-", shown, str(site["tombstones_pending"])
