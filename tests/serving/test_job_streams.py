"""Many streams of jobs' events: the catalogue is asked for all of them at once, and each sees the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from api_kit import Site
from test_api_files import events

from ingest.job_view import job_events
from serving.api import job_watch
from storage.errors import StorageUnavailable

STREAMS = 30


def waiting_jobs(site: Site, count: int) -> list[str]:
    corpora = [site.corpus_of(f"corpus {number}", {}) for number in range(count)]
    sent = [("files", ("a.txt", b"some words"))]
    with site.http() as http:
        return [http.post(f"/v1/corpora/{corpus}/documents", files=sent).json()["id"] for corpus in corpora]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The jobs of each look."""
    seen: list[list[str]] = []

    def counted(catalogue: Any, asked: Sequence[tuple[str, frozenset[str]]]) -> Any:
        seen.append([job_id for job_id, _ in asked])
        return job_events(catalogue, asked)

    monkeypatch.setattr(job_watch, "job_events", counted)
    return seen


def test_streams_of_two_jobs_share_their_looks_and_all_see_the_end(site: Site, looks: list[list[str]]) -> None:
    jobs = waiting_jobs(site, 2)
    shown = threading.Barrier(STREAMS + 1)

    def watch(number: int) -> list[tuple[int, dict[str, Any]]]:
        with site.http() as http, http.stream("GET", f"/v1/jobs/{jobs[number % 2]}/events") as reply:
            shown.wait(60)
            return events(reply)

    with ThreadPoolExecutor(STREAMS) as threads:
        running = [threads.submit(watch, number) for number in range(STREAMS)]
        try:
            shown.wait(60)
            begun, already = time.monotonic(), len(looks)
            time.sleep(2)
            while_waiting, seconds = looks[already:], time.monotonic() - begun
        finally:
            site.ingest()
        seen = [each.result(60) for each in running]
    assert len(while_waiting) <= seconds / job_watch.LOOK_SECONDS + 2
    assert all(sorted(each) == sorted(jobs) for each in while_waiting)
    for number, each in enumerate(seen):
        assert [shown["status"] for _, shown in each][-1] == "completed"
        assert {shown["id"] for _, shown in each} == {jobs[number % 2]}
        numbers = [number for number, _ in each]
        assert numbers == sorted(set(numbers))
    time.sleep(1)
    quiet = len(looks)
    time.sleep(1)
    assert len(looks) == quiet, "nobody watches, nobody looks"


def test_a_stream_outlives_a_moment_without_a_database(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    [job], failed = waiting_jobs(site, 1), threading.Event()

    def fails_once(catalogue: Any, asked: Any) -> Any:
        if not failed.is_set():
            failed.set()
            raise StorageUnavailable("The catalogue's database does not answer.")
        return job_events(catalogue, asked)

    monkeypatch.setattr(job_watch, "job_events", fails_once)
    with site.http() as http, http.stream("GET", f"/v1/jobs/{job}/events") as reply:
        assert failed.wait(30)
        site.ingest()
        assert events(reply)[-1][1]["status"] == "completed"


def test_a_client_that_left_is_not_looked_for(site: Site, looks: list[list[str]]) -> None:
    [job] = waiting_jobs(site, 1)
    with httpx.Client(base_url=site.url, headers={"authorization": f"Bearer {site.admin_key}"}, timeout=120) as http:
        with http.stream("GET", f"/v1/jobs/{job}/events") as reply:
            next(reply.iter_lines())
    end = time.monotonic() + 30
    while time.monotonic() < end:
        before = len(looks)
        time.sleep(1)
        if len(looks) == before:
            return
    raise AssertionError("it looks for a job that nobody watches")
