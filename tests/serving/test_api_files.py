from __future__ import annotations

import io
import json
import tarfile
import threading
import time
import zipfile

import httpx
import openai
import pytest
from api_kit import Site

NAMES = [
    "plain.txt",
    "<img src=x onerror=alert(1)>.txt",
    'say "hi" & <b>.txt',
    "../../etc/passwd",
    "größe 你好 🦉.txt",
    "a\\b;c=d,e'f%20g.txt",
    "c:\\temp\\x.txt",
    "  spaces  .txt",
    "l" * 300 + ".txt",
    "line\nbreak.txt",
    "right\u202eto\u200bleft.txt",
]


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names_come_back_byte_for_byte(site: Site, name: str) -> None:
    client = site.client()
    file = client.files.create(file=(name, b"some words in a file"), purpose="assistants")
    assert file.filename == name
    assert client.files.retrieve(file.id).filename == name
    assert [f.filename for f in client.files.list()] == [name]
    assert client.files.content(file.id).read() == b"some words in a file"
    store = client.vector_stores.create(name=name[:200], file_ids=[file.id])
    assert client.vector_stores.retrieve(store.id).name == name[:200]
    site.ingest()
    [hit] = client.vector_stores.search(store.id, query="words").data
    assert (hit.filename, hit.file_id) == (name, file.id)


def test_a_download_never_runs_in_a_browser(site: Site) -> None:
    client = site.client()
    file = client.files.create(file=("x.html", b"<script>alert(1)</script>"), purpose="assistants")
    headers = client.files.with_raw_response.content(file.id).headers
    assert headers["content-security-policy"] == "sandbox"
    assert headers["content-type"] == "application/octet-stream"
    assert headers["content-disposition"].startswith("attachment")
    assert headers["x-content-type-options"] == "nosniff"


def test_the_same_upload_twice_is_the_same_file(site: Site) -> None:
    client = site.client()
    files = [client.files.create(file=("a.txt", b"words"), purpose="assistants") for _ in range(2)]
    assert files[0].id == files[1].id
    other = client.files.create(file=("b.txt", b"words"), purpose="assistants")
    assert other.id != files[0].id
    assert len(list(client.files.list())) == 2


def test_who_deletes_an_upload_deletes_no_document_made_of_an_earlier_one(site: Site) -> None:
    client = site.client()
    stores = [client.vector_stores.create(name=name) for name in ("theirs", "mine")]
    files = []
    for store in stores:
        files.append(client.files.create(file=("a.txt", b"words"), purpose="assistants"))
        client.vector_stores.files.create(vector_store_id=store.id, file_id=files[-1].id)
    assert files[0].id != files[1].id
    site.ingest()
    client.files.delete(files[1].id)
    assert [[hit.file_id for hit in client.vector_stores.search(store.id, query="words").data] for store in stores] == [
        [files[0].id], [],
    ]  # fmt: skip
    assert client.files.content(files[0].id).read() == b"words"


def test_lists_page_through_120_files(site: Site) -> None:
    client = site.client()
    made = [client.files.create(file=(f"{i}.txt", b"x"), purpose="assistants").id for i in range(120)]
    assert [file.id for file in client.files.list(limit=25, order="asc")] == made
    assert [file.id for file in client.files.list(limit=120)] == made[::-1]
    page = client.files.list(limit=25, order="asc", after=made[94])
    assert [file.id for file in page.data] == made[95:]
    assert not page.has_more
    store = client.vector_stores.create(name="many")
    client.vector_stores.file_batches.create(store.id, file_ids=made)
    assert {f.id for f in client.vector_stores.files.list(store.id, limit=50)} == set(made)
    site.ingest()
    assert client.vector_stores.retrieve(store.id).file_counts.completed == 120


def test_an_unknown_cursor_is_not_found(site: Site) -> None:
    with pytest.raises(openai.NotFoundError):
        site.client().files.list(after="file-none")


