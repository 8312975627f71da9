"""Two sites as real processes, and a wire between them that is cut, slow, or flips a byte: answers stay right, and what was
deleted at the parent is not used at the child."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures_models import Models
from live_site import Backends, Site, until
from sqlalchemy import select
from wire import Wire

from serving.parts import Wiring
from serving.settings import load_settings
from storage.catalogue.schema import ChunkRow, KVObject
from storage.format import is_whole
from storage.site_key import SiteKey

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]
TICK = 0.5
LEASE = 15 * TICK
QUESTION = "What is the deposit?"
# Stored KV as it is, and nothing else that is stored: a wrong object shows in the tokens, and without any the prompt is read in
# full. (The default method also places labels that were read once.)
METHOD = "reuse"


def document(subject: str, deposit: int) -> str:
    rules = " ".join(f"Rule {n}: {subject} are kept in shed {n + deposit} and counted twice." for n in range(10))
    return f"# Rules for {subject}\n\nThe deposit for {subject} is {deposit} crowns.\n\n{rules}\n"


CORPORA = {
    "lanterns": document("lanterns", 41),
    "ferries": document("ferries", 58),
    "violins": document("violins", 63),
}


class Pair:
    """Parent and child, the wire between them, and a worker for each inside the test."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model, self.folder = model, folder
        self.parent = self._site("parent", {})
        self.wire: Wire | None = None
        self.child: Site | None = None
        self._reader: Any = None
        self._embedder: Any = None

    def _site(self, name: str, environ: dict[str, str]) -> Site:
        (self.folder / name).mkdir()
        common = {
            "PREREAD_SECRET": f"the master secret of the {name}, long enough to be one",
            "PREREAD_TICK_SECONDS": str(TICK),
            "PREREAD_DTYPE": "float32",
            "PREREAD_MEMORY_CACHE_BYTES": str(64 << 20),
        }
        return Site(self.folder / name, Backends({**common, **environ}, shared_folder=True), None, self.model)

    def add_child(self) -> None:
        """Register a child at the parent; it does not run yet."""
        key = self.parent.call("POST", "/sites", json={"name": "edge"})["key"]
        assert "the master secret" not in str(SiteKey.parse(key).text())
        self.wire = Wire(self.parent.url)
        self.child = self._site("child", {"PREREAD_PARENT_URL": self.wire.url, "PREREAD_PARENT_KEY": key})

    def work(self, site: Site) -> int:
        """Do a site's work in this process; the tokens that were prefilled for it."""
        environ = site.environ("worker")
        wiring = Wiring(load_settings(environ))
        wiring.__dict__["ring"] = lambda queue: None
        if self._reader is None:
            self._reader, self._embedder = wiring.reader, wiring.embedder
        wiring.__dict__.update(_reader=self._reader, embedder=self._embedder)
        try:
            wiring.ingest_worker.drain()
            wiring.kv_queue.drain()
            return wiring.kv_queue.throughput.tokens
        finally:
            wiring.close()

    def upload(self, site: Site, name: str) -> str:
        """A corpus of one document, ingested; its id."""
        corpus: str = site.call("POST", "/vector_stores", json={"name": name})["id"]
        sent = [("files", (f"{name}.md", CORPORA[name].encode()))]
        site.call("POST", f"/corpora/{corpus}/documents", files=sent)
        return corpus

    def stop(self) -> None:
        for site in (self.parent, self.child):
            if site is not None:
                site.stop()
        if self.wire is not None:
            self.wire.close()


@pytest.fixture
def pair(tmp_path: Path, tiny_models: Models) -> Iterator[Pair]:
    """A model of random weights: what it says means nothing, but follows from every number of the KV."""
    model = tiny_models.folder("qwen3-long", family="qwen3", max_position_embeddings=1 << 15)
    made = Pair(tmp_path, model)
    try:
        yield made
    finally:
        made.stop()


def ask(site: Site, corpus: str, method: str = METHOD) -> tuple[str, dict[str, Any]]:
    """The answer to the one question, and its report."""
    client = site.openai()
    model = client.models.list().data[0].id
    answer: Any = client.chat.completions.create(
        model=f"{model}@{corpus}",
        messages=[{"role": "user", "content": QUESTION}],
        max_tokens=12,
        temperature=0,
        stream=False,
        extra_body={"preread": {"method": method}},
    )
    return answer.choices[0].message.content, answer.preread


