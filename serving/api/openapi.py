"""The OpenAPI document: what FastAPI derives from the routes, with our errors, the key, streams, and examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serving.api.examples import BODIES, example_of
from serving.api.shapes import answers

ABOUT = (
    "Read a corpus once, reuse its KV in every prompt. A corpus is an OpenAI vector store, a document is a file in it; OpenAI's "
    "clients work unmodified. Every error has OpenAI's shape."
)
# Without a key; /auth/ by cookies.
OPEN = ("/healthz", "/readyz", "/metrics", "/auth/config", "/auth/login", "/auth/callback", "/auth/session", "/auth/logout")
SIGNED = ("/site/", "/hooks/")  # by a signature in the request
REFERENCE = "#/components/schemas/{model}"
RESPONSES = "/v1/responses"
STREAMS: Mapping[str, type[BaseModel]] = {  # with what each piece is; of responses, what some events hold whole
    "/v1/chat/completions": answers.ChatCompletionChunk,
    "/v1/completions": answers.Completion,
    RESPONSES: answers.Response,
}
MEDIA = {  # of answers that are no JSON
    "/metrics": "text/plain",
    "/v1/files/{file_id}/content": "application/octet-stream",
    "/v1/jobs/{job_id}/events": "text/event-stream",
    "/site/{site_id}/objects/{name}": "application/octet-stream",
    "/v1/audit/export": "application/jsonl",
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
CLOSED_FORMS = ("/v1/files",)  # whose unknown fields are refused


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
    schemas: dict[str, Any] = components.setdefault("schemas", {})
    schemas["Error"] = ERROR
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    schemas |= _streamed()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            _complete(path, operation, schemas)
    return document


def _streamed() -> dict[str, Any]:
    """The schemas of what streams send, by name, with those that they refer to."""
    _, made = models_json_schema([(model, "serialization") for model in STREAMS.values()], ref_template=REFERENCE)
    return dict(made["$defs"])


def _complete(path: str, operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    responses = operation["responses"]
    responses.pop("422", None)  # what FastAPI would answer; here it is a 400
    if path in MEDIA:
        responses["200"]["content"] = {MEDIA[path]: {"schema": {"type": "string"}}}
    for told in responses.values():
        if (content := told.get("content", {}).get("application/json")) is not None:
            # FastAPI puts what the route is annotated with, any object, beside it.
            content["schema"] = {name: content["schema"][name] for name in ("$ref", "anyOf") if name in content["schema"]}
            content["example"] = example_of(content["schema"], schemas)
    responses["default"] = {
        "description": "An error, in OpenAI's shape",
        "content": {"application/json": {"schema": {"$ref": REFERENCE.format(model="Error")}}},
    }
    if path in STREAMS:
        piece = {"$ref": REFERENCE.format(model=STREAMS[path].__name__)}
        said = "Server-sent events; each `data:` line is this, in JSON" if path != RESPONSES else "Events of the Responses API"
        described = {"type": "string", "description": said, "contentMediaType": "application/json", "contentSchema": piece}
        responses["200"]["content"]["text/event-stream"] = {"schema": described}
    if path not in OPEN and not path.startswith(SIGNED):
        operation["security"] = [{"key": []}]
    sent = operation.get("requestBody", {}).get("content", {})
    if path in CLOSED_FORMS and (form := sent.get("multipart/form-data")) is not None:
        schemas[form["schema"]["$ref"].rpartition("/")[2]]["additionalProperties"] = False
    body = sent.get("application/json")
    if body is not None and path in BODIES:
        body["example"] = BODIES[path]
