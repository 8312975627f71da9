"""GET /v1/models: the reader model, and it together with each corpus that the key may read."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from serving.api.access import Parts, Reader
from serving.api.json_body import StrictJSON
from serving.api.parts import ApiParts
from serving.api.shapes import inference
from serving.api.shapes.common import told
from serving.auth import Principal
from serving.doors import corpora
from storage.errors import NotFound

router = APIRouter(prefix="/v1/models", tags=["models"], route_class=StrictJSON)


@router.get("", responses=told(inference.ModelList))
def list_models(parts: Parts, who: Reader) -> dict[str, Any]:
    return {"object": "list", "data": _models(parts, who)}


@router.get("/{model:path}", responses=told(inference.Model))
def retrieve_model(parts: Parts, who: Reader, model: str) -> dict[str, Any]:
    plain, _, corpus = model.partition(f"{parts.engine.model_id}@")
    if model == parts.engine.model_id:
        return _model(parts, model, 0.0)
    if plain or not corpus:
        raise NotFound(
            f"The model {model!r} does not exist or you do not have access to it.", code="model_not_found"
        )
    return _model(parts, model, corpora.created_at(parts, who, corpus))


def _models(parts: ApiParts, who: Principal) -> list[dict[str, Any]]:
    """Corpora go by name where the name says which one is meant, by id elsewhere: an id means its own corpus before all."""
    known = corpora.names(parts, who)
    names = [*(name for _, name, _ in known), *(id for id, _, _ in known)]
    base = parts.engine.model_id
    models = [_model(parts, base, 0.0)]
    for id, name, at in known:
        models.append(_model(parts, f"{base}@{name if name and names.count(name) == 1 else id}", at))
    return models


def _model(parts: ApiParts, id: str, created: float) -> dict[str, Any]:
    return {
        "id": id,
        "object": "model",
        "created": int(created),
        "owned_by": "preread",
        "max_model_len": parts.engine.max_model_len,
        "full_prefill_reason": parts.engine.full_prefill_reason,
    }
