"""What a search is asked for: OpenAI's file_search tool, and the options that it shares with the search route."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationError, WithJsonSchema

from retrieval import filters as attribute_filters
from serving.api.bodies import Body, NotServed, refusal
from serving.api.errors import BadParameter
from serving.api.shapes import asked
from storage.errors import UserError

Score = Annotated[float, Field(ge=0, le=1)]


def _checked(filters: dict[str, Any]) -> dict[str, Any]:
    try:
        attribute_filters.check(filters)
    except UserError as error:
        raise ValueError(str(error)) from error
    return filters


Filters = Annotated[dict[str, Any], AfterValidator(_checked), WithJsonSchema(asked.FILTERS)]


class RankingOptions(Body):
    """`ranker` none: as both searches found it, where the server has a reranker. `score_threshold`: see retrieval.search."""

    not_served: ClassVar[Mapping[str, NotServed]] = {
        "hybrid_search": NotServed(instead="leave it out, both searches weigh the same")
    }

    ranker: Literal["none", "auto", "default-2024-11-15"] = "auto"
    score_threshold: Score | None = None


class FileSearch(Body):
    """The tool file_search."""

    type: Literal["file_search"]
    vector_store_ids: list[str] | None = None
    max_num_results: Annotated[int, Field(ge=1, le=50)] | None = None
    filters: Filters | None = None
    ranking_options: RankingOptions | None = None

    @classmethod
    def read(cls, tool: Mapping[str, Any], where: str) -> FileSearch:
        """The tool as it was sent. Raises BadParameter."""
        try:
            return cls.model_validate(tool)
        except ValidationError as error:
            param, message, code = refusal(error.errors(), tool)
            raise BadParameter(f"{where}.{param}", message.replace(param, f"{where}.{param}", 1), code) from error
