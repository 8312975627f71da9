"""Every fault of S3 that is to be survived, end to end: whatever the server does, the answer's tokens are those of the same
prompt without what could not be read, nothing acknowledged is lost, budgets hold, and every read is counted once."""

from __future__ import annotations

import datetime
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.auth
import pytest
from engine_kit import EngineSite
from fixtures_models import Models
from fixtures_s3 import SeaweedFS
from s3_kit import MakeSite, S3Site, connected, impatient, readers, until

from storage.errors import StorageUnavailable
from storage.format import open_layers
from storage.tiers.disk import DiskTier
from storage.types import KVRecord, Miss

pytestmark = pytest.mark.services
# What the server does to a read, and how the answer calls it.
READS: Mapping[int | str, str] = {
    403: "unavailable",
    404: "absent",
    500: "unavailable",
    503: "unavailable",  # SlowDown
    "reset": "unavailable",
    "reset-body": "unavailable",
    "short-body": "unavailable",
    "stall": "timeout",
    "stall-body": "timeout",
    "error-200": "unavailable",
}
BUDGET = 80_000  # bytes; of three chunks' KV one or two fit
WRITES = (403, 404, 500, 503, "reset", "stall", "error-200")


@pytest.fixture
def site(s3_site: MakeSite) -> S3Site:
    """It waits for what comes, so that every miss has its own reason."""
    return s3_site(patience_s=20.0)


@pytest.mark.parametrize("fault", READS)
def test_a_fault_at_every_read_gives_full_prefills_tokens_and_no_fault_gives_the_stored_ones(
    site: S3Site, fault: int | str
) -> None:
    full, whole = site.answer(method="full").text, site.said_with((0, 1, 2))
    before = site.counted()
    site.rude.always = fault
    outcome = site.answer()
    assert outcome.text == full != whole
    assert [(c.chunk_id, c.reason) for c in outcome.report.not_reused] == [(n, READS[fault]) for n in range(3)]
    after = site.counted()
    assert after[f"miss_{READS[fault]}"] == before[f"miss_{READS[fault]}"] + 3
    assert (after["hits"], after["deletes"]) == (before["hits"], 0)
    assert site.said_with((0, 1, 2)) == whole


@pytest.mark.parametrize("fault", READS)
def test_a_fault_at_one_chunk_has_that_chunk_computed_and_the_others_used(site: S3Site, fault: int | str) -> None:
    expected = site.said_with((0, 2))
    before = site.counted()
    site.rude.rules = {site.name(1): fault}
    outcome = site.answer()
    assert outcome.text == expected
    assert [(c.chunk_id, c.reason) for c in outcome.report.not_reused] == [(1, READS[fault])]
    assert [(c.chunk_id, c.tier) for c in outcome.report.reused] == [(0, "store"), (2, "store")]
    after = site.counted()
    assert after["hits"] == before["hits"] + 2
    assert after[f"miss_{READS[fault]}"] == before[f"miss_{READS[fault]}"] + 1


@pytest.mark.parametrize("fault", ["slow-body", "throttled", "other-etag"])
def test_a_slow_server_is_no_fault_while_there_is_time(site: S3Site, fault: str) -> None:
    whole = site.said_with((0, 1, 2))
    site.rude.always, site.rude.bytes_per_s = fault, 400_000
    outcome = site.answer()
    assert outcome.text == whole
    assert outcome.report.not_reused == []


@pytest.mark.parametrize("fault", WRITES)
def test_a_write_that_fails_is_not_acknowledged_and_a_later_one_is_as_good(site: S3Site, fault: int | str) -> None:
    whole, without = site.said_with((0, 1, 2)), site.said_with((0, 2))
    record = site.kv.get(str(site.chunks[1].kv_key), site.reader.profile)
    assert isinstance(record, KVRecord)
    assert site.kv.delete([record.key]) == set()
    assert site.answer().text == without
    site.rude.rules = {"PUT ": fault}
    puts = site.counted()["puts"]
    with pytest.raises(StorageUnavailable):
        site.kv.put(record)
    assert site.counted()["puts"] == puts
    assert site.answer().text in (whole, without), "what fails may have been written all the same, but never half"
    site.rude.behave()
    site.kv.put(record)
    assert site.counted()["puts"] == puts + 1
    assert site.said_with((0, 1, 2)) == whole


