"""Making a corpus like a manifest, or like its source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingest.job_view import view
from ingest.jobs import create_job
from serving.api.parts import ApiParts
from serving.auth import Principal
from serving.doors import corpora
from storage.errors import UserError


def from_source(
    parts: ApiParts, who: Principal, corpus_id: str, delete_missing: bool, dry_run: bool
) -> dict[str, Any]:
    with parts.catalogue.write() as session:
        corpus = corpora.find(session, who, corpus_id)
        job = create_job(session, tenant_id=who.tenant_id, corpus_id=corpus.id, type="sync", planned=False)
        return view(session, job)


def from_manifest(
    parts: ApiParts,
    who: Principal,
    corpus_id: str,
    manifest: Sequence[Any],
    delete_missing: bool,
    dry_run: bool,
) -> dict[str, Any]:
    raise UserError("TODO")
