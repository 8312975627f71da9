"""Jobs of very many files, written straight into their tables."""

from __future__ import annotations

import time

from fixtures_work import Work
from sqlalchemy import insert

from ingest.files import store_file
from ingest.jobs import create_job
from storage.catalogue.schema import Corpus, Document, JobFile


def big_job(work: Work, corpus: Corpus, files: int, **values: object) -> str:
    """A job of so many files that hold the same content, written straight into its tables."""
    file = store_file(work.catalogue, work.objects, corpus.tenant_id, "x.txt", b"one text")
    with work.catalogue.write() as session:
        job = create_job(session, tenant_id=corpus.tenant_id, corpus_id=corpus.id, type="ingest")
        base = {"corpus_id": corpus.id, "tenant_id": corpus.tenant_id, "file_id": file.id, "sha256": "", "generation": 0}
        base |= {"status": "in_progress", "attributes": {}, "usage_bytes": 0, "created_at": time.time()}
        numbers = range(files)
        documents = [{**base, "id": f"{job.id}-{i}", "path": f"{job.id}/{i}.txt"} for i in numbers]
        session.execute(insert(Document), documents)
        row = {"job_id": job.id, "file_id": file.id, "action": "upsert", "status": "pending", "attempt": 0}
        row |= {"chunks_total": 0, "chunks_reused": 0, **values}
        session.execute(insert(JobFile), [{**row, "document_id": d["id"], "path": d["path"]} for d in documents])
        return job.id