@pytest.mark.parametrize("fault", [403, 404, 500, 503, "reset", "stall", "error-200"])
def test_a_deletion_that_fails_is_owed_and_a_later_one_deletes(site: S3Site, fault: int | str) -> None:
    keys = [str(chunk.kv_key) for chunk in site.chunks]
    whole, full = site.said_with((0, 1, 2)), site.answer(method="full").text
    site.rude.rules = {"DELETE ": fault, "POST ": fault}
    with pytest.raises(StorageUnavailable):
        site.kv.delete(keys)
    assert site.answer().text == whole, "nothing was deleted, and nothing was said to be"
    site.rude.behave()
    site.rude.requests.clear()
    assert site.kv.delete(keys) == set()
    methods = [line.partition(" ")[0] for line in site.rude.requests]
    assert set(methods) == {"POST"}, "many in one request"
    assert len(methods) < len(keys), "a busy machine may have asked twice"
    outcome = site.answer()
    assert outcome.text == full
    assert {c.reason for c in outcome.report.not_reused} == {"absent"}
    assert list(site.behind.list("kv/")) == []


def test_an_object_that_is_damaged_anywhere_is_computed_and_repaired_by_the_next_write(
    site: S3Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, without = site.said_with((0, 1, 2)), site.said_with((0, 2))
    name, reported = site.name(1), list[tuple[str, Miss]]()
    monkeypatch.setattr(site.kv, "_on_damage", lambda *what: reported.append(what))
    data = bytearray(site.behind.size(name) or 0)
    site.behind.read_into(name, memoryview(data))
    record = site.kv.get(str(site.chunks[1].kv_key), site.reader.profile)
    assert isinstance(record, KVRecord)
    damaged = _damages(site, bytes(data))
    for what, reason in damaged:
        site.behind.put(name, [what])
        outcome = site.answer(max_tokens=6)
        assert [(c.chunk_id, c.reason) for c in outcome.report.not_reused] == [(1, reason)]
        assert without.startswith(outcome.text)
    assert reported == [(record.key, Miss(reason)) for _, reason in damaged]
    site.kv.put(record)
    assert site.said_with((0, 1, 2)) == whole


def _damages(site: S3Site, data: bytes) -> list[tuple[bytes, str]]:
    """A byte flipped, and the object cut, at the borders of every section; extended; another's; and what each is called."""

    def read(buffer: memoryview, offset: int) -> int:
        buffer[:] = data[offset : offset + len(buffer)]
        return len(buffer)

    layers = open_layers(read, len(data), str(site.chunks[1].kv_key), site.reader.profile)
    assert not isinstance(layers, Miss)
    starts = [layers.start + section.offset for section in layers.sections]
    ends = [start + section.length - 1 for start, section in zip(starts, layers.sections, strict=True)]
    places = [0, 9, 13, 40, layers.start - 1, *starts, *ends, len(data) - 20, len(data) - 1]
    flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in places]
    other = bytearray(site.behind.size(site.name(2)) or 0)
    site.behind.read_into(site.name(2), memoryview(other))
    damaged = [*flipped, *(data[:at] for at in places), data + b"\0", b"<Error/>"]
    return [*((each, "damaged") for each in damaged), (bytes(other), "wrong_key")]


