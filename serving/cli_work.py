"""`preread ingest` and `preread sync`: documents into a corpus."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.cli_client import Api, KeyFile, Url, connect, ensure_corpus, find_corpus
from serving.cli_jobs import end, follow
from serving.cli_output import Json, note, show
from serving.cli_sources import changes
from storage.errors import UserError

if TYPE_CHECKING:
    from ingest.sources import Entry

SHOWN = 5
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the job to its end.")]


def register(app: typer.Typer) -> None:
    app.command()(ingest)
    app.command()(sync)
    app.command()(reindex)


def ingest(
    path: Annotated[Path, typer.Argument(help="A folder, a file, or an archive.")],
    corpus: Annotated[
        str | None, typer.Option(help="Name or id; made if absent. Default: PATH's name.")
    ] = None,
    wait: Wait = True,
    delete_missing: Annotated[
        bool, typer.Option("--delete-missing", help="Delete documents that the folder does not hold.")
    ] = False,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Upload a folder, file or archive into a corpus; what is there already costs nothing."""
    if not path.exists():
        raise UserError(f"there is no {path}")
    if delete_missing and not path.is_dir():
        raise UserError("--delete-missing goes with a folder")
    api = connect(url, key_file)
    entries = listed(path) if path.is_dir() else None  # before a corpus is made for nothing
    found = ensure_corpus(api, corpus or path.resolve().stem)
    if entries is None:
        started = _upload_one(api, found["id"], path)
    else:
        started = sync_folder(api, found["id"], path, entries, delete_missing=delete_missing)
    _finish(api, started, wait, as_json)


def sync(
    corpus: Annotated[str, typer.Argument(help="Name or id of a corpus that has a source.")],
    source: Annotated[
        Path | None, typer.Option(help="First set the source: a folder on the server that it may read.")
    ] = None,
    git: Annotated[bool, typer.Option("--git", help="The source is a git repository.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")] = False,
    wait: Wait = True,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Make a corpus like its source."""
    api = connect(url, key_file)
    if source is None:
        found = find_corpus(api, corpus)
    else:
        found = ensure_corpus(api, corpus)
        body = {"source": {"type": "git" if git else "folder", "path": str(source.resolve())}}
        api.call("PUT", f"/corpora/{found['id']}/sources", json=body)
    started = api.post(f"/corpora/{found['id']}/sync", {"delete_missing": True, "dry_run": dry_run})
    if not dry_run:
        _finish(api, started, wait, as_json)
        return
    job = follow(api, started["job_id"], as_json)
    if job["status"] != "completed":
        end(job, as_json)
    changes(api, found["id"], job, as_json)


def reindex(
    corpus: Annotated[str, typer.Argument(help="Name or id of a corpus.")],
    wait: Wait = True,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Embed a corpus again after the embedding model was changed; its KV stays."""
    api = connect(url, key_file)
    job = api.post(f"/corpora/{find_corpus(api, corpus)['id']}/reindex", {})
    _finish(api, {**job, "job_id": job["id"]}, wait, as_json)


def listed(folder: Path) -> list[Entry]:
    """A folder's documents; those left out are named. Raises UserError if there is none."""
    from ingest.sources import FolderSource

    source = FolderSource(folder)
    entries = [entry for entry in source.manifest() if _is_text(entry.path, source.skipped)]
    for left in source.skipped[:SHOWN]:
        note(f"skipped {left.path}: {left.reason}")
    if len(source.skipped) > SHOWN:
        note(f"skipped {len(source.skipped) - SHOWN} more")
    if not entries:
        raise UserError(f"{folder} holds no document")
    return entries


def sync_folder(
    api: Api, corpus_id: str, folder: Path, entries: Sequence[Entry], *, delete_missing: bool = False
) -> dict[str, Any]:
    """Announce a folder's documents, and upload those that the corpus lacks; the sync's answer."""
    manifest = [{"path": e.path, "sha256": e.sha256, "bytes": e.bytes} for e in entries]
    body = {"manifest": manifest, "delete_missing": delete_missing}
    started: dict[str, Any] = api.post(f"/corpora/{corpus_id}/sync", body)
    digests, sent = {entry.path: entry.sha256 for entry in entries}, set[str]()
    for path in _progress([*started["added"], *started["modified"]]):
        if digests[path] not in sent:
            api.upload(folder / path, path)
            sent.add(digests[path])
    return started


def _is_text(path: str, skipped: list[Any]) -> bool:
    """A name that is no text in any encoding cannot be sent, nor asked for."""
    from ingest.sources import Left

    if path.isprintable() or path == path.encode("utf-8", "replace").decode():
        return True
    skipped.append(Left(path.encode("utf-8", "backslashreplace").decode(), "its name is not text"))
    return False


def _upload_one(api: Api, corpus_id: str, path: Path) -> dict[str, Any]:
    """A single document or archive, at its own name."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    entry = {"path": path.name, "sha256": digest, "bytes": path.stat().st_size}
    started: dict[str, Any] = api.post(f"/corpora/{corpus_id}/sync", {"manifest": [entry]})
    if started["added"] or started["modified"]:
        api.upload(path, path.name)
    return started


def _progress(paths: Sequence[str]) -> Iterator[str]:
    """The paths, with a bar where a person watches."""
    if not sys.stderr.isatty() or len(paths) < 2:
        yield from paths
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(paths, "uploading", console=Console(stderr=True), transient=True)


def _finish(api: Api, started: dict[str, Any], wait: bool, as_json: bool) -> None:
    if wait:
        end(follow(api, started["job_id"], as_json), as_json)
    else:
        show(started, as_json, lambda s: f"{s['job_id']} has begun: preread jobs {s['job_id']} --wait")
