"""POST /v1/rerank, in the shape of Jina and Cohere that vLLM serves."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from retrieval.reranker import CosineReranker
from serving.api.access import Parts, Reader
from serving.api.bodies import Body
from serving.api.json_body import StrictJSON
from serving.api.shapes import inference
from serving.api.shapes.common import told

router = APIRouter(prefix="/v1/rerank", tags=["rerank"], route_class=StrictJSON)
MAX_TEXTS = 1000


class TextDocument(Body):
    text: str


class RerankBody(Body):
    # Of Cohere's, Jina's and vLLM's shapes; texts longer than the model reads are cut anyway.
    ignored = frozenset({"user", "truncation", "max_tokens_per_doc"})

    model: str = ""
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | TextDocument], Field(min_length=1, max_length=MAX_TEXTS)]
    top_n: Annotated[int, Field(ge=0)] = 0  # 0: all
    return_documents: bool = True

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]


@router.post("", responses=told(inference.Ranking))
def rerank(parts: Parts, who: Reader, body: RerankBody) -> dict[str, Any]:
    """`model` in the answer says what has ranked: without a reranker it is the embedder's cosine."""
    reranker = parts.reranker or CosineReranker(parts.embedder)
    texts = body.texts()
    scores = reranker.scores(body.query, texts)
    order = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
    shown = {i: {"document": {"text": texts[i]}} if body.return_documents else {} for i in order}
    results = [{"index": i, "relevance_score": scores[i], **shown[i]} for i in order]
    tokens = sum(parts.embedder.count_tokens(text) for text in (body.query, *texts))
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": reranker.name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "results": results,
    }
