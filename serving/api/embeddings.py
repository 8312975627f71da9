"""POST /v1/embeddings, with the embedder that searches are made with."""

from __future__ import annotations

import base64
import struct
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, Field

from serving.api.access import Parts, Reader
from serving.api.errors import BadParameter

router = APIRouter(prefix="/v1/embeddings", tags=["embeddings"])
MAX_TEXTS = 2048


class EmbeddingsBody(BaseModel):
    input: Any
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None

    def texts(self) -> list[str]:
        """The input as texts. Raises BadParameter."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        if not isinstance(texts, list) or not texts or len(texts) > MAX_TEXTS:
            raise BadParameter("input", f"input is a text or a list of 1 to {MAX_TEXTS} texts")
        if not all(isinstance(text, str) for text in texts):
            hint = "token ids are not served (in LangChain: check_embedding_ctx_length=False)"
            raise BadParameter("input", f"input is a text or a list of texts; {hint}")
        if not all(texts):
            raise BadParameter("input", "input has an empty text")
        return texts


@router.post("")
def create_embeddings(parts: Parts, who: Reader, body: EmbeddingsBody) -> dict[str, Any]:
    texts, embedder = body.texts(), parts.embedder
    if body.dimensions not in (None, embedder.dimensions):
        raise BadParameter(
            "dimensions", f"this embedder makes vectors of {embedder.dimensions} dimensions only"
        )
    tokens = sum(min(embedder.count_tokens(text), embedder.max_tokens) for text in texts)
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
        for i, vector in enumerate(embedder.embed(texts))
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": body.model or embedder.identity, "usage": usage}


def _encoded(vector: list[float], encoding_format: str) -> list[float] | str:
    if encoding_format == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
