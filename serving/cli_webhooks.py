"""`preread webhook`: addresses that are told of the ends of jobs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from serving.cli_client import KeyFile, Url, connect
from serving.cli_output import Json, note, show, table

app = typer.Typer(help="Webhooks: add, list, show, remove.", no_args_is_help=True, rich_markup_mode=None)
Id = Annotated[str, typer.Argument(metavar="ID")]


@app.command()
def add(
    address: Annotated[str, typer.Argument(metavar="URL", help="Where to tell; its host must be in PREREAD_ALLOWED_HOSTS.")],
    event: Annotated[list[str] | None, typer.Option(help="job.completed, job.failed, …; may be repeated; default: all.")] = None,
    corpus: Annotated[list[str] | None, typer.Option(help="Only these, by name or id; may be repeated.")] = None,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Have an address told of the ends of jobs; the secret to verify it with is shown this once."""
    body = {"url": address, "events": event or None, "corpora": corpus or None}
    made = connect(url, key_file).post("/webhooks", body)
    show(made, as_json, lambda made: f"{made['id']}  {made['secret']}")
    if not as_json:
        note("the secret is not shown again; `client.webhooks.unwrap` of the openai package takes it")


@app.command("list")
def list_(url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """List the webhooks."""
    show(connect(url, key_file).get("/webhooks")["data"], as_json, _listed)


@app.command("show")
def show_(webhook_id: Id, url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Show a webhook's newest deliveries."""
    show(connect(url, key_file).get(f"/webhooks/{webhook_id}"), as_json, _deliveries)


@app.command()
def remove(webhook_id: Id, url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Tell an address nothing any more."""
    show(connect(url, key_file).call("DELETE", f"/webhooks/{webhook_id}"), as_json, lambda _: f"removed {webhook_id}")


def _listed(webhooks: list[dict[str, Any]]) -> str:
    head = ("ID", "URL", "EVENTS", "CORPORA")
    rows = [
        (w["id"], w["url"], ",".join(w["events"]), "all" if w["corpora"] is None else ",".join(w["corpora"])) for w in webhooks
    ]
    return table([head, *rows], "no webhooks")


def _deliveries(webhook: dict[str, Any]) -> str:
    head = ("EVENT", "JOB", "STATUS", "ATTEMPTS", "ANSWER")
    rows = [(d["type"], d["job_id"], d["status"], d["attempts"], d["answer"] or "-") for d in webhook["deliveries"]]
    return table([head, *rows], "nothing was told yet")
