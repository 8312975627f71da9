"""The catalogue's tables: the truth about what exists, who may see it, and which work is owed.

A chunk row exists if and only if the chunk is searchable: a new generation of a document is written, with its vectors
and words, in the transaction that removes the old one. KV follows later; `kv_object.status` says how far it is.
All times are UTC seconds since the epoch (float), so that SQLite and PostgreSQL agree.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, LargeBinary, String, Text, UniqueConstraint, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

CLOSED = "access IS NOT NULL"
# SQLite gives an alias of rowid only to a column declared exactly INTEGER.
BigId = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    type_annotation_map = {dict[str, Any]: JSON, list[str]: JSON, list[Any]: JSON}  # noqa: RUF012


class Tenant(Base):
    __tablename__ = "tenant"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(Text)
    created_at: Mapped[float]
    quota_bytes: Mapped[int | None] = mapped_column(BigInteger)  # of stored KV and files together; None: no limit
    tokens_per_day: Mapped[int | None] = mapped_column(BigInteger)  # of prompts and answers, by UTC; None: no limit
    disabled_at: Mapped[float | None]  # since then none of its keys opens anything


class SharingGroup(Base):
    """Tenants that an operator lets share KV, in corpora that each of them declares shared. A corpus's `sharing_group`
    is then `shared:` and this name, which is no tenant's id."""

    __tablename__ = "sharing_group"
    name: Mapped[str] = mapped_column(String(48), primary_key=True)
    tenants: Mapped[list[str]]
    created_at: Mapped[float]


class ApiKey(Base):
    """A credential. Only the HMAC of the secret is kept; `corpora` None means every corpus of the tenant."""

    __tablename__ = "api_key"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    name: Mapped[str] = mapped_column(Text)
    mac: Mapped[str] = mapped_column(String(64), unique=True)
    hint: Mapped[str] = mapped_column(String(16))  # the last four characters, to recognise it by
    scopes: Mapped[list[str]]  # of: read, write, admin, operator
    corpora: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]
    expires_at: Mapped[float | None]
    principals: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))  # names for access lists, beside its id
    user_id: Mapped[str | None] = mapped_column(String(255))  # whose login it is; None: a key that somebody has made
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None]


class Corpus(Base):
    """A corpus is an OpenAI vector store."""

    __tablename__ = "corpus"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # vs_…
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    name: Mapped[str] = mapped_column(Text)
    sharing_group: Mapped[str] = mapped_column(String(64))  # the tenant's id unless declared shared
    source: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # {"type": a kind of ingest.sources, …}
    attributes: Mapped[dict[str, Any]]
    settings: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")  # emphasis, conditioning
    index_generation: Mapped[str | None] = mapped_column(String(16))  # in which it is searched; None: nothing is indexed
    created_at: Mapped[float]
    last_active_at: Mapped[float]
    versions_from: Mapped[float | None]  # it can be queried as of any time since then; None: as of now alone

    @property
    def conditioning(self) -> str:
        """See `storage.conditioning`."""
        return str(self.settings.get("conditioning", "none"))


class File(Base):
    """An uploaded file. The bytes are content-addressed per tenant: `raw/<tenant>/<sha256>`."""

    __tablename__ = "file"
    __table_args__ = (Index("file_purpose", "purpose"),)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # file-…
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    filename: Mapped[str] = mapped_column(Text)
    bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    purpose: Mapped[str] = mapped_column(String(32))
    created_at: Mapped[float]


class Upload(Base):
    """A file that comes in parts. A part is a File whose purpose names the upload."""

    __tablename__ = "upload"
    __table_args__ = (Index("upload_due", "status", "expires_at"),)
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # without the upload_ that clients see
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"))
    key_id: Mapped[str | None] = mapped_column(String(64))  # who may go on with it
    filename: Mapped[str] = mapped_column(Text)
    bytes: Mapped[int] = mapped_column(BigInteger)  # announced
    purpose: Mapped[str] = mapped_column(String(32))
    status: Mapped[str] = mapped_column(String(16))  # pending | completed | cancelled | expired
    file_id: Mapped[str | None] = mapped_column(String(64))
    created_at: Mapped[float]
    expires_at: Mapped[float]


