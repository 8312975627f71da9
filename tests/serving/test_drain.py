"""A service that has been told to end: what has begun is finished, what is new is refused with where to go."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from api_kit import Site

from serving.api.drain import GRACE_SECONDS
from serving.supervisor import STOP_SECONDS

ASK = {"model": "echo-1", "messages": [{"role": "user", "content": "one two three four"}]}


@contextmanager
def streaming(http: httpx.Client) -> Iterator[Iterator[str]]:
    """The data lines of an answer of which two words have come."""
    with http.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}) as answer:
        lines = (line for line in answer.iter_lines() if line)
        for _ in range(3):
            next(lines)
        yield lines


def data_of(lines: Iterator[str]) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


def test_an_answer_that_has_begun_is_finished_while_new_ones_are_refused(site: Site) -> None:
    site.engine.pause = 0.3
    with site.http() as http, site.http() as other, streaming(http) as lines:
        assert other.get("/readyz").json()["status"] == "ok"
        site.drain.begin()
        ready = other.get("/readyz")  # on the connection that has been kept alive
        assert (ready.status_code, ready.json()) == (503, {"status": "stopping"})
        assert other.get("/healthz").status_code == 200
        refused = other.post("/v1/chat/completions", json=ASK)
        assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (503, "5", "close")
        assert refused.json()["error"]["code"] == "stopping"
        assert refused.headers["x-request-id"]
        assert not site.drain.over()
        rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        words = [choice["delta"].get("content", "") for frame in data_of(iter(rest)) for choice in frame["choices"]]
        assert "".join(words).endswith("three four")
    ends_within(site, 5)


def test_what_is_not_finished_within_the_grace_ends_with_an_error_in_openais_shape(site: Site) -> None:
    site.engine.pause = 0.3
    site.drain._grace = 0.0
    with site.http() as http, streaming(http) as lines:
        site.drain.begin()
        assert site.drain.over(), "the grace is over"
        rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        last = data_of(iter(rest))[-1]
        assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "stopping")


def test_a_whole_answer_that_is_not_finished_within_the_grace_is_a_503(site: Site) -> None:
    site.engine.first_pause = 20.0
    site.drain._grace = 0.0
    answers: list[httpx.Response] = []

    def ask() -> None:
        with site.http() as http:
            answers.append(http.post("/v1/chat/completions", json=ASK))

    asking = threading.Thread(target=ask)
    asking.start()
    until(lambda: bool(site.engine.generations))
    site.drain.begin()
    assert site.drain.over()
    asking.join(10)
    assert (answers[0].status_code, answers[0].headers["retry-after"]) == (503, "5")


def test_a_stream_of_a_jobs_events_ends_at_once_and_holds_nothing_up(site: Site) -> None:
    with site.http() as http:
        corpus = http.post("/v1/vector_stores", json={"name": "docs"}).json()["id"]
        sent = [("files", ("a.txt", b"a text that nobody ingests"))]
        job = http.post(f"/v1/corpora/{corpus}/documents", files=sent).json()["id"]
        with http.stream("GET", f"/v1/jobs/{job}/events") as events:
            lines = events.iter_lines()
            assert any(line.startswith("id: ") for line in lines)
            site.drain.begin()
            rest = [line for line in lines if line]
        assert rest[-1].startswith(":"), "a comment, which no client takes for news"
    ends_within(site, 5)


def test_an_idle_service_may_end_at_once(site: Site) -> None:
    assert not site.drain.over(), "nobody has told it to"
    site.drain.begin()
    assert site.drain.over()


def test_a_request_that_fails_holds_nothing_up(site: Site) -> None:
    site.engine.fail_at = 0
    with site.http() as http:
        assert http.post("/v1/chat/completions", json=ASK).status_code == 500
        assert http.get("/v1/none").status_code == 404
    until(lambda: site.drain.running == 0)


def test_the_supervisor_waits_for_longer_than_answers_may_take() -> None:
    assert STOP_SECONDS > GRACE_SECONDS + 10


def until(true: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def ends_within(site: Site, seconds: float) -> None:
    until(site.drain.over, seconds)
    assert site.drain.running == 0
