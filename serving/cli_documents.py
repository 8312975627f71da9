"""`preread documents` and `preread delete`: what a corpus holds, and its end."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from serving.cli_client import KeyFile, Url, connect, find_corpus
from serving.cli_output import Json, show, size, table
from storage.errors import NotFound, UserError

Corpus = Annotated[str, typer.Argument(help="Name or id of a corpus.")]


def register(app: typer.Typer) -> None:
    app.command()(documents)
    app.command()(delete)


def documents(corpus: Corpus, url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """List a corpus's documents."""
    api = connect(url, key_file)
    found = list(api.pages(f"/vector_stores/{find_corpus(api, corpus)['id']}/files"))
    show(found, as_json, _documents)


def delete(
    corpus: Corpus,
    path: Annotated[str | None, typer.Argument(help="A document's path or id; without it the whole corpus is deleted.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Delete a whole corpus without asking.")] = False,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Delete a document, or a whole corpus: text, vectors, words and stored KV. Says what went."""
    api = connect(url, key_file)
    store = find_corpus(api, corpus)
    place = f"/vector_stores/{store['id']}"
    if path is not None:
        held = [file["id"] for file in api.pages(f"{place}/files") if path in (file["path"], file["document_id"])]
        if not held:
            raise NotFound(f"{store['name']} has no document {path!r}: see `preread documents {corpus}`")
        place = f"{place}/files/{held[0]}"
    elif not yes and not typer.confirm(f"delete {store['name']} with {store['file_counts']['total']} documents?"):
        raise UserError("nothing was deleted")
    show(api.call("DELETE", place), as_json, _receipt)


def _documents(found: list[dict[str, Any]]) -> str:
    head = ("PATH", "STATUS", "SIZE", "ERROR")
    rows = [
        (f["path"] or f"{f['document_id']} (not open to you)", f["status"], size(f["usage_bytes"]),
         (f["last_error"] or {}).get("message", "")) for f in found
    ]  # fmt: skip
    return table([head, *rows], "no documents")


def _receipt(deleted: dict[str, Any]) -> str:
    counts = ", ".join(f"{count} {kind.replace('_', ' ')}" for kind, count in deleted["receipt"].items() if count)
    return f"deleted {deleted['id']}: {counts or 'nothing was stored'} (receipt: {deleted['job_id']})"