def test_upload_and_poll_ends_with_a_searchable_file(site: Site) -> None:
    client = site.client()
    store = client.vector_stores.create(name="polled")
    with site.ingesting():
        file = client.vector_stores.files.upload_and_poll(
            vector_store_id=store.id,
            file=("terms.txt", b"Due after thirty days."),
            attributes={"year": 2024, "ok": True},
        )
    assert (file.status, file.last_error, file.attributes) == ("completed", None, {"year": 2024, "ok": True})
    found = client.vector_stores.search(
        store.id, query="thirty", filters={"type": "eq", "key": "year", "value": 2024}
    )
    assert found.data[0].content[0].text == "Due after thirty days."
    assert not client.vector_stores.search(
        store.id, query="thirty", filters={"type": "eq", "key": "year", "value": 2023}
    ).data
    text = client.vector_stores.files.content(file.id, vector_store_id=store.id)
    assert [page.text for page in text] == ["Due after thirty days."]


def test_batch_upload_and_poll_counts_what_failed(site: Site) -> None:
    client = site.client()
    store = client.vector_stores.create(name="batch")
    files = [
        ("good.txt", b"good words"),
        ("bad.txt", b"ERROR password_required"),
        ("odd.bin", b"ERROR unsupported_file"),
    ]
    with site.ingesting():
        batch = client.vector_stores.file_batches.upload_and_poll(store.id, files=files)
    assert batch.status == "completed"
    assert (batch.file_counts.completed, batch.file_counts.failed, batch.file_counts.total) == (1, 2, 3)
    failed = client.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id, filter="failed")
    errors = {}
    for file in failed:
        assert file.last_error is not None
        errors[file.last_error.model_extra["detail_code"]] = file.last_error.code
    assert errors == {"password_required": "invalid_file", "unsupported_file": "unsupported_file"}
    counts = client.vector_stores.retrieve(store.id).file_counts
    assert (counts.completed, counts.failed, counts.in_progress, counts.total) == (1, 2, 0, 3)


def test_two_files_of_one_name_in_a_batch_are_both_kept(site: Site) -> None:
    client = site.client()
    ids = [client.files.create(file=("README", data), purpose="assistants").id for data in (b"one", b"two")]
    store = client.vector_stores.create(name="twins", file_ids=ids)
    site.ingest()
    assert {file.id for file in client.vector_stores.files.list(store.id)} == set(ids)


def test_in_progress_tells_clients_when_to_ask_again(site: Site) -> None:
    client = site.client()
    file = client.files.create(file=("a.txt", b"words"), purpose="assistants")
    store = client.vector_stores.create(name="s")
    reply = client.vector_stores.files.with_raw_response.create(store.id, file_id=file.id)
    assert int(reply.headers["openai-poll-after-ms"]) > 0
    site.ingest()
    reply = client.vector_stores.files.with_raw_response.retrieve(file.id, vector_store_id=store.id)
    assert "openai-poll-after-ms" not in reply.headers
    assert "ingest" in site.rung


def test_a_new_version_waits_beside_the_old_one(site: Site) -> None:
    client = site.client()
    old = client.files.create(file=("a.txt", b"old words"), purpose="assistants").id
    store = client.vector_stores.create(name="s", file_ids=[old]).id
    site.ingest()
    new = client.files.create(file=("a.txt", b"ERROR invalid_file"), purpose="assistants").id
    assert client.vector_stores.files.create(store, file_id=new).status == "in_progress"
    site.ingest()
    state = client.vector_stores.files.retrieve(new, vector_store_id=store)
    assert state.status == "failed"
    assert client.vector_stores.search(store, query="words").data[0].file_id == old
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.files.delete(new, vector_store_id=store)
    assert client.vector_stores.search(store, query="words").data


