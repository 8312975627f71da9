"""Real processes that are told to end: answers are finished, files are handed over, and a second signal ends at once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from fixtures_models import Models
from live_site import Backends, Site, until
from sqlalchemy import func, select

from serving.local_broker import LocalBroker
from storage.catalogue.schema import ChunkRow, Job, JobFile, KVObject, UsageDay

pytestmark = pytest.mark.services
NEVER = "3600"  # seconds: what is given back by a lease's end, or counted by a tick, does not come in time


@pytest.fixture
def site(tmp_path: Path, broker: LocalBroker, embedded_folder: Path) -> Iterator[Site]:
    """An API. There is no beat: nobody reaps."""
    yield from started(tmp_path, broker, embedded_folder)


@pytest.fixture
def small_site(tmp_path: Path, broker: LocalBroker, tiny_models: Models) -> Iterator[Site]:
    """The same with a tiny reader, so that KV takes no time."""
    yield from started(tmp_path, broker, tiny_models.folder("stop", "llama", max_position_embeddings=8192))


def started(tmp_path: Path, broker: LocalBroker, model: Path) -> Iterator[Site]:
    slow = {"PREREAD_LEASE_SECONDS": NEVER, "PREREAD_TICK_SECONDS": NEVER}
    site = Site(tmp_path, Backends(slow, shared_folder=True), broker, model)
    try:
        site.start("serve")
        site.wait_ready(200)
        yield site
    finally:
        site.stop()


@contextmanager
def answering(site: Site, http: httpx.Client, tokens: int) -> Iterator[Iterator[str]]:
    """A stream of which text has come, and which goes on for all its `tokens`."""
    model = site.call("GET", "/models")["data"][0]["id"]
    question = "Write the numbers from one to one thousand, as words, one after the other."
    body = {"model": model, "stream": True, "max_tokens": tokens, "messages": [{"role": "user", "content": question}]}
    body["ignore_eos"] = True  # or it may end before a process is told to
    headers = {"authorization": f"Bearer {site.key}"}
    with http.stream("POST", f"{site.url}/v1/chat/completions", json=body, headers=headers) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: "))
        for line in lines:
            if json.loads(line)["choices"][0]["delta"].get("content"):
                break
        yield lines


def ended(process: subprocess.Popen[bytes], seconds: float) -> int:
    until(lambda: process.poll() is not None, seconds, "the process's end")
    return process.returncode


def test_a_stream_that_has_begun_is_finished_and_counted(site: Site) -> None:
    serve = site.processes["serve"]
    with httpx.Client(timeout=60) as http, answering(site, http, 60) as lines:
        serve.terminate()

        def refused() -> bool:
            answer = httpx.get(f"{site.url}/readyz", timeout=5)
            return answer.status_code == 503 and answer.json() == {"status": "stopping"}

        until(refused, 5, "readyz says that it is to end")
        new = httpx.get(f"{site.url}/v1/models", timeout=5)
        assert (new.status_code, new.headers["retry-after"]) == (503, "5")
        rest = list(lines)
    assert rest[-1] == "[DONE]"
    assert any(json.loads(line)["choices"][0]["finish_reason"] for line in rest[:-1] if json.loads(line)["choices"])
    assert not any("error" in json.loads(line) for line in rest[:-1])
    assert ended(serve, 20) == -signal.SIGTERM
    catalogue = site.catalogue()
    with catalogue.read() as session:
        assert session.scalar(select(func.sum(UsageDay.answers))) == 1, "what was counted is not lost"
    catalogue.close()


@pytest.mark.slow
def test_a_second_signal_ends_at_once(site: Site) -> None:
    serve = site.processes["serve"]
    with httpx.Client(timeout=60) as http, answering(site, http, 2000) as lines:
        serve.terminate()
        time.sleep(0.5)
        assert serve.poll() is None, "the answer goes on"
        serve.terminate()
        assert ended(serve, 10) == 128 + signal.SIGTERM
        with pytest.raises(httpx.TransportError):
            list(lines)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_file_in_work_is_another_workers_at_once(small_site: Site) -> None:
    site = small_site
    first = site.start("worker", "worker-1")
    text = "".join(f"# Part {n}\n\nThing {n} of the list is kept in room {n * 7} and looked at in March.\n\n" for n in range(200))
    corpus = site.call("POST", "/vector_stores", json={"name": "long"})["id"]
    job = site.call("POST", f"/corpora/{corpus}/documents", files=[("files", ("long.md", text.encode()))])["id"]
    until(lambda: site.job(job)["stage"] == "embed", 90, "the file's embedding")
    site.start("worker", "worker-2")
    first.terminate()
    ended(first, 40)
    assert "handed_over" in (site.folder / "worker-1.log").read_text()
    catalogue = site.catalogue()
    try:
        with catalogue.read() as session:
            assert session.scalar(select(func.count(ChunkRow.id))) == 0, "it was in the middle of the file"
        shown = site.wait_job(job, 200)
        assert (shown["status"], shown["attempt"], shown["errors"]) == ("completed", 1, [])
        with catalogue.read() as session:
            assert session.scalars(select(JobFile.attempt)).all() == [0]
            assert set(session.scalars(select(KVObject.attempt))) == {0}
            total = shown["progress"]["chunks_total"]
            assert session.scalar(select(func.count(ChunkRow.id))) == total
            assert session.scalar(select(func.count(func.distinct(ChunkRow.ordinal)))) == total
            assert session.get_one(Job, job).result["kv"]["chunks"] == total
    finally:
        catalogue.close()


HANGING = """
import threading
from serving import processes

class Parts:
    def __init__(self, settings):
        self.courier = self
        self.ticker = self
    def tick(self):
        print("ticking", flush=True)
        threading.Event().wait()
    def close(self):
        print("closed", flush=True)

processes.Wiring = Parts
from pathlib import Path
from serving.settings import Settings
processes.run_beat(Settings(data_dir=Path("nowhere")))
"""


def test_a_beat_ends_at_once_in_the_middle_of_a_tick() -> None:
    beat = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, text=True)
    assert beat.stdout is not None
    assert beat.stdout.readline().startswith("ticking")  # two threads may say so at once
    beat.terminate()
    assert beat.wait(20) == 0
    assert beat.stdout.read().endswith("closed\n")
    beat.stdout.close()
