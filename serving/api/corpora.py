"""Native routes of a corpus: many documents at once, sync with a manifest or a source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.datastructures import UploadFile

from ingest.sources import Entry
from serving.api.access import Admin, Parts, Reader, Writer
from serving.api.bodies import Body
from serving.api.errors import BadParameter
from serving.api.files import sent_name
from serving.api.json_body import StrictJSON
from serving.api.shapes import asked, work
from serving.api.shapes.common import told
from serving.doors import batches, reindex, settings, sync
from serving.emphasis import LEAST, MOST

router = APIRouter(prefix="/v1/corpora/{corpus_id}", tags=["corpora"], route_class=StrictJSON)
MAX_FILES = 10_000
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["files"],
                    "properties": {
                        "files": {"type": "array", "minItems": 1, "items": {"type": "string", "format": "binary"}},
                        "paths": {"type": "array", "items": asked.PATH, "description": "As many, or none"},
                    },
                }
            }
        },
    }
}


class ManifestEntry(Body):
    path: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0)] = 0


class SyncBody(Body):
    """With a manifest: make the corpus like it, and delete what it lacks if told so. Without: like its
    source, and delete what that lacks unless told not to. A dry run changes nothing; that of a source is a job too, as a
    worker lists it, and what it has found is at /syncs/{sync_id}."""

    manifest: Annotated[list[ManifestEntry], Field(max_length=100_000)] | None = None
    delete_missing: bool | None = None
    dry_run: bool = False


Url = Annotated[str, Field(min_length=1, max_length=2000)]
HttpUrl = Annotated[Url, Field(json_schema_extra={"pattern": r"^https?://[a-z0-9.-]+(/|$)"})]
S3Url = Annotated[Url, Field(json_schema_extra={"pattern": r"^s3://[a-z0-9.-]{3,63}(/|$)"})]
Credential = Annotated[str, Field(min_length=1, max_length=64)]


class FolderSource(Body):
    type: Literal["folder"]
    path: Annotated[str, Field(min_length=1)]


class GitSource(Body):
    """A repository on the server by its `path`, or elsewhere by its `url`. `credential`: a name of docs/sources.md."""

    also_told: ClassVar[Mapping[str, Any]] = asked.one_of("path", "url", filled=asked.TEXT)

    type: Literal["git"]
    path: Annotated[str, Field(min_length=1)] | None = None
    url: HttpUrl | None = None
    ref: Annotated[str, Field(min_length=1, max_length=200)] = "HEAD"
    credential: Credential | None = None

    @model_validator(mode="after")
    def _somewhere(self) -> GitSource:
        if (self.path is None) == (self.url is None):
            raise ValueError("give either the path or the url of the repository")
        return self


class S3Source(Body):
    """`url`: s3://bucket/prefix. `endpoint`: https://… of a store that is not AWS."""

    type: Literal["s3"]
    url: S3Url
    endpoint: HttpUrl | None = None
    region: Annotated[str, Field(pattern="^[a-z0-9-]{1,40}$")] = "us-east-1"
    credential: Credential | None = None


class HttpSource(Body):
    """`url`: of a list of URLs, as text, JSON or a sitemap."""

    type: Literal["http"]
    url: HttpUrl
    credential: Credential | None = None


class SourceBody(Body):
    source: Annotated[FolderSource | GitSource | S3Source | HttpSource, Field(discriminator="type")] | None


class AccessRule(Body):
    """`path`: a pattern, e.g. hr/*. `principals`: keys' ids and names such as group:hr; null: everyone in the tenant."""

    path: Annotated[str, Field(min_length=1, max_length=1000)]
    principals: Annotated[list[Annotated[str, Field(min_length=1, max_length=255)]], Field(max_length=1000)] | None


class SharingBody(Body):
    """`group`: one that the operator has made with this tenant in it; null: nobody outside the tenant."""

    group: str | None


