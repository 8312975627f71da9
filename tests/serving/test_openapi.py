"""The OpenAPI document is complete, and what it says is so: schemathesis sends what the document allows, and what it does not."""

from __future__ import annotations

import json
import warnings
from typing import Any

import httpx
import pytest
from api_kit import Site
from described import closed
from described import document as described
from hypothesis import HealthCheck, Phase, given, settings

from serving.api import openapi
from serving.api.app import ROUTERS
from serving.api.examples import BODIES
from serving.api.json_body import StrictJSON

EXAMPLES = 2  # of each route and kind
# A request may be refused for what no schema can say: test_openapi_whole.py names each such refusal.
ACCEPTED = ["2xx", "400", "401", "403", "404", "409", "429"]


@pytest.fixture
def document() -> dict[str, Any]:
    """The same for every app, so made once; that it is what is served, one test says."""
    return described()


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(method, path, each) for path, methods in document["paths"].items() for method, each in methods.items()]


def test_every_operation_tells_its_errors_its_key_and_an_example(document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        where = (method, path)
        assert operation["summary"], where
        assert "422" not in operation["responses"], where
        assert operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"].endswith("/Error")
        signed = path.startswith(openapi.SIGNED) or path in openapi.OPEN
        assert ("security" in operation) is not signed, where
        for parameter in operation.get("parameters", ()):
            assert parameter["schema"], where
        body = operation.get("requestBody", {}).get("content", {}).get("application/json")
        assert body is None or path.startswith(openapi.SIGNED) or "example" in body, where
    assert not {"HTTPValidationError", "ValidationError"} & document["components"]["schemas"].keys()
    assert {path for _, path, _ in operations(document)} >= BODIES.keys() | openapi.MEDIA.keys()


def test_every_operation_says_what_it_answers_with_an_example_of_it(document: dict[str, Any]) -> None:
    """So a generated client is typed. Redirects alone answer nothing."""
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    components = closed(document["components"])
    kinds = set()
    for method, path, operation in operations(document):
        where = (method, path)
        [told] = [each for status, each in operation["responses"].items() if status in ("200", "302")]
        content = told.get("content", {})
        assert content or "302" in operation["responses"], where
        for media, each in content.items():
            assert each["schema"], where
            if media != "application/json":
                assert each["schema"]["type"] == "string", where
                continue
            assert set(each["schema"]) <= {"$ref", "anyOf"}, where
            mistakes = jsonschema_rs.validator_for({**each["schema"], "components": components}).iter_errors(each["example"])
            assert not [(error.instance_path, error.message) for error in mistakes], where
            kinds |= {str(each["schema"])}
    assert len(kinds) > 50
    for name, schema in document["components"]["schemas"].items():
        assert schema.get("enum") or schema["properties"] or schema["additionalProperties"], name
        assert not {"-", "__"} & {name[i : i + n] for n in (1, 2) for i in range(len(name))}, f"two are called {name}"
    names = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(names) == len(set(names))


def test_what_a_stream_sends_is_described_too(site: Site, document: dict[str, Any]) -> None:
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    corpus = site.corpus_of("handbook", {"a.txt": "invoices are due in March"})
    asked = {"messages": [{"role": "user", "content": "when?"}], "stream_options": {"include_usage": True}}
    plain = {"model": "echo-1", "prompt": "some words"}
    bodies = {"/v1/chat/completions": {"model": f"echo-1@{corpus}", **asked}, "/v1/completions": plain}
    for path, body in bodies.items():
        told = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
        valid = jsonschema_rs.validator_for({**told["contentSchema"], "components": closed(document["components"])})
        with site.http() as http, http.stream("POST", path, json={**body, "stream": True}) as reply:
            lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        assert len(lines) > 2
        for line in lines[:-1]:
            assert not [(error.instance_path, error.message) for error in valid.iter_errors(json.loads(line))], line


def test_the_document_can_be_read_in_a_browser_that_runs_nothing(site: Site, document: dict[str, Any]) -> None:
    with site.http("") as http:
        page = http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert "<script" not in page.text
    assert "http://" not in page.text
    for method, path, _ in operations(document):
        assert f"<code>{method.upper()} {path}</code>" in page.text
    assert "When are invoices due?" in page.text


def test_the_document_is_of_the_routes_that_are_served(site: Site, document: dict[str, Any]) -> None:
    """And the measure that all other tests hold answers to is that document."""
    with site.http("") as http:
        assert http.get("/openapi.json").json() == document
    routes = [route for module in ROUTERS for route in module.router.routes if getattr(route, "include_in_schema", False)]
    assert all(isinstance(route, StrictJSON) for route in routes)
    assert {route.path_format for route in routes} == document["paths"].keys()


def test_the_examples_are_understood(site: Site, document: dict[str, Any]) -> None:
    """A 404 is an answer: the examples name things that are not there."""
    with site.http() as http:
        for method, path, operation in operations(document):
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            if "example" in body:
                model = {"model": "echo-1"} if "model" in body["example"] else {}
                sent = {**body["example"], **(model if "embeddings" not in path else {})}
                reply = http.request(method, path.replace("{", "").replace("}", ""), json=sent)
                refused = reply.json()["error"] if reply.status_code == 400 else {}
                # Sources and webhooks lead where only an operator may allow.
                assert not refused or refused["code"] == "host_not_allowed", (path, refused)
                assert reply.status_code < 500, path


def _wrong_body(case: Any) -> bool:
    from schemathesis.core.parameters import ParameterLocation

    body = case.meta.components.get(ParameterLocation.BODY)
    return body is not None and body.mode.is_negative


@pytest.mark.slow
def test_schemathesis_finds_nothing_at_once(site: Site) -> None:
    """Requests that the document allows are understood, others are refused; no answer is a 500 or undocumented."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schemathesis = pytest.importorskip("schemathesis")
        from schemathesis.specs.openapi.checks import negative_data_rejection
    expected = {"positive_data_acceptance": {"expected-statuses": ACCEPTED}}
    config = schemathesis.Config.from_dict({"checks": expected})
    schema = schemathesis.openapi.from_url(f"{site.url}/openapi.json", config=config)
    headers = {"authorization": f"Bearer {site.admin_key}"}
    tried = []

    def probed(path: str) -> Any:
        def probe(case: Any) -> None:
            tried.append(path)
            # The key that a case leaves out is put in, and parameters that no route knows are passed over, as OpenAI does.
            passed_over = [] if _wrong_body(case) else [negative_data_rejection]
            case.validate_response(case.call(headers=headers), headers=headers, excluded_checks=passed_over)

        return probe

    for found in schema.get_all_operations():
        operation = found.ok()
        if operation.path.startswith(openapi.SIGNED):
            continue
        takes = operation.body or operation.query
        modes = [*schemathesis.GenerationMode] if takes else [schemathesis.GenerationMode.POSITIVE]
        for mode in modes:
            bounded = settings(
                max_examples=EXAMPLES, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
            )
            given(case=operation.as_strategy(generation_mode=mode))(bounded(probed(operation.path)))()
    assert len(set(tried)) > 40
    assert len(tried) > EXAMPLES * 60


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", "/nothing", 404, "unknown_url"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("PATCH", "/retrieval", 405, "method_not_allowed"),
        ("POST", "/v1/responses", 400, "invalid_request"),
    ],
)
def test_what_no_route_serves_has_openai_s_shape(site: Site, method: str, path: str, status: int, code: str) -> None:
    with site.http() as http:
        reply: httpx.Response = http.request(method, path)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


def test_a_path_tells_all_the_methods_that_it_has(site: Site) -> None:
    with site.http() as http:
        told = {path: http.patch(path).headers["allow"] for path in ("/v1/schedules", "/v1/models", "/v1/vector_stores/vs_1")}
    assert told == {"/v1/schedules": "GET, POST", "/v1/models": "GET", "/v1/vector_stores/vs_1": "DELETE, GET, POST"}
