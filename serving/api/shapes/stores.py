"""Files, uploads and vector stores."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from serving.api.shapes.answers import Place
from serving.api.shapes.common import Attributes, Count, DocumentId, FileId, Id, JobId, Listed, Moment, Name, Path, Sha256, Time

Status = Literal["in_progress", "completed", "failed", "cancelled"]


class File(BaseModel):
    id: FileId
    object: Literal["file"]
    bytes: Annotated[int, Field(examples=[1200])]
    created_at: Time
    filename: Path
    purpose: Annotated[str, Field(examples=["assistants"])]
    status: Literal["processed"]
    sha256: Sha256


class FileList(Listed):
    data: list[File]


class Upload(BaseModel):
    id: Annotated[str, Field(examples=["upload_1"])]
    object: Literal["upload"]
    bytes: Annotated[int, Field(examples=[1200])]
    created_at: Time
    filename: Path
    purpose: Annotated[str, Field(examples=["assistants"])]
    status: Literal["pending", "completed", "cancelled", "expired"]
    expires_at: Time
    file: File | None


class UploadPart(BaseModel):
    id: Annotated[str, Field(examples=["part_1"])]
    object: Literal["upload.part"]
    created_at: Time
    upload_id: Annotated[str, Field(examples=["upload_1"])]


class FileCounts(BaseModel):
    in_progress: Count
    completed: Count
    failed: Count
    cancelled: Count
    total: Count


class VectorStore(BaseModel):
    id: Id
    object: Literal["vector_store"]
    created_at: Time
    name: Name
    description: Annotated[str | None, Field(examples=["What the billing team answers from"])]
    status: Literal["in_progress", "completed"]
    usage_bytes: Count
    file_counts: FileCounts
    last_active_at: Time
    expires_after: None
    expires_at: None
    metadata: Annotated[dict[str, Any], Field(examples=[{"team": "billing"}])]


class VectorStoreList(Listed):
    data: list[VectorStore]


class SiteOutcome(BaseModel):
    """What became of a deletion at a child site."""

    site: Annotated[str, Field(examples=["edge"])]
    site_id: Annotated[str, Field(examples=["site-1"])]
    state: Literal["erased", "pending", "removed"]
    at: Moment | None


class Purged(BaseModel):
    """`receipt`: how many of each kind were deleted, and how many another document still holds."""

    id: Id
    deleted: Literal[True]
    receipt: Annotated[dict[str, int], Field(examples=[{"documents": 1, "chunks": 12, "kv_objects": 11, "kv_kept": 1}])]
    job_id: JobId
    sites: list[SiteOutcome]


class DeletedVectorStore(Purged):
    object: Literal["vector_store.deleted"]


class DeletedStoreFile(Purged):
    object: Literal["vector_store.file.deleted"]


class Purge(BaseModel):
    id: JobId
    object: Literal["purge"]
    status: Literal["in_progress", "completed"]
    created_at: Moment
    receipt: Annotated[dict[str, int], Field(examples=[{"documents": 1, "chunks": 12}])]
    sites: list[SiteOutcome]


class LastError(BaseModel):
    """`detail_code`: the error in this service's own words."""

    code: Literal["server_error", "unsupported_file", "invalid_file"]
    message: str
    detail_code: str


class Chunking(BaseModel):
    type: Literal["other"]


class StoreFile(BaseModel):
    """`job_id`: where the answer is to the request that puts the file in. `path`: null of a document that is closed to an
    administrator, who may delete it."""

    id: FileId
    object: Literal["vector_store.file"]
    created_at: Time
    vector_store_id: Id
    status: Status
    last_error: LastError | None
    usage_bytes: Count
    attributes: Attributes
    chunking_strategy: Chunking
    document_id: DocumentId
    path: Path | None
    job_id: JobId | None = None


class StoreFileList(Listed):
    data: list[StoreFile]


class FileBatch(BaseModel):
    id: JobId
    object: Literal["vector_store.file_batch"]
    created_at: Time
    vector_store_id: Id
    status: Literal["in_progress", "completed", "cancelled"]
    file_counts: FileCounts


class TextContent(BaseModel):
    type: Literal["text"]
    text: Annotated[str, Field(examples=["Invoices are due 30 days after receipt."])]


class FileContent(BaseModel):
    object: Literal["vector_store.file_content.page"]
    data: list[TextContent]
    has_more: Literal[False]
    next_page: None


class SearchResult(Place):
    file_id: FileId
    filename: Path
    score: Annotated[float, Field(ge=0, le=1, examples=[0.82])]
    attributes: Attributes
    content: list[TextContent]
    document_id: DocumentId
    version: Sha256


class SearchResults(BaseModel):
    object: Literal["vector_store.search_results.page"]
    search_query: Annotated[list[str], Field(examples=[["When are invoices due?"]])]
    data: list[SearchResult]
    has_more: Literal[False]
    next_page: None


class Passage(Place):
    """`before`, `quote` and `after` follow one another in the document. `current`: it is the document's text to this moment."""

    object: Literal["passage"]
    vector_store_id: Id
    file_id: FileId
    document_id: DocumentId
    filename: Path
    version: Sha256
    current: bool
    valid_from: Moment | None
    valid_to: Annotated[float | None, Field(examples=[None])]
    before: Annotated[str, Field(examples=["# Payment\n"])]
    quote: Annotated[str, Field(examples=["Invoices are due 30 days after receipt."])]
    after: Annotated[str, Field(examples=[" Late fees follow."])]
    characters: Count