class SettingsBody(Body):
    """`emphasis`: path pattern → how many times the attention its documents are paid; the last one that fits counts.
    `conditioning`: what chunks are read behind; a job brings the documents that are there along. `keep_versions`: for how
    long ("30d", "12h"), or how many (0: none) of each document's replaced generations can be queried. `access`: who sees
    the documents of which paths; the last rule that fits counts, before what an upload says. `sharing`: with which group of
    tenants an empty corpus is to share KV. What is left out stays as it is."""

    emphasis: Annotated[dict[str, float], Field(max_length=200, json_schema_extra=asked.weights(LEAST, MOST))] | None = None
    conditioning: Literal["none", "document"] | None = None
    keep_versions: str | int | None = None
    access: Annotated[list[AccessRule], Field(max_length=200)] | None = None
    sharing: SharingBody | None = None


@router.post("/documents", openapi_extra=_FORM, responses=told(work.UploadJob))
async def upload_documents(parts: Parts, who: Writer, corpus_id: str, request: Request) -> dict[str, Any]:
    """Each `files` part becomes the document at its `paths` field or its name; archives are unpacked."""
    async with request.form(max_files=MAX_FILES, max_fields=MAX_FILES) as form:
        sent = [part for part in form.getlist("files") if isinstance(part, UploadFile)]
        paths = [path for path in form.getlist("paths") if isinstance(path, str)]
        if not sent or (paths and len(paths) != len(sent)):
            raise BadParameter("files", "send parts named files, and for each a field paths or none at all")
        named = paths or [sent_name(part) for part in sent]
        given = [(path, part.file) for path, part in zip(named, sent, strict=True)]
        return await to_thread.run_sync(batches.upload, parts, who, corpus_id, given)


@router.post("/sync", responses=told(work.ManifestSync | work.SourceSync))
def sync_corpus(parts: Parts, who: Writer, corpus_id: str, body: SyncBody) -> dict[str, Any]:
    if body.manifest is None:
        return sync.from_source(parts, who, corpus_id, body.delete_missing is not False, body.dry_run)
    manifest = [Entry(entry.path, entry.sha256, entry.bytes) for entry in body.manifest]
    return sync.from_manifest(parts, who, corpus_id, manifest, bool(body.delete_missing), body.dry_run)


@router.get("/syncs/{sync_id}", responses=told(work.SyncState))
def retrieve_sync(parts: Parts, who: Reader, corpus_id: str, sync_id: str) -> dict[str, Any]:
    return sync.show(parts, who, corpus_id, sync_id)


@router.post("/reindex", responses=told(work.Job))
def reindex_corpus(parts: Parts, who: Admin, corpus_id: str) -> dict[str, Any]:
    return reindex.start(parts, who, corpus_id)


@router.get("/sources", responses=told(work.Source))
def retrieve_source(parts: Parts, who: Reader, corpus_id: str) -> dict[str, Any]:
    return sync.get_source(parts, who, corpus_id)


@router.put("/sources", responses=told(work.Source))
def replace_source(parts: Parts, who: Admin, corpus_id: str, body: SourceBody) -> dict[str, Any]:
    source = None if body.source is None else body.source.model_dump(exclude_none=True)
    return sync.set_source(parts, who, corpus_id, source)


@router.get("/settings", responses=told(work.Settings))
def retrieve_settings(parts: Parts, who: Reader, corpus_id: str) -> dict[str, Any]:
    return settings.show(parts, who, corpus_id)


@router.put("/settings", responses=told(work.Settings))
def replace_settings(parts: Parts, who: Admin, corpus_id: str, body: SettingsBody) -> dict[str, Any]:
    access = None if body.access is None else [rule.model_dump() for rule in body.access]
    sharing = None if body.sharing is None else settings.Sharing(body.sharing.group)
    return settings.change(
        parts, who, corpus_id, body.emphasis, body.conditioning, body.keep_versions, access, sharing
    )