class Document(Base):
    """A file in a corpus. Its identity is its path there; `done_hash` is written only after success."""

    __tablename__ = "document"
    __table_args__ = (
        UniqueConstraint("corpus_id", "path"),
        Index("document_file", "file_id"),
        Index("document_closed", "corpus_id", sqlite_where=text(CLOSED), postgresql_where=text(CLOSED)),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # doc-…
    corpus_id: Mapped[str] = mapped_column(ForeignKey("corpus.id"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"))
    file_id: Mapped[str] = mapped_column(String(64))
    path: Mapped[str] = mapped_column(Text)
    sha256: Mapped[str] = mapped_column(String(64))
    done_hash: Mapped[str | None] = mapped_column(String(64))  # content + parser + chunker + tokenizer + model + settings
    generation: Mapped[int] = mapped_column(default=0)
    status: Mapped[str] = mapped_column(String(16))  # in_progress | completed | failed | cancelled
    error_code: Mapped[str | None] = mapped_column(String(32))
    error_message: Mapped[str | None] = mapped_column(Text)
    access: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))  # principals; None: all of the tenant
    attributes: Mapped[dict[str, Any]]
    usage_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    not_stored: Mapped[str | None] = mapped_column(String(64))  # the policy rule that keeps its KV out of the store
    codec: Mapped[str | None] = mapped_column(String(32))  # chosen by a policy rule for its KV; None: the reader's own
    created_at: Mapped[float]
    current_since: Mapped[float | None]  # when its generation began; None: it has none yet


class DocumentVersion(Base):
    """A generation of a document that was replaced or deleted by a sync, and is kept because its corpus's settings say
    so. It was current in [valid_from, valid_to)."""

    __tablename__ = "document_version"
    __table_args__ = (
        Index("version_corpus", "corpus_id", "valid_to"),
        Index("version_document", "document_id"),
        Index("version_file", "file_id"),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # ver-…
    document_id: Mapped[str] = mapped_column(String(64))  # which may be deleted
    corpus_id: Mapped[str] = mapped_column(ForeignKey("corpus.id"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"))
    file_id: Mapped[str] = mapped_column(String(64))
    path: Mapped[str] = mapped_column(Text)
    sha256: Mapped[str] = mapped_column(String(64))
    generation: Mapped[int]
    access: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))  # where the document is there, its own counts
    attributes: Mapped[dict[str, Any]]
    not_stored: Mapped[str | None] = mapped_column(String(64))
    codec: Mapped[str | None] = mapped_column(String(32))
    valid_from: Mapped[float]
    valid_to: Mapped[float]


class VersionChunk(Base):
    """A chunk of a kept generation. In the indexes it has the number -id, in a partition of its own."""

    __tablename__ = "version_chunk"
    __table_args__ = (Index("version_chunk_order", "version_id", "ordinal"),)
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    version_id: Mapped[str] = mapped_column(ForeignKey("document_version.id"))
    ordinal: Mapped[int]
    text: Mapped[str] = mapped_column(Text)
    token_ids: Mapped[bytes] = mapped_column(LargeBinary)
    start: Mapped[int]
    end: Mapped[int]
    headings: Mapped[list[str]]
    page_start: Mapped[int | None]
    page_end: Mapped[int | None]
    line_start: Mapped[int]
    line_end: Mapped[int]
    header: Mapped[str] = mapped_column(Text, default="", server_default="")
    kv_key: Mapped[str | None] = mapped_column(String(64), index=True)

    @property
    def number(self) -> int:
        """Its id in the indexes."""
        return -self.id


class IndexGeneration(Base):
    """The tables of the indexes that one embedding model and one set of rules for words have filled."""

    __tablename__ = "index_generation"
    name: Mapped[str] = mapped_column(String(16), primary_key=True)
    embedding: Mapped[str] = mapped_column(Text)
    words: Mapped[str] = mapped_column(String(32))


class ChunkRow(Base):
    __tablename__ = "chunk"
    __table_args__ = (
        Index("chunk_document", "document_id", "ordinal"),
        Index("chunk_corpus", "corpus_id"),
        Index("chunk_head", "tenant_id", "head"),
        Index("chunk_tail", "tenant_id", "tail"),
    )
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    document_id: Mapped[str] = mapped_column(ForeignKey("document.id"))
    corpus_id: Mapped[str] = mapped_column(ForeignKey("corpus.id"))
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"))
    ordinal: Mapped[int]
    text: Mapped[str] = mapped_column(Text)
    token_ids: Mapped[bytes] = mapped_column(LargeBinary)  # u32 little-endian
    start: Mapped[int]
    end: Mapped[int]
    headings: Mapped[list[str]]
    page_start: Mapped[int | None]
    page_end: Mapped[int | None]
    line_start: Mapped[int]
    line_end: Mapped[int]
    header: Mapped[str] = mapped_column(Text, default="", server_default="")
    kv_key: Mapped[str | None] = mapped_column(String(64), index=True)
    head: Mapped[int | None] = mapped_column(BigInteger)  # see storage.anchors; None: the chunk is too short
    tail: Mapped[int | None] = mapped_column(BigInteger)

    @property
    def number(self) -> int:
        """Its id in the indexes."""
        return self.id


class KVObject(Base):
    """One owed or stored KV object. Rows are the precompute queue of record."""

    __tablename__ = "kv_object"
    __table_args__ = (
        Index("kv_queue", "status", "lease_expires"),
        Index("kv_turn", "status", "tenant_id", "created_at"),
        Index("kv_job", "job_id", "status"),
    )
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    sharing_group: Mapped[str] = mapped_column(String(64))
    job_id: Mapped[str | None] = mapped_column(String(64))  # the job that first asked for it
    status: Mapped[str] = mapped_column(String(16))  # pending | leased | done | failed | over_quota | purge
    tokens: Mapped[int]
    bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    attempt: Mapped[int] = mapped_column(default=0)
    lease_owner: Mapped[str | None] = mapped_column(String(64))
    lease_expires: Mapped[float | None]
    created_at: Mapped[float]
    finished_at: Mapped[float | None]


class Job(Base):
    """The queue of record. `status` becomes terminal once and never changes again."""

    __tablename__ = "job"
    __table_args__ = (
        Index("job_list", "tenant_id", "created_at"),
        Index("job_finished", "tenant_id", "finished_at"),
        Index("job_status", "status"),
    )
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # job-…
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"))
    corpus_id: Mapped[str | None] = mapped_column(String(64), index=True)
    type: Mapped[str] = mapped_column(String(16))  # ingest | sync | delete | reindex
    status: Mapped[str] = mapped_column(String(24))  # queued in_progress cancelling | cancelled completed
    #                                                  completed_with_errors failed
    stage: Mapped[str] = mapped_column(String(16), default="fetch")  # fetch extract chunk embed kv commit
    request: Mapped[dict[str, Any]]  # what was asked: plain JSON
    result: Mapped[dict[str, Any]]  # e.g. a purge receipt, the sync's diff
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    last_heartbeat_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    attempt: Mapped[int] = mapped_column(default=0)
    max_attempts: Mapped[int] = mapped_column(default=3)
    lease_owner: Mapped[str | None] = mapped_column(String(64))
    lease_expires: Mapped[float | None]


class JobFile(Base):
    """One file of a job: the unit that is leased, retried and reported."""

    __tablename__ = "job_file"
    __table_args__ = (
        UniqueConstraint("job_id", "path"),
        Index("job_file_queue", "status", "lease_expires"),
        # All that a claim looks at, so that its work does not grow with a job's files that are done.
        Index("job_file_turn", "job_id", "status", "id", "lease_expires", "file_id", "action"),
    )
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.id"))
    document_id: Mapped[str | None] = mapped_column(String(64), index=True)
    file_id: Mapped[str | None] = mapped_column(String(64))
    sha256: Mapped[str | None] = mapped_column(String(64), index=True)  # of the content that is waited for
    path: Mapped[str] = mapped_column(Text)
    action: Mapped[str] = mapped_column(String(16))  # upsert | refresh | delete | rename | reindex
    status: Mapped[str] = mapped_column(String(16))  # pending | leased | done | unchanged | failed | cancelled
    attempt: Mapped[int] = mapped_column(default=0)
    lease_owner: Mapped[str | None] = mapped_column(String(64))
    lease_expires: Mapped[float | None]
    chunks_total: Mapped[int] = mapped_column(default=0)
    chunks_reused: Mapped[int] = mapped_column(default=0)
    error_code: Mapped[str | None] = mapped_column(String(32))
    error_message: Mapped[str | None] = mapped_column(Text)


class Schedule(Base):
    """A cron row. One tick claims due rows; `(schedule, due_at)` is unique, so two tickers fire each due time once."""

    __tablename__ = "schedule"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # sched-…
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    corpus_id: Mapped[str] = mapped_column(ForeignKey("corpus.id"))
    cron: Mapped[str] = mapped_column(Text)
    timezone: Mapped[str] = mapped_column(Text)
    enabled: Mapped[bool] = mapped_column(default=True)
    next_due_at: Mapped[float] = mapped_column(index=True)
    created_at: Mapped[float]


class ScheduleRun(Base):
    __tablename__ = "schedule_run"
    __table_args__ = (UniqueConstraint("schedule_id", "due_at"),)
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    schedule_id: Mapped[str] = mapped_column(ForeignKey("schedule.id"))
    due_at: Mapped[float]
    fired_at: Mapped[float]
    job_id: Mapped[str | None] = mapped_column(String(64))
    outcome: Mapped[str] = mapped_column(String(32))  # started | skipped_overlap | failed


class AuditEvent(Base):
    """Who did what to what. Never holds document text or secrets. Triggers refuse changes, and deletions but for what an
    operator has put out of date; `storage.catalogue.audit` has the chain."""

    __tablename__ = "audit_event"
    __table_args__ = (Index("audit_chain", "tenant_id", "seq", unique=True),)
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    tenant_id: Mapped[str] = mapped_column(String(64), index=True)
    key_id: Mapped[str | None] = mapped_column(String(64))
    user_id: Mapped[str | None] = mapped_column(String(255))  # who was logged in, as the issuer calls them
    action: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(Text)
    at: Mapped[float]
    request_id: Mapped[str | None] = mapped_column(String(64))
    outcome: Mapped[str] = mapped_column(String(16), server_default="ok")  # ok | denied
    seq: Mapped[int | None] = mapped_column(BigInteger)  # 1, 2, … in the tenant; None: from before there was a chain
    mac: Mapped[str | None] = mapped_column(String(64))


class AuditHead(Base):
    """The end of a tenant's chain, and where it begins since the operator last put events out of date."""

    __tablename__ = "audit_head"
    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger)
    mac: Mapped[str] = mapped_column(String(64))
    pruned_seq: Mapped[int] = mapped_column(BigInteger, default=0)
    pruned_mac: Mapped[str] = mapped_column(String(64), default="")


class LoginState(Base):
    """A login's state that has been used. It is good once."""

    __tablename__ = "login_state"
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    expires_at: Mapped[float]


class UsageDay(Base):
    """What a corpus's answers reused and what its KV cost to compute, on one day by UTC. Survives its corpus.

    `corpus_id` empty: answers without a corpus."""

    __tablename__ = "usage_day"
    __table_args__ = (Index("usage_tenant", "tenant_id", "day"),)
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # days since the epoch
    tenant_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    corpus_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    answers: Mapped[int] = mapped_column(BigInteger, default=0)
    tokens_prompt: Mapped[int] = mapped_column(BigInteger, default=0)
    tokens_completion: Mapped[int] = mapped_column(BigInteger, default=0)
    tokens_reused: Mapped[int] = mapped_column(BigInteger, default=0)  # of the prompts' tokens, kept as they were
    tokens_recomputed: Mapped[int] = mapped_column(BigInteger, default=0)  # had KV, and were computed again
    bytes_fetched: Mapped[int] = mapped_column(BigInteger, default=0)
    tokens_compiled: Mapped[int] = mapped_column(BigInteger, default=0)  # by workers, to be stored
    seconds_compiled: Mapped[float] = mapped_column(default=0.0)


class DocumentUse(Base):
    """How many answers used a document on a day by UTC, and when the last one did."""

    __tablename__ = "document_use"
    __table_args__ = (Index("document_use_day", "day"),)
    document_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    hits: Mapped[int] = mapped_column(BigInteger, default=0)
    last_at: Mapped[float]


class Site(Base):
    """A child site, as its parent knows it. Rows stay when a site is removed: receipts name it."""

    __tablename__ = "site"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # site-…
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    name: Mapped[str] = mapped_column(String(64))
    corpora: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))  # whose KV it may hold; None: all
    groups: Mapped[list[Any]]  # the sharing groups whose secrets its key carries
    pushed: Mapped[list[Any]]  # corpora of which it is to hold everything
    erased: Mapped[int] = mapped_column(BigInteger)  # it has erased all tombstones up to this number
    seen_at: Mapped[float | None]
    created_at: Mapped[float]
    removed_at: Mapped[float | None]


