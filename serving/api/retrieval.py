"""POST /retrieval: a corpus as an external knowledge base of Dify."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field

from serving.api.access import Parts, Reader
from serving.api.bodies import Body
from serving.api.errors import BadParameter
from serving.api.json_body import StrictJSON
from serving.api.shapes import inference
from serving.api.shapes.common import told
from serving.doors import search

router = APIRouter(prefix="/retrieval", tags=["retrieval"], route_class=StrictJSON)
# Dify's words for comparisons that search filters know too.
COMPARISONS = {
    "is": "eq", "=": "eq", "is not": "ne", "≠": "ne", ">": "gt", "<": "lt", "≥": "gte", "≤": "lte", "after": "gt", "before": "lt",
}  # fmt: skip


class Setting(Body):
    top_k: Annotated[int, Field(ge=1, le=50)] = 10
    score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None


class Condition(Body):
    name: Annotated[list[str], Field(min_length=1, max_length=20)]
    comparison_operator: Annotated[str, Field(json_schema_extra={"enum": [*COMPARISONS]})]
    value: str | float | bool | None = None


class Conditions(Body):
    logical_operator: Literal["and", "or"] = "and"
    conditions: Annotated[list[Condition], Field(max_length=50)] = Field([])

    def filters(self) -> dict[str, Any] | None:
        """As a search takes them. Raises BadParameter."""
        made = [_filter(number, condition) for number, condition in enumerate(self.conditions)]
        return {"type": self.logical_operator, "filters": made} if made else None


def _filter(number: int, condition: Condition) -> dict[str, Any]:
    """One of the names is enough."""
    kind = COMPARISONS.get(condition.comparison_operator)
    if kind is None:
        where = f"metadata_condition.conditions.{number}.comparison_operator"
        raise BadParameter(where, f"{condition.comparison_operator!r} is not served: use {', '.join(COMPARISONS)}")
    each = [{"type": kind, "key": name, "value": condition.value} for name in condition.name]
    return each[0] if len(each) == 1 else {"type": "or", "filters": each}


class RetrievalBody(Body):
    knowledge_id: str
    query: Annotated[str, Field(min_length=1)]
    retrieval_setting: Setting = Setting()
    metadata_condition: Conditions | None = None


@router.post("", responses=told(inference.Records))
def retrieve_records(parts: Parts, who: Reader, body: RetrievalBody) -> dict[str, Any]:
    """`knowledge_id` is the id of a vector store."""
    setting = body.retrieval_setting
    filters = body.metadata_condition.filters() if body.metadata_condition else None
    found = search.show(parts, who, body.knowledge_id, body.query, setting.top_k, filters, setting.score_threshold)
    return {"records": [_record(hit) for hit in found["data"]]}


def _record(hit: dict[str, Any]) -> dict[str, Any]:
    text = "".join(part["text"] for part in hit["content"])
    place = {name: hit[name] for name in ("file_id", "page_start", "line_start", "start", "end")}
    return {"content": text, "score": hit["score"], "title": hit["filename"], "metadata": {**hit["attributes"], **place}}
