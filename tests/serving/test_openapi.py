"""The OpenAPI document is complete, and what it says is so: schemathesis sends what the document allows, and what it does not."""

from __future__ import annotations

import warnings
from typing import Any

import httpx
import pytest
from api_kit import Site
from hypothesis import HealthCheck, Phase, given, settings

from serving.api import openapi

EXAMPLES = 6  # of each route and kind
# A request may be refused for what no schema can say (a message without text, a time zone that is none).
ACCEPTED = ["2xx", "400", "401", "403", "404", "409", "429"]


@pytest.fixture
def document(site: Site) -> dict[str, Any]:
    with site.http("") as http:
        made: dict[str, Any] = http.get("/openapi.json").json()
        return made


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
    assert {path for _, path, _ in operations(document)} >= openapi.EXAMPLES.keys() | openapi.MEDIA.keys()


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
def test_schemathesis_finds_nothing(site: Site) -> None:
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