class SiteWanted(Base):
    """A KV object that a site is to hold, by an operator's rule."""

    __tablename__ = "site_wanted"
    site_id: Mapped[str] = mapped_column(ForeignKey("site.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(64), primary_key=True)


class SiteErasure(Base):
    """When a site said that it has erased all tombstones up to `seq`."""

    __tablename__ = "site_erasure"
    site_id: Mapped[str] = mapped_column(ForeignKey("site.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    at: Mapped[float]


class Tombstone(Base):
    """A KV key that a chunk ceased to refer to. `seq` is given after the commit, see `storage.catalogue.tombstones`."""

    __tablename__ = "tombstone"
    id: Mapped[int] = mapped_column(BigId, primary_key=True, autoincrement=True)
    seq: Mapped[int | None] = mapped_column(BigInteger, unique=True)
    key: Mapped[str] = mapped_column(String(64))
    sharing_group: Mapped[str] = mapped_column(String(64))


class SiteLink(Base):
    """At a child: how far it is in step with its parent, under one registration."""

    __tablename__ = "site_link"
    site_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    cursor: Mapped[int | None] = mapped_column(BigInteger)  # tombstones are applied up to here; None: compare all first
    newest: Mapped[int] = mapped_column(BigInteger, default=0)  # the parent's newest tombstone when last asked
    syncs: Mapped[int] = mapped_column(BigInteger, default=0)  # exchanges that left the site in step
    synced_at: Mapped[float | None]
    pull_after: Mapped[str] = mapped_column(String(64), default="")  # replication goes on behind this key
    pulled_objects: Mapped[int] = mapped_column(BigInteger, default=0)
    pulled_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    kept_floor: Mapped[float] = mapped_column(default=0.0)  # the value of what was evicted last (kept.py)


class KeptObject(Base):
    """At a child: an object of the parent's that lies here (storage/catalogue/kept.py). `uses`: answers that took it."""

    __tablename__ = "kept_object"
    __table_args__ = (Index("kept_value", "value"),)
    key: Mapped[str] = mapped_column(ForeignKey("kv_object.key", ondelete="CASCADE"), primary_key=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    tokens: Mapped[int]
    uses: Mapped[int] = mapped_column(BigInteger)
    value: Mapped[float]


class SourceItem(Base):
    """What a path of a corpus's source held when it was last fetched, so that it is not fetched again unchanged."""

    __tablename__ = "source_item"
    corpus_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    path: Mapped[str] = mapped_column(Text, primary_key=True)
    tag: Mapped[str] = mapped_column(Text)  # the server's word for the content, e.g. its ETag
    sha256: Mapped[str] = mapped_column(String(64))
    bytes: Mapped[int] = mapped_column(BigInteger)
    refusal: Mapped[str] = mapped_column(Text)  # why it is no document; empty if it is one


class PushHook(Base):
    """Where a git host tells that a corpus's source has changed. Its secret is derived from its id."""

    __tablename__ = "push_hook"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # hook-…
    tenant_id: Mapped[str] = mapped_column(String(64))
    corpus_id: Mapped[str] = mapped_column(String(64), unique=True)
    again: Mapped[bool] = mapped_column(default=False)  # something was pushed behind the back of the sync that runs
    created_at: Mapped[float]


class PushDelivery(Base):
    """A delivery that was good. `digest` is of what was signed: nothing else in a request can be relied on."""

    __tablename__ = "push_delivery"
    __table_args__ = (Index("push_delivery_at", "at"),)
    hook_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    delivery_id: Mapped[str] = mapped_column(String(64))  # as the host calls it
    at: Mapped[float]
    outcome: Mapped[str] = mapped_column(String(32))  # started | skipped_overlap | follows | ignored
    job_id: Mapped[str | None] = mapped_column(String(64))


class Webhook(Base):
    """An address that is told of the ends of jobs. Its secret is derived from its id."""

    __tablename__ = "webhook"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # wh-…
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenant.id"), index=True)
    url: Mapped[str] = mapped_column(Text)
    events: Mapped[list[str]]
    corpora: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))  # None: every corpus of the tenant
    created_at: Mapped[float]
    looked_at: Mapped[float]  # jobs that ended long before this have been seen


class WebhookDelivery(Base):
    """One event on its way to one address. It is sent by whoever has moved `next_at` on."""

    __tablename__ = "webhook_delivery"
    __table_args__ = (UniqueConstraint("webhook_id", "job_id"), Index("webhook_due", "status", "next_at"))
    id: Mapped[str] = mapped_column(String(64), primary_key=True)  # msg_…
    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhook.id"))
    job_id: Mapped[str] = mapped_column(String(64))
    payload: Mapped[dict[str, Any]]
    status: Mapped[str] = mapped_column(String(16))  # pending | delivered | failed
    attempt: Mapped[int] = mapped_column(default=0)
    next_at: Mapped[float]
    answer: Mapped[str | None] = mapped_column(String(200))  # the last one: a status, or why there was none
    created_at: Mapped[float]
    finished_at: Mapped[float | None]