def ask_stored(site: Site, corpus: str) -> str:
    """The answer with all of its stored KV: what came too late for one answer is there for the next."""

    def asked() -> str | None:
        text, report = ask(site, corpus)
        assert reasons(report) <= {"slow"}
        return None if reasons(report) else text

    return until(asked, 60, "stored KV in time") or ""


def reasons(report: dict[str, Any]) -> set[str]:
    assert report["chunks"] > 0
    return {miss["reason"] for miss in report["not_reused"]}


def metric(site: Site, name: str) -> float:
    text = httpx.get(f"{site.url}/metrics", timeout=10).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def in_step(site: Site) -> bool:
    return metric(site, "preread_lease_held") == 1.0


def keys(site: Site, corpus: str) -> set[str]:
    catalogue = site.catalogue()
    try:
        with catalogue.read() as session:
            return set(session.scalars(select(ChunkRow.kv_key).where(ChunkRow.corpus_id == corpus)))  # type: ignore[arg-type]
    finally:
        catalogue.close()


def rows(site: Site) -> dict[str, str]:
    catalogue = site.catalogue()
    try:
        with catalogue.read() as session:
            return {row.key: row.status for row in session.scalars(select(KVObject))}
    finally:
        catalogue.close()


def here(site: Site) -> set[str]:
    """Keys of the objects in the site's own store."""
    return {name.rpartition("/")[2] for name in site.objects().list("kv/")}


def delete_document(site: Site, corpus: str) -> str:
    """Delete the corpus's one document; the purge's id."""
    file = site.call("GET", f"/vector_stores/{corpus}/files")["data"][0]["id"]
    gone = site.call("DELETE", f"/vector_stores/{corpus}/files/{file}")
    assert [s["state"] for s in gone["sites"]] == ["pending"]
    return str(gone["job_id"])


def purge_state(pair: Pair, purge: str) -> str:
    return str(pair.parent.call("GET", f"/purges/{purge}")["sites"][0]["state"])


@pytest.mark.slow
def test_a_child_reads_through_a_bad_wire_and_keeps_its_promise_when_it_is_cut(pair: Pair) -> None:
    parent = pair.parent
    parent.start("serve")
    parent.wait_ready(180)
    at_parent = {name: pair.upload(parent, name) for name in CORPORA}
    assert pair.work(parent) > 0
    pair.add_child()
    child, wire = pair.child, pair.wire
    assert child is not None
    assert wire is not None
    child.start("serve")
    child.wait_ready(180)
    at_child = {name: pair.upload(child, name) for name in CORPORA}
    assert pair.work(child) == 0, "the parent has it all: nothing is prefilled at the child"
    assert set(rows(child).values()) == {"done"}
    assert here(child) == set()
    assert keys(child, at_child["lanterns"]) == keys(parent, at_parent["lanterns"])

    full = {name: ask(child, at_child[name], "full")[0] for name in CORPORA}
    _not_before_the_first_exchange(child, at_child["lanterns"], full["lanterns"])
    child.start("beat")
    until(lambda: in_step(child), 60, "the first exchange")
    _fetch_through(parent, child, wire, at_parent["lanterns"], at_child["lanterns"], full["lanterns"])
    _flipped_byte(parent, child, wire, at_parent["ferries"], at_child["ferries"])
    _cut(pair, parent, child, wire, at_parent, at_child, full)


def _not_before_the_first_exchange(child: Site, corpus: str, full: str) -> None:
    text, report = ask(child, corpus)
    assert reasons(report) == {"unsynced"}
    assert text == full


def _fetch_through(parent: Site, child: Site, wire: Wire, at_parent: str, at_child: str, full: str) -> None:
    """Over a wire that is long and thin, nobody waits for the parent's KV; once it has come it stays, and answers with the
    parent's own tokens."""
    wire.rtt_s, wire.bytes_per_s = 0.5, 2e6
    text, report = ask(child, at_child)
    assert reasons(report) == {"slow"}
    assert text == full
    wanted = keys(child, at_child)
    until(lambda: here(child) == wanted, 60, "all of it here")
    wire.rtt_s, wire.bytes_per_s = 0.0, None
    assert ask_stored(child, at_child) == ask_stored(parent, at_parent) != full
    assert metric(child, 'preread_parent_objects_total{by="reader"}') == len(wanted)
    assert metric(child, 'preread_parent_bytes_total{by="reader"}') > 1_000 * len(wanted)


