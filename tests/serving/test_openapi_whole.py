"""schemathesis against all routes: each bound of the document and what lies beyond it, requests at random, and requests that
follow one another. What the document allows is understood, but for refusals that are named here, each with why no schema can
say it."""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from typing import Any

import pytest
import structlog
from api_kit import Site
from described import document

from serving.api.openapi import SIGNED

LEAST = {"coverage": 3000, "fuzzing": 400, "stateful": 50}  # requests of a phase: with fewer it has not done its work
UNDERSTOOD = ["2xx", "401", "403", "404", "409", "429"]
# Who may be refused: (path, the field or code that the refusal names) → what no schema can say.
NAMED: dict[tuple[str, str | None], str] = {
    **{
        (f"/v1/{path}", "stream_options"): "only with stream"
        for path in ("chat/completions", "completions", "responses")
    },
    **{
        (f"/v1/{path}", what): why
        for path in ("chat/completions", "responses")
        for what, why in {
            "top_logprobs": "only with logprobs",
            "tool_choice": "names a function among the tools",
            "tools": "filters with one file_search tool only",
            "preread.emphasis": "an id alone, or with a span that is not empty",
            "preread.method": "a method with a number of its own",
            "version_not_kept": "as the vector store's settings say",
            "invalid_json_schema": "a schema that the engine can hold an answer to",
            "response_format.json_schema.schema": "a JSON schema",
            "response_format.type": "text, json_object or json_schema",
            "messages": "a user's turn with text among them",
            "messages.content": "a part of type text has a text",
            "invalid_request": "something to search for",
            "input": "a message among the items",
            "metadata.corpus": "a name, where it is given",
        }.items()
    },
    ("/v1/completions", "best_of"): "as large as n",
    ("/v1/completions", "model"): "without a vector store",
    ("/v1/completions", "echo"): "without logprobs, and of texts",
    ("/v1/completions", "prompt"): "prompts times n",
    ("/v1/embeddings", "dimensions"): "those of the embedder",
    ("/v1/embeddings", "token_ids_not_served"): "as the operator has it",
    ("/v1/embeddings", "input"): "as the operator has it",
    ("/v1/uploads/{upload_id}/complete", "invalid_part"): "parts of this upload",
    **{(f"/v1/uploads/{{upload_id}}/{what}", "upload_not_pending"): "once" for what in ("parts", "complete", "cancel")},
    ("/v1/vector_stores/{vector_store_id}/files/{file_id}/passage", "end"): "behind start",
    ("/v1/vector_stores/{vector_store_id}/search", "version_not_kept"): "as the vector store's settings say",
    ("/v1/corpora/{corpus_id}/documents", "files"): "as many paths as files",
    ("/v1/corpora/{corpus_id}/sync", "invalid_request"): "a source, or contents that are there; each path once",
    ("/v1/corpora/{corpus_id}/sources", "host_not_allowed"): "where the operator lets it lead",
    ("/v1/corpora/{corpus_id}/sources", "invalid_request"): "a folder or credential that the operator has laid there",
    ("/v1/corpora/{corpus_id}/settings", "invalid_request"): "a group, and a time, that there is",
    ("/v1/schedules", "invalid_request"): "cron's grammar, and a time zone",
    ("/v1/schedules/{schedule_id}", "invalid_request"): "cron's grammar, and a time zone",
    ("/v1/api_keys", "invalid_request"): "an end that is to come",
    ("/v1/corpora/{corpus_id}/hook", "invalid_request"): "a corpus with a source",
    ("/v1/webhooks", "invalid_request"): "a URL with a host",
    ("/v1/webhooks", "host_not_allowed"): "where the operator lets it lead",
    ("/v1/sites", "invalid_request"): "a name that is free",
    ("/v1/tenants", "tenant_exists"): "a name that is free",
    ("/v1/tenants/{tenant_id}", "invalid_request"): "an operator's own stays enabled",
    ("/v1/sharing_groups/{name}", "invalid_request"): "names of groups and of tenants",
    ("/v1/usage", "start_time"): "not after end_time",
}


def is_named(path: str, failure: Any, response: Any) -> bool:
    """Whether nothing is wrong with the answer that the failure is about."""
    if type(failure).__name__ == "JsonSchemaError" and "text/event-stream" in response.headers.get("content-type", [""])[0]:
        return True  # the document describes the stream's text, and test_openapi.py holds each piece to it
    if type(failure).__name__ != "RejectedPositiveData" or response.status_code != 400:
        return False
    error = json.loads(response.content)["error"]
    field = re.sub(r"\.\d+", "", error["param"] or "") or None
    return bool({(path, field), (path, error["code"])} & NAMED.keys())


@pytest.mark.slow
@pytest.mark.parametrize("tenants", [False, True], ids=["without tenants", "tenants"])  # whose limits would stop the others
@pytest.mark.parametrize("phase", ["coverage", "fuzzing", "stateful"])
def test_schemathesis_finds_nothing(site: Site, phase: str, tenants: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("schemathesis")
        cases, found = run(site, phase, tenants)
    structlog.get_logger(__name__).info("schemathesis", phase=phase, cases=cases)
    assert not found, "\n".join(f"{count} x {what}" for what, count in found.items())
    if not tenants:
        assert cases > LEAST[phase]


def run(site: Site, phase: str, tenants: bool) -> tuple[int, Counter[str]]:
    """How many requests were made, and what is wrong with the answers."""
    import schemathesis
    from schemathesis import engine
    from schemathesis.engine import events

    site.engine.model_id = "reader"  # the examples' own
    site.corpus_of("handbook", {"a.txt": "invoices are due in March"})
    phases = ("examples", "coverage", "fuzzing", "stateful")
    config = schemathesis.Config.from_dict({
        "auth": {"openapi": {"key": {"bearer": site.admin_key}}},
        "seed": 1,
        "continue-on-failure": True,
        "request-timeout": 120,
        "suppress-health-check": ["all"],
        "generation": {"max-examples": 12, "no-shrink": True},
        "phases": {name: {"enabled": name == phase} for name in phases},
        "checks": {"positive_data_acceptance": {"expected-statuses": UNDERSTOOD}},
    })  # fmt: skip
    schema = schemathesis.openapi.from_dict(document(), config=config)
    schema.config.update(base_url=site.url)
    chosen = schema.exclude(path_regex=f"^({'|'.join(SIGNED)})")
    of_tenants = "^/v1/(tenants|sharing_groups)"
    chosen = chosen.include(path_regex=of_tenants) if tenants else chosen.exclude(path_regex=of_tenants)
    cases, found = 0, Counter[str]()
    for event in engine.from_schema(chosen).execute():
        if isinstance(event, events.NonFatalError | events.FatalError):
            found[repr(getattr(event, "info", event))] += 1
        if isinstance(event, events.ScenarioFinished):
            cases += len(event.recorder.cases)
            found.update(failures(event.recorder))
    return cases, found


def failures(recorder: Any) -> list[str]:
    told = []
    for case, checks in recorder.checks.items():
        for check in checks:
            if check.failure_info is None:
                continue
            made, failure = recorder.interactions.get(case), check.failure_info.failure
            path = recorder.cases[case].value.operation.path
            if made is None or made.response is None or not is_named(path, failure, made.response):
                answer = made.response.content[:300] if made and made.response else b""
                sent = f"{made.request.uri[:200]} {str(made.request.body)[:600]}" if made else ""
                told.append(f"{recorder.label} {type(failure).__name__} {failure.message[:200]} {answer!r} {sent}")
    return told
