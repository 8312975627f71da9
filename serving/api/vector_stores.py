"""/v1/vector_stores, and the search in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field

from serving.api.access import AnyPage, Parts, Reader, Writer
from serving.api.bodies import Body, NotServed
from serving.api.file_search import Filters, RankingOptions
from serving.api.json_body import StrictJSON
from serving.api.shapes import stores
from serving.api.shapes.common import told
from serving.api.times import Moment
from serving.doors import batches, corpora, search
from serving.doors.documents import Wanted

router = APIRouter(prefix="/v1/vector_stores", tags=["vector stores"], route_class=StrictJSON)
Query = Annotated[str, Field(json_schema_extra={"pattern": r"\S"})]
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class Chunking(Body):
    """Chunks are cut to the reader model's measure; there is nothing to choose."""

    not_served: ClassVar[Mapping[str, NotServed]] = {
        "chunking_strategy": NotServed((None, {"type": "auto"}), "leave it out, chunks are cut to the reader model's measure")
    }


class StoreBody(Body):
    not_served: ClassVar[Mapping[str, NotServed]] = {"expires_after": NotServed(instead="delete the store when it is done")}

    name: Annotated[str, Field(max_length=256)] | None = None
    metadata: Metadata | None = None


class NewStoreBody(StoreBody, Chunking):
    not_served: ClassVar[Mapping[str, NotServed]] = {**StoreBody.not_served, **Chunking.not_served}

    description: Annotated[str, Field(max_length=4096)] | None = None
    file_ids: Annotated[list[str], Field(max_length=500)] = Field([])


class SearchBody(Body):
    not_served: ClassVar[Mapping[str, NotServed]] = {
        "rewrite_query": NotServed((None, False), "leave it out, a query is searched as it stands")
    }

    query: Query | Annotated[list[Query], Field(min_length=1, max_length=20)]
    max_num_results: Annotated[int, Field(ge=1, le=50)] = 10
    filters: Filters | None = None
    ranking_options: RankingOptions | None = None
    as_of: Moment | None = None  # of what was current then


@router.post("", responses=told(stores.VectorStore))
def create_vector_store(parts: Parts, who: Writer, body: NewStoreBody) -> dict[str, Any]:
    wanted = [Wanted(file_id) for file_id in body.file_ids]
    return batches.create_store(parts, who, body.name or "", body.metadata or {}, wanted, body.description)


@router.get("", responses=told(stores.VectorStoreList))
def list_vector_stores(parts: Parts, who: Reader, page: AnyPage) -> dict[str, Any]:
    return corpora.show_all(parts, who, page)


@router.get("/{vector_store_id}", responses=told(stores.VectorStore))
def retrieve_vector_store(parts: Parts, who: Reader, vector_store_id: str) -> dict[str, Any]:
    return corpora.show(parts, who, vector_store_id)


@router.post("/{vector_store_id}", responses=told(stores.VectorStore))
def update_vector_store(parts: Parts, who: Writer, vector_store_id: str, body: StoreBody) -> dict[str, Any]:
    return corpora.change(parts, who, vector_store_id, body.name, body.metadata)


@router.delete("/{vector_store_id}", responses=told(stores.DeletedVectorStore))
def delete_vector_store(parts: Parts, who: Writer, vector_store_id: str) -> dict[str, Any]:
    return corpora.remove(parts, who, vector_store_id)


@router.post("/{vector_store_id}/search", responses=told(stores.SearchResults))
def search_vector_store(parts: Parts, who: Reader, vector_store_id: str, body: SearchBody) -> dict[str, Any]:
    ranking = body.ranking_options or RankingOptions()
    asked = (body.query, body.max_num_results, body.filters, ranking.score_threshold, body.as_of)
    return search.show(parts, who, vector_store_id, *asked, rerank=ranking.ranker != "none")
