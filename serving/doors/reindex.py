"""A corpus's index made anew with the embedding model that is set."""

from __future__ import annotations

from typing import Any

from ingest.job_view import view
from ingest.reindex import queue
from serving.api.parts import ApiParts
from serving.auth import Principal, audit
from serving.doors import corpora


def start(parts: ApiParts, who: Principal, corpus_id: str) -> dict[str, Any]:
    """The job, which may be under way already. Raises NotFound."""
    with parts.catalogue.write() as session:
        corpus = corpora.find(session, who, corpus_id)
        session.refresh(corpus, with_for_update=True)
        job = queue(session, corpus, parts.embedder.identity)
        audit(session, who, "corpus.reindex", corpus_id, parts.clock())
        session.flush()
        shown = view(session, job, who.names)
    parts.ring("ingest")
    return shown
