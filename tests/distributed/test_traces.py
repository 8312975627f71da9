"""Traces of one upload and one question, through real processes and the SDK's real exporter, to a receiver of our own."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures_models import Models
from live_site import Backends, Site, until

from serving.local_broker import LocalBroker

pytest.importorskip("opentelemetry.sdk", reason="the extra 'otel' is not installed")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

pytestmark = pytest.mark.services
MARK = "marked5f0c"  # in all that must not be told: names, texts, questions
UPLOAD, ASKED = "0af7651916cd43dd8448eb211c80319c", "1bf7651916cd43dd8448eb211c80319c"


class Receiver(ThreadingHTTPServer):
    """Keeps what is exported, as bytes and as spans with their service."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.received: list[bytes] = []
        self.paths: set[str] = set()

    @property
    def spans(self) -> dict[bytes, tuple[str, Any]]:
        found = {}
        for body in list(self.received):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    found |= {span.span_id: (names["service.name"], span) for span in scope.spans}
        return found

    def tree(self, trace: str) -> dict[str, set[tuple[str, str]]]:
        """By name of a span, the service and name of its children; under "" what has none here."""
        mine = {i: (s, span) for i, (s, span) in self.spans.items() if span.trace_id.hex() == trace}
        found: dict[str, set[tuple[str, str]]] = {}
        for service, span in mine.values():
            parent = mine[span.parent_span_id][1].name if span.parent_span_id in mine else ""
            found.setdefault(parent, set()).add((service, span.name))
        return found

    def named(self, name: str, trace: str) -> Any:
        return next(span for _, span in self.spans.values() if span.name == name and span.trace_id.hex() == trace)


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.received.append(body)
        self.server.paths.add(self.path)
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def site(tmp_path: Path, broker: LocalBroker, tiny_models: Models, receiver: Receiver) -> Iterator[Site]:
    model = tiny_models.folder("traced", "llama", max_position_embeddings=8192)
    endpoint = f"http://127.0.0.1:{receiver.server_port}"
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_BSP_SCHEDULE_DELAY": "200"}
    site = Site(tmp_path, Backends(environ, shared_folder=True), broker, model)
    try:
        site.start("serve")
        site.start("worker")
        site.start("beat")
        site.wait_ready(200)
        yield site
    finally:
        site.stop()


def headers(site: Site, trace: str) -> dict[str, str]:
    parent = f"00-{trace}-b7ad6b7169203331-01"
    return {"authorization": f"Bearer {site.key}", "traceparent": parent, "x-request-id": f"req-{trace[:4]}"}


@pytest.mark.slow
def test_an_upload_and_a_question_are_a_trace_each_and_hold_no_text(site: Site, receiver: Receiver) -> None:
    corpus = site.call("POST", "/vector_stores", json={"name": MARK})["id"]
    text = "".join(f"# Part {n} {MARK}\n\nThing {n} of {MARK} is kept in room {n}.\n\n" for n in range(5))
    sent = [("files", (f"{MARK}.md", text.encode())), ("files", ("bad.pdf", f"%PDF-1.4 {MARK}".encode()))]
    url = f"{site.url}/v1/corpora/{corpus}/documents"
    job = httpx.post(url, files=sent, headers=headers(site, UPLOAD), timeout=60).json()["id"]
    assert site.wait_job(job, 200)["status"] == "completed_with_errors"
    ask = {
        "model": site.call("GET", "/models")["data"][0]["id"], "vector_store_ids": [corpus], "max_tokens": 5,
        "messages": [{"role": "user", "content": f"In which room is {MARK}?"}],
    }  # fmt: skip
    answer = httpx.post(f"{site.url}/v1/chat/completions", json=ask, headers=headers(site, ASKED), timeout=120)
    assert answer.status_code == 200, answer.text
    chat = "POST /v1/chat/completions"
    until(lambda: "engine.answer" in receiver.tree(ASKED) and "kv.store" in str(receiver.tree(UPLOAD)), 60, "spans")
    until(lambda: ("preread-serve", chat) in receiver.tree(ASKED)[""], 60, "the question's span")

    upload = receiver.tree(UPLOAD)
    post = "POST /v1/corpora/{corpus_id}/documents"
    assert upload[""] == {("preread-serve", post)}
    in_job = {("preread-worker", name) for name in ("ingest.file", "kv.compile", "kv.store")}
    assert upload[post] == in_job
    stages = {("preread-worker", f"ingest.{name}") for name in ("parse", "chunk", "embed", "commit")}
    assert upload["ingest.file"] == stages
    ids = {a.key: a.value.string_value for a in receiver.named("ingest.file", UPLOAD).attributes}
    assert ids["preread.job"] == job

    asked = receiver.tree(ASKED)
    assert asked[""] == {("preread-serve", chat)}
    assert asked[chat] == {("preread-serve", "retrieval.search"), ("preread-serve", "engine.answer")}
    assert {("preread-serve", f"retrieval.{name}") for name in ("embed", "dense", "lexical", "rows")} <= asked["retrieval.search"]
    assert asked["engine.answer"] == {("preread-serve", f"engine.{n}") for n in ("queue", "fetch", "turn", "blend", "decode")}
    engine = receiver.named("engine.answer", ASKED)
    assert [event.name for event in engine.events] == ["first_token"]
    request = receiver.named(chat, ASKED)
    noted = {a.key: a.value.string_value or a.value.int_value for a in request.attributes}
    assert noted == {
        "http.request.method": "POST", "http.route": "/v1/chat/completions", "http.response.status_code": 200,
        "preread.request_id": f"req-{ASKED[:4]}",
    }  # fmt: skip
    assert request.parent_span_id.hex() == "b7ad6b7169203331", "the caller's"
    for span in (engine, *(s for _, s in receiver.spans.values() if s.name.startswith("engine."))):
        assert request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    assert_nothing_is_told(site, receiver)


def assert_nothing_is_told(site: Site, receiver: Receiver) -> None:
    """Neither in traces nor in logs; and the worker's lines name the request that made the job."""
    site.stop()
    assert receiver.paths == {"/v1/traces"}
    secrets = (MARK, "bad.pdf", "kept in room", site.key, site.key[3:])
    logs = {name: (site.folder / f"{name}.log").read_text() for name in ("serve", "worker", "beat")}
    for secret in secrets:
        assert not any(secret.encode() in body for body in receiver.received), secret
        for name, log in logs.items():
            assert secret not in log, (name, secret)
    failed = [line for line in logs["worker"].splitlines() if '"file_failed"' in line]
    assert failed
    assert all(f'"request_id": "req-{UPLOAD[:4]}"' in line for line in failed)
