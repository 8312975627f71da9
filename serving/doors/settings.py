"""What an operator says of a whole corpus."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select

from ingest.attach import apply_access_rules
from ingest.jobs import queue_refresh
from ingest.versions import Keeping
from serving.api.parts import ApiParts
from serving.auth import Principal, audit
from serving.doors import corpora
from serving.doors.tenants import SHARED, share
from serving.emphasis import check_weight
from storage.catalogue.schema import Corpus, Document


@dataclass(frozen=True)
class Sharing:
    """With whom a corpus shares KV: a sharing group, or nobody outside the tenant."""

    group: str | None


def show(parts: ApiParts, who: Principal, corpus_id: str) -> dict[str, Any]:
    """The corpus's settings. Raises NotFound."""
    with parts.catalogue.read() as session:
        return _shape(corpora.find(session, who, corpus_id), who)


def change(
    parts: ApiParts,
    who: Principal,
    corpus_id: str,
    emphasis: Mapping[str, float] | None,
    conditioning: str | None,
    keep_versions: str | int | None = None,
    access: Sequence[dict[str, Any]] | None = None,
    sharing: Sharing | None = None,
) -> dict[str, Any]:
    """Replace what is given; another conditioning queues a job over the documents that are there, access rules hold at
    once. Raises NotFound, UserError."""
    for pattern, weight in (emphasis or {}).items():
        check_weight(pattern, weight)
    keeps = Keeping.of(keep_versions) is not None
    with parts.catalogue.write() as session:
        corpus = corpora.find(session, who, corpus_id)
        session.refresh(corpus, with_for_update=True)
        before = corpus.conditioning
        new = {"emphasis": emphasis and dict(emphasis), "conditioning": conditioning, "keep_versions": keep_versions,
               "access": access if access is None else list(access)}  # fmt: skip
        corpus.settings = {**corpus.settings, **{name: value for name, value in new.items() if value is not None}}
        if keep_versions is not None:
            corpus.versions_from = (corpus.versions_from or time.time()) if keeps else None
        if access is not None:
            apply_access_rules(session, corpus)
        if sharing is not None:
            share(session, who, corpus, sharing.group)
        audit(session, who, "corpus.settings", corpus_id, parts.clock())
        session.flush()
        if corpus.conditioning != before:
            held = select(Document).where(Document.corpus_id == corpus.id).order_by(Document.path)
            queue_refresh(session, corpus, session.scalars(held).all())
        shown = _shape(corpus, who)
    parts.ring("ingest")
    return shown


def standing_emphasis(parts: ApiParts, corpus_ids: Sequence[str]) -> dict[str, dict[str, float]]:
    """Path pattern → weight of each of these corpora, which the asker may read."""
    with parts.catalogue.read() as session:
        rows = session.execute(select(Corpus.id, Corpus.settings).where(Corpus.id.in_(corpus_ids)))
        return {corpus_id: settings.get("emphasis", {}) for corpus_id, settings in rows}


def _shape(corpus: Corpus, who: Principal) -> dict[str, Any]:
    emphasis = corpus.settings.get("emphasis", {})
    shared = corpus.sharing_group.removeprefix(SHARED) if corpus.sharing_group.startswith(SHARED) else None
    shown = {
        "object": "corpus.settings",
        "corpus_id": corpus.id,
        "emphasis": emphasis,
        "conditioning": corpus.conditioning,
        "keep_versions": corpus.settings.get("keep_versions", 0),
        "versions_from": corpus.versions_from,
    }
    # Rules name paths and groups that not every reader is to know of.
    rights = {"access": corpus.settings.get("access", []), "sharing": {"group": shared}}
    return shown | rights if who.may("admin") else shown
