"""Every field of every body, every parameter and every id, with values that nobody means: no accident comes of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from api_kit import Site
from described import document

VALUES: tuple[Any, ...] = (
    None, True, -1, 10**30, -(2**63) - 1, 1e308, "", "\0", "☃" * 5000, "%s' OR 1=1 --", [], [None], [[]], {}, {"": {}},
    {"\0": "\0"}, [10**30],
)  # fmt: skip
WORDS = ("", "nan", "-inf", "1e999", "-1", str(10**30), "\0", "x" * 5000, "a b", "☃", "%00", "null", "[]")
IDS = ("\0", "%2e%2e", "x" * 3000, "☃", "' OR 1=1 --", "file-1\r\nx: y", "-1", str(10**30))
UNASKED = ("/site/", "/auth/", "/metrics", "/readyz")  # signed, or asked of others
STREAMS = ("/v1/jobs/{job_id}/events",)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield (*at, name)
        yield from places(each, (*at, name))


def with_value(body: Any, place: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(body)
    here = made
    for name in place[:-1]:
        here = here[name]
    here[place[-1]] = value
    return made


def hostile(path: str, method: str, operation: dict[str, Any]) -> Iterator[tuple[str, Any, dict[str, str]]]:
    """(path, body, query) of requests that no client of good will sends."""
    plain = path.replace("{", "").replace("}", "")
    media = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    body = media.get("example")
    if "model" in (body or {}):
        body = {**body, "model": "echo-1", "stream": False}
    for place in places(body):
        for value in VALUES:
            yield plain, with_value(body, place, value), {}
    for value in VALUES if media else ():
        yield plain, value, {}
    for parameter in operation.get("parameters", ()):
        if parameter["in"] == "query":
            for word in WORDS:
                yield plain, body, {parameter["name"]: word}
        if parameter["in"] == "path":
            for id in IDS:
                yield path.replace(f"{{{parameter['name']}}}", quote(id, safe="")).replace("{", "").replace("}", ""), body, {}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_value_anywhere_is_an_accident(site: Site) -> None:
    corpus = site.corpus_of("handbook", {"a.txt": "invoices are due in March"})
    tried, accidents = 0, []
    with site.http() as http:
        for path, methods in document()["paths"].items():
            real = path.replace("{vector_store_id}", corpus).replace("{corpus_id}", corpus)
            for method, operation in methods.items():
                if path in STREAMS or path.startswith(UNASKED):
                    continue
                for at, body, query in hostile(real, method, operation):
                    sent = {} if body is None else {"json": body}
                    reply = http.request(method, at, params=query, **sent)
                    tried += 1
                    if not is_well(reply):
                        accidents.append((method, path, at[:80], str(body)[:200], str(query)[:80], reply.text[:200]))
    assert not accidents
    assert tried > 3000


def is_well(reply: httpx.Response) -> bool:
    if reply.status_code < 400:
        return True
    error = reply.json()["error"]
    return reply.status_code < 500 and set(error) == {"message", "type", "param", "code"} and len(error["message"]) < 6000
