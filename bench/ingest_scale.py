"""Does memory stay flat when a corpus is large? Real parts in this process, a corpus made on the fly.

All of the corpus is uploaded and queued as one job; then the worker ingests it for `seconds`, and the memory of this
process and of its parser children is read along the way. A policy keeps KV out of the store: what is asked here is whether
uploading, planning, parsing, cutting, embedding and indexing grow with what has been done.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.harness import emptied, reader_folder, write_record
from ingest.attach import attach
from ingest.files import store_file
from ingest.job_view import view
from ingest.jobs import JobItem, cancel, create_job
from serving.parts import Wiring
from serving.settings import Settings
from storage.catalogue.schema import Corpus, Job, Tenant

TENANT, CORPUS = "bench", "vs_scale"
RULES = "rules:\n  - name: no-kv\n    store: false\n"
SHOWN = 10  # readings in the record
TEXT_BESIDE_PICTURES = 2000  # bytes
WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
CONTENT_TYPES = (
    '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="jpeg" ContentType="image/jpeg"/><Default Extension="rels" '
    'ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Override PartName="/word/document.xml" '
    'ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>'
)
RELATIONSHIPS = (
    '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships"><Relationship Id="r1" '
    'Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
    'Target="word/document.xml"/></Relationships>'
)
Kind = Callable[[int, int], tuple[str, bytes]]  # the number of a file and its size: its name and content


def run(
    *, files: int, file_bytes: int, kind: str, seconds: float, out: Path | None, workdir: Path, model: str | None = None
) -> dict[str, Any]:
    """Ingest for so long; the figures, which are also written to `out`. Memory in MiB. `kind`: of `KINDS`."""
    folder = emptied(workdir / "scale")
    folder.mkdir()
    (folder / "rules.yaml").write_text(RULES)
    chosen = str(reader_folder(model))
    wiring = Wiring(Settings(data_dir=folder, model=chosen, policy_file=str(folder / "rules.yaml"), lease_seconds=600))
    try:
        record = {"kind": kind, **_measure(wiring, files, file_bytes, KINDS[kind], seconds)}
    finally:
        wiring.close()
    write_record(record, out)
    return record


def _measure(wiring: Wiring, files: int, file_bytes: int, kind: Kind, seconds: float) -> dict[str, Any]:
    _ = wiring.index, wiring.pipeline
    wiring.embedder.embed(["warm"])
    before = memory()
    begun = time.perf_counter()
    job_id = _upload(wiring, files, file_bytes, kind)
    uploaded_s, uploaded = time.perf_counter() - begun, memory()
    readings, looked = [], []
    worker, end = wiring.ingest_worker, time.monotonic() + seconds
    begun = time.perf_counter()
    done = 0
    while (now := time.monotonic()) < end and (some := worker.drain(seconds=min(max(seconds / 50, 1), end - now))):
        done += some
        readings.append({"files": done, **memory()})
        at = time.perf_counter()
        _view(wiring, job_id)
        looked.append(time.perf_counter() - at)
    ingest_s = time.perf_counter() - begun
    shown = _view(wiring, job_id)
    at = time.perf_counter()
    with wiring.catalogue.write() as session:
        cancel(session, job_id)
    cancel_s = time.perf_counter() - at
    every = max(1, len(readings) // SHOWN)
    return {
        "files": files,
        "file_bytes": file_bytes,
        "corpus_bytes": files * file_bytes,
        "upload_s": round(uploaded_s, 1),
        "memory_before_upload": before,
        "memory_after_upload": uploaded,
        "ingested_files": done,
        "ingested_share": round(done / files, 3),
        "ingest_s": round(ingest_s, 1),
        "chunks": shown["progress"]["chunks_total"],
        "errors": len(shown["errors"]),
        "first_error": shown["errors"][0]["message"] if shown["errors"] else None,
        "memory": readings[::every],
        "memory_at_end": readings[-1] if readings else None,
        "view_ms_median": round(sorted(looked)[len(looked) // 2] * 1000, 1) if looked else None,
        "cancel_ms": round(cancel_s * 1000, 1),
        "load": os.getloadavg()[0],
    }


def _upload(wiring: Wiring, files: int, file_bytes: int, kind: Kind) -> str:
    stored = []
    for number in range(files):
        name, content = kind(number, file_bytes)
        folder = f"{number // 1000}/{name}"
        stored.append(store_file(wiring.catalogue, wiring.objects, _tenant(wiring), folder, io.BytesIO(content)))
    with wiring.catalogue.write() as session:
        corpus = session.get_one(Corpus, CORPUS)
        items = [JobItem(f.filename, attach(session, corpus, f.filename, f.id, f.sha256).id, f.id) for f in stored]
        return create_job(session, tenant_id=TENANT, corpus_id=CORPUS, type="ingest", items=items).id


def _tenant(wiring: Wiring) -> str:
    with wiring.catalogue.read() as session:
        if session.get(Corpus, CORPUS) is not None:
            return TENANT
    now = time.time()
    with wiring.catalogue.write() as session:
        session.add(Tenant(id=TENANT, name=TENANT, created_at=now))
        session.flush()
        made = {"tenant_id": TENANT, "sharing_group": TENANT, "created_at": now, "last_active_at": now}
        session.add(Corpus(id=CORPUS, name="scale", attributes={}, **made))
    return TENANT


def text_of(number: int, size: int) -> bytes:
    """Plain text of that many bytes, in paragraphs; no two files are alike."""
    lines: list[str] = []
    length = 0
    while length < size:
        lines.append(f"Paragraph {len(lines)} of file {number} says that shed {number * 7 + len(lines)} is kept dry.\n\n")
        length += len(lines[-1])
    return "".join(lines).encode()[:size]


def _text(number: int, size: int) -> tuple[str, bytes]:
    return f"{number}.txt", text_of(number, size)


def _pictures(number: int, size: int) -> tuple[str, bytes]:
    """A Word document of about that many bytes, nearly all of them one picture, as large corpora are."""
    paragraphs = text_of(number, TEXT_BESIDE_PICTURES).decode().split("\n\n")
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_STORED) as package:
        package.writestr("[Content_Types].xml", CONTENT_TYPES)
        package.writestr("_rels/.rels", RELATIONSHIPS)
        body = "".join(f"<w:p><w:r><w:t>{paragraph}</w:t></w:r></w:p>" for paragraph in paragraphs)
        package.writestr("word/document.xml", f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>')
        package.writestr("word/media/image1.jpeg", random.Random(number).randbytes(size))
    return f"{number}.docx", written.getvalue()


KINDS: dict[str, Kind] = {"text": _text, "pictures": _pictures}


def _view(wiring: Wiring, job_id: str) -> dict[str, Any]:
    with wiring.catalogue.read() as session:
        return view(session, session.get_one(Job, job_id))


def memory() -> dict[str, float]:
    """MiB of this process's own (anonymous) memory and all that is resident, and the same of its children together."""
    own, children = _status("self"), list(_children(os.getpid()))
    below = [_status(str(pid)) for pid in children]
    return {
        "anonymous": own["RssAnon"],
        "resident": own["VmRSS"],
        "parsers": round(sum(each["VmRSS"] for each in below), 1),
    }


def _children(parent: int) -> Iterator[int]:
    for task in Path(f"/proc/{parent}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            yield from map(int, (task / "children").read_text().split())


def _status(pid: str) -> dict[str, float]:
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return {line[0].rstrip(":"): round(int(line[1]) / 1024, 1) for line in lines if line[-1:] == ["kB"]}
