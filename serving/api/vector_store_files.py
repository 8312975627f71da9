"""/v1/vector_stores/{id}/files and /file_batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Response
from pydantic import Field, model_validator

from serving.api.access import AnyPage, Parts, Reader, Writer
from serving.api.bodies import Body
from serving.api.json_body import StrictJSON
from serving.api.shapes import asked, stores
from serving.api.shapes.common import told
from serving.api.vector_stores import Chunking
from serving.doors import batches, documents
from serving.doors.documents import Wanted

router = APIRouter(prefix="/v1/vector_stores/{vector_store_id}", tags=["vector store files"], route_class=StrictJSON)
POLL_AFTER_MS = "500"
Status = Literal["in_progress", "completed", "failed", "cancelled"]
Attributes = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)] | bool | float],
    Field(max_length=16),
]


class AttachBody(Chunking):
    file_id: str
    attributes: Attributes | None = None
    access: Annotated[list[str], Field(max_length=1000)] | None = None  # ids of the keys that may see it

    def wanted(self) -> Wanted:
        return Wanted(self.file_id, dict(self.attributes or {}), access=self.access)


class AttributesBody(Body):
    attributes: Attributes | None


class BatchBody(Chunking):
    also_told: ClassVar[Mapping[str, Any]] = asked.one_of("file_ids", "files", filled={"type": "array", "minItems": 1})

    file_ids: Annotated[list[str], Field(max_length=2000)] | None = None
    files: Annotated[list[AttachBody], Field(max_length=2000)] | None = None
    attributes: Attributes | None = None

    @model_validator(mode="after")
    def _one_list(self) -> BatchBody:
        if bool(self.file_ids) == bool(self.files):
            raise ValueError("name the files in file_ids or in files, one of the two")
        return self

    def wanted(self) -> list[Wanted]:
        if self.files:
            return [file.wanted() for file in self.files]
        return [Wanted(file_id, dict(self.attributes or {})) for file_id in self.file_ids or ()]


def _pollable(shown: dict[str, Any], response: Response) -> dict[str, Any]:
    """Tell the polling helpers of OpenAI's clients how long to sleep."""
    if shown["status"] == "in_progress":
        response.headers["openai-poll-after-ms"] = POLL_AFTER_MS
    return shown


@router.post("/files", responses=told(stores.StoreFile))
def attach_file(
    parts: Parts, who: Writer, vector_store_id: str, body: AttachBody, out: Response
) -> dict[str, Any]:
    return _pollable(documents.add(parts, who, vector_store_id, body.wanted()), out)


@router.get("/files", responses=told(stores.StoreFileList))
def list_vector_store_files(
    parts: Parts, who: Reader, vector_store_id: str, page: AnyPage, filter: Status | None = None
) -> dict[str, Any]:
    return documents.show_all(parts, who, vector_store_id, page, filter)


@router.get("/files/{file_id}", responses=told(stores.StoreFile))
def retrieve_vector_store_file(
    parts: Parts, who: Reader, vector_store_id: str, file_id: str, out: Response
) -> dict[str, Any]:
    return _pollable(documents.show(parts, who, vector_store_id, file_id), out)


@router.post("/files/{file_id}", responses=told(stores.StoreFile))
def update_vector_store_file(
    parts: Parts, who: Writer, vector_store_id: str, file_id: str, body: AttributesBody
) -> dict[str, Any]:
    return documents.change(parts, who, vector_store_id, file_id, dict(body.attributes or {}))


@router.get("/files/{file_id}/content", responses=told(stores.FileContent))
def retrieve_vector_store_file_content(
    parts: Parts, who: Reader, vector_store_id: str, file_id: str
) -> dict[str, Any]:
    return documents.text(parts, who, vector_store_id, file_id)


@router.delete("/files/{file_id}", responses=told(stores.DeletedStoreFile))
def delete_vector_store_file(parts: Parts, who: Writer, vector_store_id: str, file_id: str) -> dict[str, Any]:
    return documents.remove(parts, who, vector_store_id, file_id)


@router.post("/file_batches", responses=told(stores.FileBatch))
def create_file_batch(
    parts: Parts, who: Writer, vector_store_id: str, body: BatchBody, out: Response
) -> dict[str, Any]:
    return _pollable(batches.add(parts, who, vector_store_id, body.wanted()), out)


@router.get("/file_batches/{batch_id}", responses=told(stores.FileBatch))
def retrieve_file_batch(
    parts: Parts, who: Reader, vector_store_id: str, batch_id: str, out: Response
) -> dict[str, Any]:
    return _pollable(batches.show(parts, who, vector_store_id, batch_id), out)


@router.get("/file_batches/{batch_id}/files", responses=told(stores.StoreFileList))
def list_file_batch_files(
    parts: Parts,
    who: Reader,
    vector_store_id: str,
    batch_id: str,
    page: AnyPage,
    filter: Status | None = None,
) -> dict[str, Any]:
    return batches.show_files(parts, who, vector_store_id, batch_id, page, filter)


@router.post("/file_batches/{batch_id}/cancel", responses=told(stores.FileBatch))
def cancel_file_batch(parts: Parts, who: Writer, vector_store_id: str, batch_id: str) -> dict[str, Any]:
    return batches.cancel(parts, who, vector_store_id, batch_id)