def _flipped_byte(parent: Site, child: Site, wire: Wire, at_parent: str, at_child: str) -> None:
    """A byte that changes on the way is noticed, and the object fetched again."""
    wire.flip_after, wire.delay_s = 60_000, 0.002
    text = ask_stored(child, at_child)
    wire.delay_s = 0.0
    assert wire.flipped == 1
    assert text == ask_stored(parent, at_parent)
    assert metric(child, 'preread_parent_failures_total{reason="damaged"}') == 1
    store = child.objects()
    for key in keys(child, at_child):
        name = f"kv/{key[:2]}/{key}"
        data = memoryview(bytearray(store.size(name) or 0))
        store.read_into(name, data)
        assert is_whole(data, key)


def _cut(
    pair: Pair,
    parent: Site,
    child: Site,
    wire: Wire,
    at_parent: dict[str, str],
    at_child: dict[str, str],
    full: dict[str, str],
) -> None:
    """`full`: the answers without any cache."""
    wire.cut()
    cut_at = time.monotonic()
    text, report = ask(child, at_child["violins"])  # never fetched, and now not to be had
    assert reasons(report) <= {"unavailable", "timeout", "unsynced"}
    assert reasons(report)
    assert text == full["violins"]

    doomed = keys(child, at_child["lanterns"])
    purge = delete_document(parent, at_parent["lanterns"])
    until(lambda: not in_step(child), 2 * LEASE, "the end of the lease")
    assert time.monotonic() - cut_at < LEASE + 5, "it ends by itself, soon after the cut"
    assert doomed <= here(child), "the child cannot know yet"
    for name in ("lanterns", "ferries"):
        text, report = ask(child, at_child[name])
        assert reasons(report) == {"unsynced"}, name
        assert text == full[name]
    assert purge_state(pair, purge) == "pending"

    wire.heal()
    until(lambda: in_step(child), 60, "the child back in step")
    assert here(child).isdisjoint(doomed), "it has caught up before it serves again"
    text, report = ask(child, at_child["lanterns"])
    # A parent that was away is tried by one request at first, over a wire that is thin: its answer may come too late.
    assert reasons(report) <= {"absent", "unavailable", "slow"}
    assert len(report["not_reused"]) == report["chunks"]
    assert text == full["lanterns"]
    assert ask_stored(child, at_child["ferries"]) == ask_stored(parent, at_parent["ferries"])
    assert purge_state(pair, purge) == "pending", "a process of the child may have been elsewhere for a lease"
    until(lambda: purge_state(pair, purge) == "erased", 60, "the receipt")
    assert here(child).isdisjoint(doomed)
    assert metric(child, "preread_tombstone_lag") == 0


@pytest.mark.slow
def test_a_child_that_was_killed_catches_up_before_it_serves(pair: Pair) -> None:
    parent = pair.parent
    parent.start("serve")
    parent.wait_ready(180)
    at_parent = pair.upload(parent, "lanterns")
    pair.work(parent)
    pair.add_child()
    child = pair.child
    assert child is not None
    for command in ("serve", "beat"):
        child.start(command)
    child.wait_ready(180)
    at_child = pair.upload(child, "lanterns")
    pair.work(child)
    until(lambda: in_step(child), 60, "the first exchange")
    ask_stored(child, at_child)
    doomed = keys(child, at_child)
    assert here(child) == doomed

    for command in ("serve", "beat"):
        child.processes[command].send_signal(signal.SIGKILL)
        child.processes[command].wait()
    purge = delete_document(parent, at_parent)
    child.start("serve")
    child.wait_ready(180)
    text, report = ask(child, at_child)
    assert reasons(report) == {"unsynced"}
    assert text == ask(child, at_child, "full")[0]
    child.start("beat")
    until(lambda: in_step(child), 60, "the child back in step")
    assert here(child) == set()
    assert ask(child, at_child)[0] == text
    until(lambda: purge_state(pair, purge) == "erased", 60, "the receipt")