def test_a_clock_that_jumps_is_no_wrong_answer_and_loads_go_on_when_it_is_right(
    site: S3Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock that signs requests; the one that measures deadlines never jumps."""
    full, whole = site.answer(method="full").text, site.said_with((0, 1, 2))
    ahead, now = [datetime.timedelta(0)], botocore.auth.get_current_datetime
    for clock in ("botocore.auth.get_current_datetime", "storage.s3_sign._now"):
        monkeypatch.setattr(clock, lambda *a, **k: now(*a, **k) + ahead[0])
    for hours in (-30, 30, -1, 1):
        ahead[0] = datetime.timedelta(hours=hours)
        outcome = site.answer()
        assert outcome.text == (full if outcome.report.not_reused else whole)
        assert {c.reason for c in outcome.report.not_reused} <= {"unavailable"}
        ahead[0] = datetime.timedelta(0)
        assert site.said_with((0, 1, 2)) == whole
    assert site.counted()["miss_unavailable"] >= 3, "the server refuses what was signed a day ago"


@pytest.mark.slow
def test_through_a_storm_of_faults_every_answer_is_that_of_what_it_read_and_budgets_hold(
    s3_site: MakeSite, tmp_path: Path
) -> None:
    """Random faults at every request, small tiers that evict all the time, two answers at once, a process that restarts."""
    choice = random.Random(4)
    said: dict[frozenset[int], str] = {}
    for life in range(2):
        disk = DiskTier(tmp_path / "cache", BUDGET)
        site = s3_site(patience_s=20.0, tiers={"memory_bytes": BUDGET, "disk": disk})
        faults = [None, None, *READS, "slow-body"]
        answers = 0
        for _ in range(12):
            site.rude.plan = [choice.choice(faults) for _ in range(20)]
            outcomes = site.answers(site.request(max_tokens=8), site.request("Who repairs it?", max_tokens=8))
            answers += 3 * len(outcomes)
            for outcome in outcomes:
                came = frozenset(c.chunk_id for c in outcome.report.reused)
                missed = {c.chunk_id for c in outcome.report.not_reused}
                assert came | missed == {0, 1, 2}
                assert came.isdisjoint(missed)
            _compare(site, outcomes[0], said)
            assert site.kv.chain.flush(20)
            held = site.kv.chain.counters()
            assert max(held["memory"]["bytes"], held["disk"]["bytes"]) <= BUDGET
            assert sum(path.stat().st_blocks * 512 for path in disk.folder.rglob("*.*") if path.is_file()) <= BUDGET
        until(lambda: not readers(), "the end of the threads")
        assert site.asked() == answers, life
        site.close()
        disk.close()
    assert len(said) > 3, "storms differ"


def _compare(site: S3Site, outcome: Any, said: dict[frozenset[int], str]) -> None:
    came = frozenset(c.chunk_id for c in outcome.report.reused)
    if came not in said:
        plan, site.rude.plan = site.rude.plan, []
        clean = EngineSite(site.reader, Path(), patience_s=20.0, objects=site.behind)
        chunks = tuple(c if c.chunk_id in came else replace(c, kv_key=None) for c in clean.chunks)
        said[came] = clean.answer(chunks=chunks, max_tokens=8).text
        clean.engine.close()
        site.rude.plan = plan
    assert outcome.text == said[came]


def test_a_server_that_is_killed_and_comes_back_has_all_that_was_acknowledged(
    own_s3_server: SeaweedFS, tiny_models: Models
) -> None:
    server = own_s3_server.server
    store = connected(server, server.endpoint, "engine")
    store.ensure_bucket()
    objects = impatient(store, "kv-home", attempts=1, threshold=4)
    site = EngineSite(tiny_models.reader("llama"), Path(), patience_s=20.0, objects=objects)
    full, whole = site.answer(method="full").text, site.answer().text
    own_s3_server.kill()
    for _ in range(3):
        outcome = site.answer()
        assert outcome.text == full
        assert {c.reason for c in outcome.report.not_reused} == {"unavailable"}
    assert objects.counters()["breaker_open"] == 1
    own_s3_server.start()
    until(lambda: not site.answer().report.not_reused, "the server to be used again", 60)
    assert site.answer().text == whole
    site.engine.close()
    store.close()
