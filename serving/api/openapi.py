"""The OpenAPI document: what FastAPI derives from the routes, with our errors, the key, streams, and an example of each body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

ABOUT = (
    "Read a corpus once, reuse its KV in every prompt. A corpus is an OpenAI vector store, a document is a file in it; OpenAI's "
    "clients work unmodified. Every error has OpenAI's shape."
)
OPEN = ("/healthz", "/readyz", "/metrics", "/auth/config", "/auth/login", "/auth/callback")  # without a key
SIGNED = ("/site/", "/hooks/")  # by a signature in the request
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
MEDIA = {  # of answers that are no JSON
    "/metrics": "text/plain",
    "/v1/files/{file_id}/content": "application/octet-stream",
    "/v1/jobs/{job_id}/events": "text/event-stream",
    "/site/{site_id}/objects/{name}": "application/octet-stream",
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
QUESTION = [{"role": "user", "content": "When are invoices due?"}]
EXAMPLES: Mapping[str, Any] = {
    "/v1/chat/completions": {"model": "reader@handbook", "messages": QUESTION, "stream": True, "max_tokens": 200},
    "/v1/completions": {"model": "reader", "prompt": "Invoices are due", "max_tokens": 16, "logprobs": 2},
    "/v1/responses": {
        "model": "reader",
        "input": "When are invoices due?",
        "tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}],
        "include": ["file_search_call.results"],
    },
    "/v1/tenants": {"id": "subsidiary", "quota_bytes": 500_000_000_000, "tokens_per_day": 20_000_000},
    "/v1/tenants/{tenant_id}": {"disabled": True},
    "/v1/sharing_groups/{name}": {"tenants": ["default", "subsidiary"]},
    "/v1/embeddings": {"model": "any", "input": ["one text", "another"], "encoding_format": "base64"},
    "/v1/rerank": {"query": "invoices", "documents": ["Invoices are due.", "Cats sleep."], "top_n": 1},
    "/retrieval": {
        "knowledge_id": "vs_1",
        "query": "When are invoices due?",
        "retrieval_setting": {"top_k": 4, "score_threshold": 0.2},
    },
    "/v1/uploads": {"filename": "report.pdf", "bytes": 2147483648, "purpose": "assistants", "mime_type": "application/pdf"},
    "/v1/uploads/{upload_id}/complete": {"part_ids": ["part_1", "part_2"]},
    "/v1/vector_stores": {"name": "handbook", "file_ids": ["file-1"], "metadata": {"team": "billing"}},
    "/v1/vector_stores/{vector_store_id}": {"name": "handbook 2026"},
    "/v1/vector_stores/{vector_store_id}/search": {
        "query": "When are invoices due?",
        "max_num_results": 4,
        "filters": {"type": "gte", "key": "year", "value": 2024},
        "ranking_options": {"ranker": "auto", "score_threshold": 0.2},
    },
    "/v1/vector_stores/{vector_store_id}/files": {"file_id": "file-1", "attributes": {"year": 2024}},
    "/v1/vector_stores/{vector_store_id}/files/{file_id}": {"attributes": {"year": 2024}},
    "/v1/vector_stores/{vector_store_id}/file_batches": {"file_ids": ["file-1", "file-2"]},
    "/v1/corpora/{corpus_id}/sync": {"manifest": [{"path": "terms.md", "sha256": 64 * "0", "bytes": 120}], "dry_run": True},
    "/v1/corpora/{corpus_id}/source": {"source": {"type": "git", "url": "https://git.example.com/handbook.git"}},
    "/v1/corpora/{corpus_id}/settings": {"emphasis": {"terms/*": 2.0}},
    "/v1/jobs/{job_id}/retry": {"only": "failed"},
    "/v1/schedules": {"corpus_id": "vs_1", "cron": "0 3 * * *", "timezone": "Europe/Berlin"},
    "/v1/schedules/{schedule_id}": {"enabled": False},
    "/v1/api_keys": {"name": "chat page", "scopes": ["read"], "corpora": ["vs_1"]},
    "/v1/webhooks": {"url": "https://hooks.example.com/preread", "corpora": ["vs_1"]},
    "/v1/sites": {"name": "edge", "corpora": ["vs_1"]},
    "/v1/sites/{site_id}/push": {"corpora": ["vs_1"]},
}


def install(app: FastAPI) -> None:
    """Serve the document at /openapi.json."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(title=app.title, version=app.version, description=ABOUT, routes=app.routes)
            app.openapi_schema = _completed(made)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    components.setdefault("schemas", {})["Error"] = ERROR
    for unused in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(unused, None)
    for path, methods in document["paths"].items():
        for operation in methods.values():
            _complete(path, operation)
    return document


def _complete(path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # what FastAPI would answer; here it is a 400
    responses["default"] = {
        "description": "An error, in OpenAI's shape",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    if path in STREAMS:
        responses["200"]["content"] = {
            "application/json": {"schema": {"type": "object"}},
            "text/event-stream": {"schema": {"type": "string"}},
        }
    if path in MEDIA:
        responses["200"]["content"] = {MEDIA[path]: {"schema": {"type": "string"}}}
    if path not in OPEN and not path.startswith(SIGNED):
        operation["security"] = [{"key": []}]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None and path in EXAMPLES:
        body["example"] = EXAMPLES[path]