def test_deleting_reaches_search_and_says_what_went(site: Site) -> None:
    corpus = site.corpus_of("c", {"a.txt": "alpha words", "b.txt": "beta words"})
    client = site.client()
    ids = {file.model_extra["path"]: file.id for file in client.vector_stores.files.list(corpus)}
    gone = client.vector_stores.files.delete(ids["a.txt"], vector_store_id=corpus)
    assert gone.deleted
    assert gone.model_extra["receipt"]["documents"] == 1
    assert {hit.filename for hit in client.vector_stores.search(corpus, query="words").data} == {"b.txt"}
    assert client.files.retrieve(ids["a.txt"]).id == ids["a.txt"]
    assert client.files.delete(ids["b.txt"]).deleted
    assert client.vector_stores.search(corpus, query="words").data == []
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(ids["b.txt"])
    assert client.vector_stores.delete(corpus).deleted
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.retrieve(corpus)
    with site.http() as http:
        actions = [event["action"] for event in http.get("/v1/audit").json()["data"]]
    assert actions[:3] == ["vector_store.delete", "file.delete", "document.delete"]


def archive_of(kind: str, files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as packed:
            for name, data in files.items():
                packed.writestr(name, data)
    else:
        with tarfile.open(fileobj=out, mode="w:gz") as packed:
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                packed.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_an_archive_becomes_documents_at_their_paths(site: Site, kind: str) -> None:
    corpus = site.corpus_of("c", {})
    data = archive_of(kind, {"docs/a.txt": b"alpha", "docs/deep/b.txt": b"beta", "../evil.txt": b"evil"})
    with site.http() as http:
        sent = [("files", (f"all.{kind}", data)), ("files", ("loose.txt", b"loose words"))]
        job = http.post(f"/v1/corpora/{corpus}/documents", files=sent).json()
        assert job["object"] == "job"
        assert job["progress"]["files_total"] == 3
        assert job["skipped"] == [{"path": "../evil.txt", "reason": "unsafe path"}]
        site.ingest()
        assert http.get(f"/v1/jobs/{job['id']}").json()["status"] == "completed"
        documents = http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]
    assert {d["path"] for d in documents} == {"docs/a.txt", "docs/deep/b.txt", "loose.txt"}


def test_paths_may_be_given_beside_the_files(site: Site) -> None:
    corpus = site.corpus_of("c", {})
    with site.http() as http:
        sent = [("files", ("blob", b"one")), ("files", ("blob", b"two"))]
        url = f"/v1/corpora/{corpus}/documents"
        assert http.post(url, files=sent, data={"paths": ["x/1.txt", "x/2.txt"]}).status_code == 200
        assert http.post(url, files=sent, data={"paths": ["x/1.txt"]}).status_code == 400
        assert (
            http.post(url, files=sent).json()["error"]["message"].startswith("the path 'blob' appears twice")
        )
        assert http.post(url, data={"paths": "x"}).status_code == 400
        documents = http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]
    assert {d["path"] for d in documents} == {"x/1.txt", "x/2.txt"}


def test_a_manifest_is_answered_with_its_diff_and_waits_for_contents(site: Site) -> None:
    import hashlib

    corpus = site.corpus_of("c", {"keep.txt": "keep", "gone.txt": "gone words"})
    entries = [{"path": p, "sha256": hashlib.sha256(t.encode()).hexdigest(), "bytes": len(t)}
               for p, t in (("keep.txt", "keep"), ("new.txt", "new words"))]  # fmt: skip
    with site.http() as http:
        url, body = f"/v1/corpora/{corpus}/sync", {"manifest": entries, "delete_missing": True}
        dry = http.post(url, json={**body, "dry_run": True}).json()
        assert (dry["added"], dry["deleted"], dry["unchanged_count"]) == (["new.txt"], ["gone.txt"], 1)
        assert dry["job_id"] is None
        job_id = http.post(url, json=body).json()["job_id"]
        http.post("/v1/files", files={"file": ("new.txt", b"new words")}, data={"purpose": "assistants"})
        site.ingest()
        assert http.get(f"/v1/jobs/{job_id}").json()["status"] == "completed"
        documents = http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]
    assert {d["path"] for d in documents} == {"keep.txt", "new.txt"}


