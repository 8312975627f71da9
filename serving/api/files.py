"""/v1/files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any, BinaryIO
from urllib.parse import quote

from fastapi import APIRouter, Depends, File, Form, Request, Response, UploadFile
from fastapi.responses import StreamingResponse
from starlette.datastructures import UploadFile as SentFile

from ingest.files import PIECE
from serving.api.access import LongPage, Parts, Reader, Writer, deleted
from serving.api.bodies import UNKNOWN, hint_for
from serving.api.errors import BadParameter
from serving.api.json_body import StrictJSON
from serving.api.shapes import stores
from serving.api.shapes.common import Deleted, told
from serving.doors import files

router = APIRouter(prefix="/v1/files", tags=["files"], route_class=StrictJSON)
FIELDS = ("file", "purpose")
PURPOSES = ("assistants", "user_data", "vision", "batch", "fine-tune", "evals")


async def _known_fields(request: Request) -> None:
    """The form has been read by then. Raises BadParameter."""
    for name in await request.form():
        if name.partition("[")[0] == "expires_after":
            raise BadParameter("expires_after", "files do not expire here: delete the file when it is done")
        if name not in FIELDS:
            raise BadParameter(name[:100], f"Unknown parameter: {name[:100]!r}{hint_for(name, FIELDS)}", UNKNOWN)


@router.post("", dependencies=[Depends(_known_fields)], responses=told(stores.File))
def upload_file(
    parts: Parts,
    who: Writer,
    file: Annotated[UploadFile, File()],
    purpose: Annotated[str, Form(json_schema_extra={"enum": [*PURPOSES]})] = "assistants",
) -> dict[str, Any]:
    if purpose not in PURPOSES:
        raise BadParameter("purpose", f"purpose is one of {', '.join(PURPOSES)}")
    return files.upload(parts, who, sent_name(file), file.file, purpose)


@router.get("", responses=told(stores.FileList))
def list_files(parts: Parts, who: Reader, page: LongPage, purpose: str | None = None) -> dict[str, Any]:
    return files.show_all(parts, who, page, purpose)


@router.get("/{file_id}", responses=told(stores.File))
def retrieve_file(parts: Parts, who: Reader, file_id: str) -> dict[str, Any]:
    return files.show(parts, who, file_id)


@router.get("/{file_id}/content")
def retrieve_file_content(parts: Parts, who: Reader, file_id: str) -> Response:
    opened = ExitStack()
    file, stream = opened.enter_context(files.content(parts, who, file_id))
    name = quote(file.filename, safe="")
    # Always a download: an uploaded page must not run under this service's address.
    headers = {
        "content-length": str(file.bytes),
        "content-disposition": f"attachment; filename*=UTF-8''{name}",
        "x-content-type-options": "nosniff",
        "content-security-policy": "sandbox",
    }
    return StreamingResponse(_pieces(opened, stream), media_type="application/octet-stream", headers=headers)


def _pieces(opened: ExitStack, stream: BinaryIO) -> Iterator[bytes]:
    with opened:
        while piece := stream.read(PIECE):
            yield piece


@router.delete("/{file_id}", responses=told(Deleted))
def delete_file(parts: Parts, who: Writer, file_id: str) -> dict[str, Any]:
    files.remove(parts, who, file_id)
    return deleted(file_id, "file")


def sent_name(file: SentFile) -> str:
    """The name as the client has it: in a multipart header a quote and line ends travel percent-encoded."""
    name = _whole_name(file)
    for sent, meant in (("%22", '"'), ("%0D", "\r"), ("%0A", "\n")):
        name = name.replace(sent, meant)
    if not name or "\0" in name:
        raise BadParameter("file", "the file needs a name without NUL characters")
    return name


def _whole_name(file: SentFile) -> str:
    """The multipart parser drops the front of a name such as `c:\\x.txt`; the part's header has all of it."""
    header = file.headers.get("content-disposition", "").encode("latin-1").decode("utf-8", "replace")
    drive = re.search(r'filename="(\\\\[^"]*|.:\\[^"]*)"', header)
    return drive[1].replace("\\\\", "\\") if drive else file.filename or ""
