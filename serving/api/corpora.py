"""Native routes of a corpus: many documents at once, sync with a manifest or a source."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.datastructures import UploadFile

from ingest.sources import Entry
from serving.api.access import Admin, Parts, Reader, Writer
from serving.api.errors import BadParameter
from serving.api.files import sent_name
from serving.doors import batches, reindex, settings, sync

router = APIRouter(prefix="/v1/corpora/{corpus_id}", tags=["corpora"])
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
                        "files": {"type": "array", "items": {"type": "string", "format": "binary"}},
                        "paths": {"type": "array", "items": {"type": "string"}},
                    },
                }
            }
        },
    }
}


class ManifestEntry(BaseModel):
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bytes: Annotated[int, Field(ge=0)] = 0


class SyncBody(BaseModel):
    """With a manifest: make the corpus like it, and delete what it lacks if told so. Without: like its
    source, and delete what that lacks unless told not to."""

    manifest: Annotated[list[ManifestEntry], Field(max_length=100_000)] | None = None
    delete_missing: bool | None = None
    dry_run: bool = False

    @model_validator(mode="after")
    def _dry_with_manifest(self) -> SyncBody:
        if self.dry_run and self.manifest is None:
            raise ValueError("a dry run needs a manifest: a source is listed by a worker")
        return self


class FolderSource(BaseModel):
    type: Literal["folder"]
    path: Annotated[str, Field(min_length=1)]


class GitSource(BaseModel):
    type: Literal["git"]
    path: Annotated[str, Field(min_length=1)]
    ref: Annotated[str, Field(min_length=1, max_length=200)] = "HEAD"


class SourceBody(BaseModel):
    source: Annotated[FolderSource | GitSource, Field(discriminator="type")] | None


class SettingsBody(BaseModel):
    """`emphasis`: path pattern → how many times the attention its documents are paid; the last one that fits counts.
    `conditioning`: what chunks are read behind; a job brings the documents that are there along. What is left out stays as
    it is."""

    model_config = ConfigDict(extra="forbid")
    emphasis: Annotated[dict[str, float], Field(max_length=200)] | None = None
    conditioning: Literal["none", "document"] | None = None


@router.post("/documents", openapi_extra=_FORM)
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


@router.post("/sync")
def sync_corpus(parts: Parts, who: Writer, corpus_id: str, body: SyncBody) -> dict[str, Any]:
    if body.manifest is None:
        return sync.from_source(parts, who, corpus_id, body.delete_missing is not False)
    manifest = [Entry(entry.path, entry.sha256, entry.bytes) for entry in body.manifest]
    return sync.from_manifest(parts, who, corpus_id, manifest, bool(body.delete_missing), body.dry_run)


@router.post("/reindex")
def reindex_corpus(parts: Parts, who: Admin, corpus_id: str) -> dict[str, Any]:
    return reindex.start(parts, who, corpus_id)


@router.get("/source")
def retrieve_source(parts: Parts, who: Reader, corpus_id: str) -> dict[str, Any]:
    return sync.get_source(parts, who, corpus_id)


@router.put("/source")
def replace_source(parts: Parts, who: Admin, corpus_id: str, body: SourceBody) -> dict[str, Any]:
    source = None if body.source is None else body.source.model_dump()
    return sync.set_source(parts, who, corpus_id, source)


@router.get("/settings")
def retrieve_settings(parts: Parts, who: Reader, corpus_id: str) -> dict[str, Any]:
    return settings.show(parts, who, corpus_id)


@router.put("/settings")
def replace_settings(parts: Parts, who: Admin, corpus_id: str, body: SettingsBody) -> dict[str, Any]:
    return settings.change(parts, who, corpus_id, body.emphasis, body.conditioning)
