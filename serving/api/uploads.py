"""/v1/uploads: a file in parts, each no larger than an upload may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, File, UploadFile
from pydantic import Field

from serving.api.access import Parts, Writer
from serving.api.bodies import Body, NotServed
from serving.api.errors import BadParameter
from serving.api.files import PURPOSES
from serving.api.json_body import StrictJSON
from serving.api.shapes import stores
from serving.api.shapes.common import told
from serving.doors import uploads

router = APIRouter(prefix="/v1/uploads", tags=["uploads"], route_class=StrictJSON)
MAX_BYTES = 8 << 30  # OpenAI's
MAX_PARTS = 10_000


class UploadBody(Body):
    not_served: ClassVar[Mapping[str, NotServed]] = {"expires_after": NotServed(instead="delete the file when it is done")}

    filename: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]
    bytes: Annotated[int, Field(ge=0, le=MAX_BYTES)]
    purpose: Annotated[str, Field(json_schema_extra={"enum": [*PURPOSES]})]
    mime_type: str


class CompleteBody(Body):
    part_ids: Annotated[list[str], Field(max_length=MAX_PARTS)]
    md5: Annotated[str, Field(pattern=r"^[0-9A-Fa-f]{32}$")] | None = None


@router.post("", responses=told(stores.Upload))
def create_upload(parts: Parts, who: Writer, body: UploadBody) -> dict[str, Any]:
    if body.purpose not in PURPOSES:
        raise BadParameter("purpose", f"purpose is one of {', '.join(PURPOSES)}")
    return uploads.create(parts, who, body.filename, body.bytes, body.purpose)


@router.post("/{upload_id}/parts", responses=told(stores.UploadPart))
def add_upload_part(parts: Parts, who: Writer, upload_id: str, data: Annotated[UploadFile, File()]) -> dict[str, Any]:
    return uploads.add_part(parts, who, upload_id, data.file)


@router.post("/{upload_id}/complete", responses=told(stores.Upload))
def complete_upload(parts: Parts, who: Writer, upload_id: str, body: CompleteBody) -> dict[str, Any]:
    return uploads.complete(parts, who, upload_id, body.part_ids, body.md5)


@router.post("/{upload_id}/cancel", responses=told(stores.Upload))
def cancel_upload(parts: Parts, who: Writer, upload_id: str) -> dict[str, Any]:
    return uploads.cancel(parts, who, upload_id)
