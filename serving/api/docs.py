"""GET /docs: the OpenAPI document as a page to read, made here, so that it needs no script and nothing from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from fastapi import APIRouter, Request, Response

from serving.api.page import HEADERS

router = APIRouter(include_in_schema=False)
HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="color-scheme" content="light dark"><title>Preread: API</title><link rel="stylesheet" href="/page/page.css">'
    "</head><body><main>"
)


@router.get("/docs")
def show_docs(request: Request) -> Response:
    page = HEAD + "".join(_page(request.app.openapi())) + "</main></body></html>"
    return Response(page, media_type="text/html", headers=HEADERS)


def _page(document: dict[str, Any]) -> Iterator[str]:
    yield f"<h1>{escape(document['info']['title'])}: API</h1><p>{escape(document['info']['description'])}</p>"
    yield '<p>For programs: <a href="/openapi.json">/openapi.json</a></p>'
    tag = ""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                yield f"<h2>{escape(tag)}</h2>"
            yield from _operation(f"{method.upper()} {path}", operation)


def _operation(name: str, operation: dict[str, Any]) -> Iterator[str]:
    about = operation.get("description") or operation["summary"]
    yield f"<details><summary><code>{escape(name)}</code></summary><p>{escape(about)}</p>"
    asked = [f"{each['name']} ({each['in']})" for each in operation.get("parameters", ())]
    if asked:
        yield f"<p>Parameters: {escape(', '.join(asked))}</p>"
    yield from _example("Body", operation.get("requestBody", {}))
    for status, told in operation["responses"].items():
        yield from _example(f"Answer {status}", told)
    yield "</details>"


def _example(title: str, told: dict[str, Any]) -> Iterator[str]:
    for media, content in told.get("content", {}).items():
        if "example" in content:
            text = json.dumps(content["example"], indent=2, ensure_ascii=False)
            yield f"<h3>{title}: {escape(media)}</h3><pre>{escape(text)}</pre>"
