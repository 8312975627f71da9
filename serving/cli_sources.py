"""`preread source`: where corpora are synced from, and the hook by which a git host tells of pushes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from serving.cli_client import Api, KeyFile, Url, connect, ensure_corpus, find_corpus
from serving.cli_output import Json, note, show, table
from storage.errors import UserError

app = typer.Typer(help="Sources of corpora: add, list, remove, hook.", no_args_is_help=True, rich_markup_mode=None)
Corpus = Annotated[str, typer.Argument(help="Name or id of the corpus.")]
PATHS_SHOWN = 20


@app.command()
def add(
    corpus: Annotated[str, typer.Argument(help="Name or id of the corpus; made if absent.")],
    where: Annotated[
        str, typer.Argument(metavar="WHERE", help="A folder of the server, a git repository (https://…), or s3://bucket/prefix.")
    ],
    git: Annotated[bool, typer.Option("--git", help="WHERE is a git repository in a folder of the server.")] = False,
    url_list: Annotated[bool, typer.Option("--list", help="WHERE is the address of a list of URLs.")] = False,
    ref: Annotated[str | None, typer.Option(help="Branch, tag or commit; default: HEAD.")] = None,
    credential: Annotated[str | None, typer.Option(help="Name of a credential that the operator has put down.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Address of an S3 store that is not AWS.")] = None,
    region: Annotated[str | None, typer.Option(help="The S3 region.")] = None,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Say where a corpus is synced from, in place of what was said before."""
    source = {**_place(where, git, url_list), "ref": ref, "credential": credential, "endpoint": endpoint, "region": region}
    api = connect(url, key_file)
    body = {"source": {name: value for name, value in source.items() if value is not None}}
    made = api.call("PUT", f"/corpora/{ensure_corpus(api, corpus)['id']}/sources", json=body)
    show(made, as_json, lambda _: f"{corpus} is synced from {where}: preread sync {corpus} --dry-run")


@app.command("list")
def list_(url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """List the corpora that have a source."""
    api = connect(url, key_file)
    corpora = [{**corpus, **api.get(f"/corpora/{corpus['id']}/sources")} for corpus in api.pages("/vector_stores")]
    show([each for each in corpora if each["source"]], as_json, _listed)


@app.command()
def remove(corpus: Corpus, url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """Sync a corpus from nowhere any more; its documents stay."""
    api = connect(url, key_file)
    gone = api.call("PUT", f"/corpora/{find_corpus(api, corpus)['id']}/sources", json={"source": None})
    show(gone, as_json, lambda _: f"{corpus} has no source any more")


@app.command()
def hook(
    corpus: Corpus,
    off: Annotated[bool, typer.Option("--remove", help="Heed no more pushes.")] = False,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Make the address and secret to give to a git host, so that a push starts a sync; shown this once."""
    api = connect(url, key_file)
    path = f"/corpora/{find_corpus(api, corpus)['id']}/hook"
    if off:
        show(api.call("DELETE", path), as_json, lambda _: f"pushes do not sync {corpus} any more")
        return
    made = api.call("POST", path)
    show(made, as_json, lambda made: f"{api.address}{made['path']}\nsecret: {made['secret']}")
    if not as_json:
        note("give both to the git host, with the content type application/json; the secret is not shown again")


def changes(api: Api, corpus_id: str, job: dict[str, Any], as_json: bool) -> None:
    """Show what a dry run has found."""
    show(api.get(f"/corpora/{corpus_id}/syncs/{job['id']}"), as_json, lambda sync: _found(sync["found"]))


def _place(where: str, git: bool, url_list: bool) -> dict[str, str]:
    if git and url_list:
        raise UserError("--git and --list do not go together")
    if where.startswith("s3://"):
        return {"type": "s3", "url": where}
    if url_list:
        return {"type": "http", "url": where}
    if "://" in where:
        return {"type": "git", "url": where}
    return {"type": "git" if git else "folder", "path": str(Path(where).resolve())}


def _listed(corpora: list[dict[str, Any]]) -> str:
    rows = [
        (each["name"], source["type"], source.get("url") or source["path"], source.get("ref", "-"), source.get("credential", "-"))
        for each in corpora
        for source in (each["source"],)
    ]
    return table([("CORPUS", "TYPE", "WHERE", "REF", "CREDENTIAL"), *rows], "no sources")


def _found(found: dict[str, Any]) -> str:
    lines = [f"unchanged {found['unchanged_count']}"]
    for kind in ("added", "modified", "deleted"):
        lines += _some(kind, found[kind])
    lines += _some("renamed", [f"{each['from']} -> {each['to']}" for each in found["renamed"]])
    lines += _some("skipped", [f"{each['path']}: {each['reason']}" for each in found["skipped"]])
    return "\n".join(lines)


def _some(kind: str, paths: list[str]) -> list[str]:
    more = [f"  and {len(paths) - PATHS_SHOWN} more"] if len(paths) > PATHS_SHOWN else []
    return [f"{kind} {len(paths)}", *(f"  {path}" for path in paths[:PATHS_SHOWN]), *more]
