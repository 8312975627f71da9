"""Models, embeddings, rankings, records: answers in which nobody writes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from serving.api.shapes.common import Count, Path, Time


class Model(BaseModel):
    id: Annotated[str, Field(examples=["reader@handbook"])]
    object: Literal["model"]
    created: Time
    owned_by: Literal["preread"]
    max_model_len: Annotated[int, Field(examples=[32768])]
    full_prefill_reason: Annotated[str | None, Field(description="Why this model's prompts are not blended, if they are not")]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    prompt_tokens: Count
    total_tokens: Count


class Embedding(BaseModel):
    """`embedding`: numbers, or their little-endian float32 bytes in base64."""

    object: Literal["embedding"]
    index: Count
    embedding: Annotated[list[float] | str, Field(examples=[[0.6, 0.8]])]


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: Annotated[str, Field(examples=["any"])]
    usage: Tokens


class RankedText(BaseModel):
    text: Annotated[str, Field(examples=["Invoices are due."])]


class Ranked(BaseModel):
    index: Count
    relevance_score: Annotated[float, Field(ge=0, le=1, examples=[0.82])]
    document: RankedText | None = None


class Ranking(BaseModel):
    id: Annotated[str, Field(examples=["rerank-1"])]
    model: Annotated[str, Field(description="What has ranked", examples=["cosine:static-en"])]
    usage: Tokens
    results: list[Ranked]


class Record(BaseModel):
    content: Annotated[str, Field(examples=["Invoices are due 30 days after receipt."])]
    score: Annotated[float, Field(ge=0, le=1, examples=[0.82])]
    title: Path
    metadata: Annotated[dict[str, Any], Field(examples=[{"year": 2024, "file_id": "file-1", "start": 0, "end": 40}])]


class Records(BaseModel):
    records: list[Record]


class Alive(BaseModel):
    status: Literal["ok"]


class ServedModel(BaseModel):
    id: Annotated[str, Field(examples=["reader"])]
    full_prefill_reason: str | None


class Readiness(BaseModel):
    """`checks`: of each part `ok`, or what is wrong with it; not there while the process ends."""

    status: Literal["ok", "unavailable", "stopping"]
    checks: Annotated[
        dict[str, str], Field(examples=[{"database": "ok", "broker": "ok", "object_store": "ok", "engine": "ok"}])
    ] = {}
    policy: Annotated[str, Field(examples=["ok"])] = "ok"
    model: ServedModel | None = None


class LoginConfig(BaseModel):
    oidc: bool
    login_url: Annotated[str | None, Field(examples=["/auth/login"])]


class Session(BaseModel):
    object: Literal["session"]
    user_id: Annotated[str | None, Field(examples=["ann"])]
    tenant_id: Annotated[str, Field(examples=["default"])]
    scopes: Annotated[list[str], Field(examples=[["read", "write"]])]
    csrf_token: Annotated[str, Field(description="For the header x-csrf-token", examples=["5f2b…"])]


class Ended(BaseModel):
    object: Literal["session"]
    deleted: Literal[True]
