"""The whole story on real processes, with a worker killed in the middle of its work."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fixtures_models import Models
from live_site import Backends, Site, until
from sqlalchemy import select

from storage.catalogue.schema import ChunkRow, KVObject

pytestmark = pytest.mark.services

SUBJECTS = ("boilers", "bicycles", "lanterns", "ferries", "orchards", "violins")
SHARED = "All equipment is inspected by the harbour office in the first week of March."


def documents() -> dict[str, str]:
    """Small files; one paragraph is the same in all of them."""
    return {
        f"rules/{subject}.md": (
            f"# Rules for {subject}\n\nThe deposit for {subject} is {40 + 7 * i} crowns.\n\n"
            + " ".join(f"Rule {n}: {subject} are kept in shed {n + i} and counted twice." for n in range(30))
            + f"\n\n## Inspection\n\n{SHARED}\n"
        )
        for i, subject in enumerate(SUBJECTS)
    }


def manifest(files: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {"path": p, "sha256": hashlib.sha256(t.encode()).hexdigest(), "bytes": len(t.encode())}
        for p, t in files.items()
    ]


def stored_keys(site: Site) -> tuple[Counter[str], set[str], dict[str, str]]:
    """Objects by name in the store; keys that chunks refer to; statuses of the rows by key."""
    catalogue = site.catalogue()
    try:
        with catalogue.read() as session:
            wanted = {key for key in session.scalars(select(ChunkRow.kv_key)) if key is not None}
            rows = {row.key: row.status for row in session.scalars(select(KVObject))}
    finally:
        catalogue.close()
    return Counter(name.rsplit("/", 1)[1] for name in site.objects().list("kv/")), wanted, rows


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(site: Site) -> None:
    files = documents()
    client = site.openai()
    store = client.vector_stores.create(name="rules")
    started = site.call("POST", f"/corpora/{store.id}/sync", json={"manifest": manifest(files)})
    assert set(started["added"]) == set(files)
    for path, text in files.items():
        client.files.create(file=(path, text.encode()), purpose="assistants")
    site.kill_who_computes()
    job = site.wait_job(started["job_id"])
    assert job["status"] == "completed", job["errors"]
    assert job["progress"]["files_done"] == len(files)

    objects, wanted, rows = stored_keys(site)
    assert wanted
    assert objects == Counter(wanted), "every chunk's KV is stored, and nothing else is"
    assert rows == dict.fromkeys(wanted, "done")
    assert job["progress"]["chunks_computed"] == len(wanted)
    assert job["progress"]["chunks_total"] > len(wanted), (
        "a paragraph that all documents share is computed once"
    )

    _ask(site, store.id)
    _again(site, store.id, files)
    _delete(site, store.id)


def _ask(site: Site, corpus_id: str) -> None:
    """An answer is made of stored KV, and each citation is its document's own text."""
    client = site.openai()
    model = client.models.list().data[0].id

    def ask() -> Any:
        return client.chat.completions.create(
            model=f"{model}@rules",
            messages=[{"role": "user", "content": "What is the deposit for lanterns?"}],
            max_tokens=8,
            stream=False,
        )

    first = answer = ask()
    for _ in range(10):  # on a busy machine the store may be too late for one chunk or another
        if not answer.preread["not_reused"]:
            break
        assert {chunk["reason"] for chunk in answer.preread["not_reused"]} == {"slow"}
        answer = ask()
    assert {chunk["tier"] for chunk in first.preread["reused"]} <= {"store"}
    assert {chunk["tier"] for chunk in ask().preread["reused"]} == {"memory"}
    has_disk = site.environ("serve").get("PREREAD_OBJECT_STORE", "").startswith("s3://")
    until(lambda: bool(_on_disk(site)) == has_disk, 10, "the disk tier")
    report, citations = answer.preread, answer.citations
    assert report["tokens_reused"] > report["tokens_computed"] > 0
    assert report["not_reused"] == []
    assert answer.usage.prompt_tokens_details.cached_tokens == report["tokens_reused"]
    assert citations[0]["filename"] == "rules/lanterns.md"
    for citation in citations:
        text = client.files.content(citation["file_id"]).text
        assert text[citation["start"] : citation["end"]] == citation["quote"]


def _on_disk(site: Site) -> set[str]:
    """The keys in the API's disk tier, which stands in front of S3 alone."""
    folder = Path(site.environ("serve")["PREREAD_DATA_DIR"]) / "cache"
    return {path.name.partition(".")[0] for path in folder.glob("*/*/*.*")}


def _again(site: Site, corpus_id: str, files: dict[str, str]) -> None:
    """The same folder again is no work; a changed file computes only what it touches."""
    started = site.call("POST", f"/corpora/{corpus_id}/sync", json={"manifest": manifest(files)})
    assert started["unchanged_count"] == len(files)
    assert site.wait_job(started["job_id"])["progress"]["chunks_computed"] == 0

    files = {**files, "rules/boilers.md": files["rules/boilers.md"].replace("40 crowns", "44 crowns")}
    started = site.call("POST", f"/corpora/{corpus_id}/sync", json={"manifest": manifest(files)})
    assert started["modified"] == ["rules/boilers.md"]
    changed = ("rules/boilers.md", files["rules/boilers.md"].encode())
    site.openai().files.create(file=changed, purpose="assistants")
    progress = site.wait_job(started["job_id"])["progress"]
    assert 0 < progress["chunks_computed"] < progress["chunks_total"]


def _delete(site: Site, corpus_id: str) -> None:
    """What is deleted is gone from the search, the store and the disk tier; what others hold stays."""
    client = site.openai()
    found = [f for f in client.vector_stores.files.list(corpus_id) if "violins" in str(f.model_extra)]
    client.vector_stores.files.delete(found[0].id, vector_store_id=corpus_id)
    hits = site.call("POST", f"/vector_stores/{corpus_id}/search", json={"query": "deposit for violins"})
    assert "rules/violins.md" not in {hit["filename"] for hit in hits["data"]}
    objects, wanted, _ = stored_keys(site)
    assert objects == Counter(wanted)
    assert _on_disk(site) <= set(wanted)


@pytest.fixture
def idle_site(tmp_path: Path, tiny_models: Models) -> Iterator[Site]:
    """Where nobody works yet, and bells are files in the data folder."""
    site = Site(tmp_path, Backends({}, shared_folder=True), None, tiny_models.folder("idle", "llama"))
    try:
        site.start("serve")
        site.wait_ready()
        yield site
    finally:
        site.stop()


def test_what_waits_is_done_by_a_worker_that_comes_later(idle_site: Site) -> None:
    site = idle_site
    client = site.openai()
    store = client.vector_stores.create(name="late")
    file = client.files.create(file=("late.txt", b"The lamp is lit at nine."), purpose="assistants")
    batch = client.vector_stores.file_batches.create(store.id, file_ids=[file.id])
    assert batch.status == "in_progress"
    site.start("worker")
    done = client.vector_stores.file_batches.poll(batch.id, vector_store_id=store.id, poll_interval_ms=200)
    assert done.file_counts.completed == 1
