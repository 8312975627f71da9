"""Jobs, syncs, schedules, and what is told of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.api.shapes.common import Count, FileId, Id, JobId, Listed, Moment, Path, Secret, Time
from storage.errors import FILE_ERROR_CODES

JobStatus = Literal["queued", "in_progress", "cancelling", "cancelled", "completed", "completed_with_errors", "failed"]


class Progress(BaseModel):
    files_total: Count
    files_done: Count
    files_failed: Count
    files_unchanged: Count
    chunks_total: Count
    chunks_reused: Count
    chunks_computed: Count
    kv_bytes_written: Count
    kv_bytes_reused: Count
    eta_seconds: Annotated[float | None, Field(examples=[12.5])]


class JobError(BaseModel):
    """`retryable`: trying again, without changing the file, can help. `insufficient_quota`: the tenant's storage is full, and
    what could not be stored is computed when asked."""

    file_id: FileId | None
    filename: Path | None
    code: Annotated[str, Field(json_schema_extra={"enum": sorted(FILE_ERROR_CODES)}, examples=["no_text_extracted"])]
    message: Annotated[str, Field(examples=["The file holds no text."])]
    retryable: bool


class JobWarning(BaseModel):
    file_id: FileId | None
    filename: Path | None
    message: Annotated[str | None, Field(examples=["Pages 2 and 3 have no text."])]


class Job(BaseModel):
    id: JobId
    object: Literal["job"]
    type: Literal["ingest", "sync", "delete", "reindex", "precompute"]
    status: JobStatus
    corpus_id: Id | None
    created_at: Moment
    started_at: Moment | None
    last_heartbeat_at: Moment | None
    finished_at: Moment | None
    attempt: Count
    max_attempts: Count
    stage: Literal["fetch", "extract", "chunk", "embed", "kv", "commit"]
    progress: Progress
    errors: list[JobError]
    warnings: list[JobWarning]


class JobList(Listed):
    data: list[Job]


class Skipped(BaseModel):
    path: Path
    reason: Annotated[str, Field(examples=["binary"])]


class UploadJob(Job):
    """`skipped`: what was left out of archives."""

    skipped: list[Skipped]


class SourceSync(Job):
    """A sync with the corpus's source is a job."""

    job_id: JobId


class Rename(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    from_: Annotated[str, Field(alias="from", examples=["terms.md"])]
    to: Path


class Changes(BaseModel):
    added: Annotated[list[str], Field(examples=[["terms/payment.md"]])]
    modified: list[str]
    renamed: list[Rename]
    deleted: list[str]
    unchanged_count: Count


class ManifestSync(Changes):
    """`job_id`: null for a dry run."""

    object: Literal["corpus.sync"]
    corpus_id: Id
    job_id: JobId | None


class FoundChanges(Changes):
    dry_run: bool = False
    skipped: list[Skipped] = []


class SyncState(BaseModel):
    """`found`: null until the source is listed."""

    object: Literal["corpus.sync"]
    corpus_id: Id
    job_id: JobId
    status: JobStatus
    found: FoundChanges | None


class Source(BaseModel):
    object: Literal["corpus.source"]
    corpus_id: Id
    source: Annotated[dict[str, Any] | None, Field(examples=[{"type": "git", "url": "https://git.example.com/handbook.git"}])]


class RuleShown(BaseModel):
    path: Annotated[str, Field(examples=["hr/*"])]
    principals: Annotated[list[str] | None, Field(examples=[["group:hr"]])]


class Sharing(BaseModel):
    group: Annotated[str | None, Field(examples=[None])]


class Settings(BaseModel):
    """`access` and `sharing` are shown to admins."""

    object: Literal["corpus.settings"]
    corpus_id: Id
    emphasis: Annotated[dict[str, float], Field(examples=[{"terms/*": 2.0}])]
    conditioning: Literal["none", "document"]
    keep_versions: Annotated[str | int, Field(examples=["30d"])]
    versions_from: Moment | None
    access: list[RuleShown] = []
    sharing: Sharing | None = None


class Schedule(BaseModel):
    id: Annotated[str, Field(examples=["sched-1"])]
    object: Literal["schedule"]
    corpus_id: Id
    cron: Annotated[str, Field(examples=["0 3 * * *"])]
    timezone: Annotated[str, Field(examples=["Europe/Berlin"])]
    enabled: bool
    next_due_at: Moment
    created_at: Moment


class ScheduleRun(BaseModel):
    due_at: Moment
    fired_at: Moment
    job_id: JobId | None
    outcome: Literal["started", "skipped_overlap", "failed"]


class ScheduleWithRuns(Schedule):
    runs: list[ScheduleRun]


class ScheduleList(Listed):
    data: list[Schedule]


class Hook(BaseModel):
    id: Annotated[str, Field(examples=["hook-1"])]
    object: Literal["corpus.hook"]
    corpus_id: Id
    path: Annotated[str, Field(examples=["/hooks/hook-1"])]
    created_at: Moment


class NewHook(Hook):
    secret: Secret


class PushDelivery(BaseModel):
    delivery_id: Annotated[str, Field(examples=["72d3162e"])]
    at: Moment
    outcome: Literal["started", "skipped_overlap", "follows", "ignored"]
    job_id: JobId | None


class HookWithDeliveries(Hook):
    deliveries: list[PushDelivery]


class Push(BaseModel):
    object: Literal["push"]
    outcome: Literal["started", "skipped_overlap", "follows", "ignored", "ping"]
    job_id: JobId | None


class Webhook(BaseModel):
    """`corpora`: null for all of the tenant's."""

    id: Annotated[str, Field(examples=["wh-1"])]
    object: Literal["webhook"]
    url: Annotated[str, Field(examples=["https://hooks.example.com/preread"])]
    events: Annotated[list[str], Field(examples=[["job.completed"]])]
    corpora: Annotated[list[str] | None, Field(examples=[["vs_1"]])]
    created_at: Moment


class NewWebhook(Webhook):
    secret: Secret


class WebhookDelivery(BaseModel):
    id: Annotated[str, Field(examples=["msg_1"])]
    type: Annotated[str, Field(examples=["job.completed"])]
    job_id: JobId
    status: Literal["pending", "delivered", "failed"]
    attempts: Count
    answer: Annotated[str | None, Field(examples=["200"])]
    next_at: Moment | None
    created_at: Moment
    finished_at: Moment | None


class WebhookWithDeliveries(Webhook):
    deliveries: list[WebhookDelivery]


class WebhookList(Listed):
    data: list[Webhook]


class Site(BaseModel):
    """`corpora`: whose KV it may hold, null for all; `pushed`: of which it holds everything."""

    id: Annotated[str, Field(examples=["site-1"])]
    object: Literal["site"]
    name: Annotated[str, Field(examples=["edge"])]
    corpora: Annotated[list[str] | None, Field(examples=[["vs_1"]])]
    pushed: Annotated[list[str], Field(examples=[["vs_1"]])]
    created_at: Time
    seen_at: Moment | None
    tombstones_pending: Count


class NewSite(Site):
    key: Secret


class RemovedSite(Site):
    deleted: Literal[True]


class SiteList(Listed):
    data: list[Site]


class SiteSync(BaseModel):
    reset: bool
    newest: Count
    cursor: int | None
    erase: list[str]


class SiteCompared(BaseModel):
    stored: dict[str, int]
    awaited: list[str]


class SiteWanted(BaseModel):
    keys: list[str]
