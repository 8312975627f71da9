"""`preread jobs` and `preread corpora`: what there is and how far it has come."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from serving.cli_client import Api, KeyFile, Url, connect, wait_job
from serving.cli_output import Json, note, show, size, table
from storage.errors import UserError

ERRORS_SHOWN = 10


def register(app: typer.Typer) -> None:
    app.command()(jobs)
    app.command()(corpora)


def jobs(
    job_id: Annotated[str | None, typer.Argument(metavar="[ID]", help="One job in full.")] = None,
    wait: Annotated[bool, typer.Option(help="Follow the job to its end.")] = False,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop the job; what it has done stays.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="A new job over its files that failed.")] = False,
    limit: Annotated[int, typer.Option(help="How many of the newest jobs to list.")] = 20,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """List jobs, or show one; cancel it, or try its failed files again."""
    if ((cancel or retry) and job_id is None) or (cancel and retry):
        raise UserError("name one job, and one of --cancel and --retry")
    api = connect(url, key_file)
    if cancel:
        api.post(f"/jobs/{job_id}/cancel", {})
    if retry:
        job_id = str(api.post(f"/jobs/{job_id}/retry", {"only": "failed"})["id"])
    if job_id is None:
        show(api.get("/jobs", limit=limit)["data"], as_json, _listed)
        return
    job = follow(api, job_id, as_json) if wait else api.get(f"/jobs/{job_id}")
    show(job, as_json, summary)


def corpora(url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """List the corpora with their sizes."""
    show(list(connect(url, key_file).pages("/vector_stores")), as_json, _corpora)


def follow(api: Api, job_id: str, quiet: bool) -> dict[str, Any]:
    """Wait for a job, with a progress bar where a person watches."""
    if quiet or not sys.stderr.isatty():
        return wait_job(api, job_id)
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        bar = bars.add_task("queued", total=None)

        def watch(job: dict[str, Any]) -> None:
            p = job["progress"]
            ended = p["files_done"] + p["files_failed"] + p["files_unchanged"]
            done = ended + p["chunks_computed"] + p["chunks_reused"]
            total = p["files_total"] + p["chunks_total"]
            bars.update(bar, description=f"{job['stage']:8}", completed=min(done, total), total=total or None)

        return wait_job(api, job_id, watch)


def summary(job: dict[str, Any]) -> str:
    """A job in a few lines."""
    p = job["progress"]
    lines = [
        f"{job['id']} {job['type']}: {job['status'].replace('_', ' ')}",
        f"  files   {p['files_total']} ({p['files_done']} done, {p['files_unchanged']} unchanged, "
        f"{p['files_failed']} failed)",
        f"  chunks  {p['chunks_total']} ({p['chunks_computed']} computed, {p['chunks_reused']} reused)",
        f"  KV      {size(p['kv_bytes_written'])} written, {size(p['kv_bytes_reused'])} reused",
    ]
    if job["started_at"] and job["finished_at"]:
        lines.append(f"  took    {job['finished_at'] - job['started_at']:.1f} s")
    errors = job["errors"]
    lines += [f"  {e['filename'] or 'job'}: {e['code']}: {e['message']}" for e in errors[:ERRORS_SHOWN]]
    if len(errors) > ERRORS_SHOWN:
        lines.append(f"  and {len(errors) - ERRORS_SHOWN} more: preread jobs {job['id']} --json")
    lines += [f"  {w['filename']}: {w['message']}" for w in job["warnings"][:ERRORS_SHOWN]]
    return "\n".join(lines)


def end(job: dict[str, Any], as_json: bool) -> None:
    """Show a job that has ended; one that did not complete is exit code 1."""
    show(job, as_json, summary)
    if job["status"] not in ("completed", "in_progress", "queued"):
        note(f"preread: the job ended as {job['status'].replace('_', ' ')}")
        raise typer.Exit(1)


def _listed(found: list[dict[str, Any]]) -> str:
    head = ("ID", "TYPE", "STATUS", "STAGE", "FILES", "CHUNKS", "ERRORS")
    rows = [
        (
            job["id"],
            job["type"],
            job["status"],
            job["stage"],
            job["progress"]["files_total"],
            job["progress"]["chunks_total"],
            len(job["errors"]),
        )
        for job in found
    ]
    return table([head, *rows], "no jobs")


def _corpora(found: list[dict[str, Any]]) -> str:
    head = ("ID", "NAME", "STATUS", "FILES", "FAILED", "SIZE")
    rows = [
        (
            corpus["id"],
            corpus["name"],
            corpus["status"],
            corpus["file_counts"]["total"],
            corpus["file_counts"]["failed"],
            size(corpus["usage_bytes"]),
        )
        for corpus in found
    ]
    return table([head, *rows], "no corpora")
