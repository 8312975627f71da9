"""POST /v1/embeddings, with the embedder that searches are made with."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, WithJsonSchema

from serving.api.access import Parts, Reader
from serving.api.bodies import Body
from serving.api.errors import BadParameter
from serving.api.json_body import StrictJSON
from serving.api.shapes import asked, inference
from serving.api.shapes.common import told
from serving.api.token_ids import texts_of
from storage.errors import UserError

router = APIRouter(prefix="/v1/embeddings", tags=["embeddings"], route_class=StrictJSON)
MAX_TEXTS = 2048


class EmbeddingsBody(Body):
    ignored = frozenset({"user"})

    input: Annotated[Any, WithJsonSchema(asked.texts_or_ids(MAX_TEXTS))]
    model: str = ""  # any: there is one embedder, the one that searches are made with
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None

    def texts(self, data_dir: Path) -> list[str]:
        """The input as texts. Raises UserError."""
        given = self.input if isinstance(self.input, list) else [self.input]
        if given is self.input and given and all(map(_is_id, given)):
            given = [given]
        if not 1 <= len(given) <= MAX_TEXTS:
            raise BadParameter("input", f"input is a text, token ids, or a list of 1 to {MAX_TEXTS} of such")
        if not all(given):
            raise BadParameter("input", "input has an empty text")
        if all(isinstance(text, str) for text in given):
            return list(given)
        if not all(isinstance(ids, list) and all(map(_is_id, ids)) for ids in given):
            raise BadParameter("input", "input is a text, token ids, or a list of texts or of lists of token ids")
        try:
            return texts_of(data_dir, given)
        except UserError as error:
            raise BadParameter("input", str(error), error.code) from error


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@router.post("", responses=told(inference.EmbeddingList))
def create_embeddings(parts: Parts, who: Reader, body: EmbeddingsBody) -> dict[str, Any]:
    texts, embedder = body.texts(parts.settings.data_dir), parts.embedder
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
