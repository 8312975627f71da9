"""The OpenAPI document as a test's measure: what it says of an answer is so, and an answer has nothing that it does not say."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import httpx
from fastapi import FastAPI

from serving.api import openapi
from serving.api.app import ROUTERS, operation_id

jsonschema_rs: Any = None
try:
    import jsonschema_rs
except ImportError:  # comes with schemathesis
    pass



@cache
def document() -> dict[str, Any]:
    """The document of every app, whatever its parts."""
    app = FastAPI(title="Preread", version="1", generate_unique_id_function=operation_id)
    for module in ROUTERS:
        app.include_router(module.router)
    openapi.install(app)
    return app.openapi()


def closed(schema: Any) -> Any:
    """The schema, with objects that have no other fields than those it names."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {name: closed(each) for name, each in schema.items()}
    if made.get("type") == "object" and "properties" in made:
        made.setdefault("additionalProperties", False)
    return made


@cache
def validator(path: str, method: str, status: int) -> Any:
    """Of an operation's JSON answers of this status; None where the document knows none."""
    told = document()["paths"][path][method]["responses"].get(str(status), {})
    schema = told.get("content", {}).get("application/json", {}).get("schema")
    if schema is None:
        return None
    return jsonschema_rs.validator_for({**closed(schema), "components": closed(document()["components"])})


@cache
def patterns() -> list[tuple[re.Pattern[str], str]]:
    """The document's paths, fixed ones first."""
    paths = sorted(document()["paths"], key=lambda path: path.count("{"))
    made = [(re.sub(r"\\{(\w+)\\}", r"[^/]+", re.escape(path)), path) for path in paths]
    return [(re.compile(pattern.replace("models/[^/]+", "models/.+")), path) for pattern, path in made]


def mistakes(method: str, path: str, status: int, answer: Any) -> Iterator[str]:
    """What an answer has that the document does not say, or has not that it says."""
    known = next((described for pattern, described in patterns() if pattern.fullmatch(path)), None)
    if known is None or method.lower() not in document()["paths"][known]:
        return
    found = validator(known, method.lower(), status)
    if found is None:
        yield f"{method} {known} {status}: undocumented"
        return
    for error in found.iter_errors(answer):
        yield f"{method} {known} {status} {error.instance_path}: {error.message[:300]}"


class DescribedClient(httpx.Client):
    """Holds every answer that is a success to the document. Streams are let through."""

    def request(self, method: str, url: Any, **options: Any) -> httpx.Response:
        reply = super().request(method, url, **options)
        is_json = reply.headers.get("content-type", "") == "application/json"
        if jsonschema_rs is not None and is_json and (reply.status_code < 300 or reply.request.url.path == "/readyz"):
            wrong = list(mistakes(method, reply.request.url.path, reply.status_code, reply.json()))
            assert not wrong, wrong
        return reply
