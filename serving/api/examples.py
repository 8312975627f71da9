"""Examples for the OpenAPI document: of bodies by hand, of answers from what their schemas say of each field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLAIN: Mapping[str, Any] = {"string": "text", "integer": 1, "number": 0.5, "boolean": True, "null": None}
QUESTION = [{"role": "user", "content": "When are invoices due?"}]
BODIES: Mapping[str, Any] = {
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
    "/v1/corpora/{corpus_id}/sources": {"source": {"type": "git", "url": "https://git.example.com/handbook.git"}},
    "/v1/corpora/{corpus_id}/settings": {"emphasis": {"terms/*": 2.0}},
    "/v1/jobs/{job_id}/retry": {"only": "failed"},
    "/v1/schedules": {"corpus_id": "vs_1", "cron": "0 3 * * *", "timezone": "Europe/Berlin"},
    "/v1/schedules/{schedule_id}": {"enabled": False},
    "/v1/api_keys": {"name": "chat page", "scopes": ["read"], "corpora": ["vs_1"]},
    "/v1/webhooks": {"url": "https://hooks.example.com/preread", "corpora": ["vs_1"]},
    "/v1/sites": {"name": "edge", "corpora": ["vs_1"]},
    "/v1/sites/{site_id}/push": {"corpora": ["vs_1"]},
}


def example_of(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:
    """Something that the schema describes. `schemas`: those that it may refer to, by name. The first choice is taken
    everywhere, and a field's own example before all."""
    if "$ref" in schema:
        meant = schemas[schema["$ref"].rpartition("/")[2]]
        return example_of({**meant, **{word: each for word, each in schema.items() if word != "$ref"}}, schemas)
    for word in ("examples", "enum"):
        if word in schema:
            return schema[word][0]
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return example_of(schema["anyOf"][0], schemas)
    match schema.get("type"):
        case "object":
            return {name: example_of(each, schemas) for name, each in schema.get("properties", {}).items()}
        case "array":
            return [example_of(schema["items"], schemas)]
        case kind:
            return PLAIN[str(kind)]