def test_a_source_outside_the_allowed_folders_is_refused(site: Site) -> None:
    corpus = site.corpus_of("c", {})
    with site.http() as http:
        url = f"/v1/corpora/{corpus}/sources"
        for path in ("/etc", "/", str(site.parts.settings.data_dir)):
            reply = http.put(url, json={"source": {"type": "folder", "path": path}})
            assert reply.status_code == 400, path
        assert http.get(url).json()["source"] is None
        assert http.post(f"/v1/corpora/{corpus}/sync", json={}).status_code == 400


def events(reply: httpx.Response) -> list[tuple[int, dict]]:
    found, number = [], 0
    for line in reply.iter_lines():
        if line.startswith("id: "):
            number = int(line[4:])
        elif line.startswith("data: "):
            found.append((number, json.loads(line[6:])))
    return found


def test_job_events_grow_end_with_the_job_and_resume(site: Site) -> None:
    corpus = site.corpus_of("c", {})
    with site.http() as http:
        sent = [("files", (f"{i}.txt", b"some words %d" % i)) for i in range(3)]
        job = http.post(f"/v1/corpora/{corpus}/documents", files=sent).json()["id"]
        timer = threading.Timer(0.5, site.ingest)
        timer.start()
        with http.stream("GET", f"/v1/jobs/{job}/events") as reply:
            seen = events(reply)
        timer.join()
        ids = [number for number, _ in seen]
        assert ids == sorted(set(ids))
        assert len(ids) >= 2
        assert seen[-1][1]["status"] == "completed"
        with http.stream("GET", f"/v1/jobs/{job}/events", headers={"last-event-id": str(ids[0])}) as reply:
            assert [number for number, _ in events(reply)] == ids[-1:]
        started = time.monotonic()
        with http.stream("GET", f"/v1/jobs/{job}/events", headers={"last-event-id": str(ids[-1])}) as reply:
            assert events(reply) == []
        assert time.monotonic() - started < 1


def test_a_cancelled_job_stays_cancelled_and_can_be_retried(site: Site) -> None:
    corpus = site.corpus_of("c", {})
    with site.http() as http:
        job = http.post(f"/v1/corpora/{corpus}/documents", files=[("files", ("a.txt", b"words"))]).json()[
            "id"
        ]
        assert http.post(f"/v1/jobs/{job}/retry").status_code == 400
        assert http.post(f"/v1/jobs/{job}/cancel").json()["status"] == "cancelled"
        site.ingest()
        assert http.post(f"/v1/jobs/{job}/cancel").json()["status"] == "cancelled"
        again = http.post(f"/v1/jobs/{job}/retry", json={"only": "failed"}).json()
        site.ingest()
        assert http.get(f"/v1/jobs/{again['id']}").json()["status"] == "completed"
        assert [j["id"] for j in http.get("/v1/jobs", params={"status": "cancelled"}).json()["data"]] == [job]


def test_a_closed_document_is_seen_by_the_keys_it_names_only(site: Site) -> None:
    corpus = site.corpus_of("c", {})
    named, other = site.key("read"), site.key("read")
    with site.http() as http:
        key_id = http.get("/v1/api_keys").json()["data"][-2]["id"]
        file = http.post("/v1/files", files={"file": ("secret.txt", b"salary words")}).json()["id"]
        body = {"file_id": file, "access": [key_id]}
        http.post(f"/v1/vector_stores/{corpus}/files", json=body).raise_for_status()
    site.ingest()
    for key, sees in ((named, True), (other, False)):
        with site.http(key) as http:
            hits = http.post(f"/v1/vector_stores/{corpus}/search", json={"query": "salary"}).json()["data"]
            listed = http.get(f"/v1/vector_stores/{corpus}/files").json()["data"]
            assert (len(hits), len(listed)) == (int(sees), int(sees))
            for path in (f"/v1/files/{file}", f"/v1/files/{file}/content",
                         f"/v1/vector_stores/{corpus}/files/{file}/content"):  # fmt: skip
                assert http.get(path).status_code == (200 if sees else 404)
