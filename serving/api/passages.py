"""GET …/passage: what a citation points at, with the text around it."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from serving.api.access import Parts, Reader
from serving.api.errors import BadParameter
from serving.api.json_body import StrictJSON
from serving.api.shapes import stores
from serving.api.shapes.common import told
from serving.doors import passages

router = APIRouter(prefix="/v1/vector_stores/{vector_store_id}", tags=["vector store files"], route_class=StrictJSON)
LONGEST = 100_000  # characters of a passage
FURTHEST = 1 << 40
Offset = Annotated[int, Query(ge=0, le=FURTHEST)]


@router.get("/files/{file_id}/passage", responses=told(stores.Passage))
def retrieve_passage(
    parts: Parts,
    who: Reader,
    vector_store_id: str,
    file_id: str,
    start: Offset,
    end: Offset,
    context: Annotated[int, Query(ge=0, le=10_000)] = 600,
) -> dict[str, Any]:
    """`start`, `end` and `file_id` of a citation; `context`: characters wanted before and after it."""
    if not start < end <= start + LONGEST:
        raise BadParameter("end", f"a passage has 1 to {LONGEST} characters: end is behind start")
    return passages.show(parts, who, vector_store_id, file_id, passages.Span(start, end, context))
