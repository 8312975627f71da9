"""Load or compute, end to end: an engine whose S3 stalls, drips or breaks off. Answers are those of the same prompt over an S3
that is well; what came in time is used, and what did not is computed."""

from __future__ import annotations

import os
import threading
import time

import pytest
from s3_kit import MakeSite, readers, until

from serving.blend import late
from serving.engine import loading
from serving.engine.arrivals import Arrivals

pytestmark = pytest.mark.services
SOON = 0.05  # so long the engine waits for stored KV, before it begins to compute


@pytest.fixture(autouse=True)
def give_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "DEADLINE_S", 1.5)


def test_what_is_stored_changes_the_tokens_so_that_equal_tokens_tell(s3_site: MakeSite) -> None:
    site = s3_site()
    parts = [(), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)]
    assert len({site.said_with(stored) for stored in parts}) == len(parts)


@pytest.mark.parametrize("fault", ["stall", "stall-body", "drip-body", "drip-head"])
def test_an_s3_that_stalls_is_not_waited_for_and_is_used_again_once_it_is_well(s3_site: MakeSite, fault: str) -> None:
    site = s3_site(patience_s=SOON)
    full, whole = site.answer(method="full").text, site.said_with((0, 1, 2))
    before = site.asked()
    site.rude.always = fault
    outcome = site.answer()
    assert outcome.text == full
    assert [(c.chunk_id, c.reason) for c in outcome.report.not_reused] == [(n, "slow") for n in range(3)]
    frame = len(site.reader.format.frame)
    assert (outcome.report.tokens_reused, outcome.report.bytes_fetched) == (frame, 0)
    assert outcome.report.tokens_computed == outcome.prompt_tokens - frame
    until(lambda: site.asked() == before + 3, "the end of the fetch")
    assert site.counted()["miss_timeout"] == 3
    until(lambda: not readers(), "the end of its threads")
    assert site.said_with((0, 1, 2)) == whole


def test_chunks_are_computed_from_one_end_while_they_are_loaded_from_the_other(
    s3_site: MakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk's body is held half-way until the first is being computed; the others never come."""
    site = s3_site(patience_s=SOON)
    expected, here = site.said_with((2,)), threading.Event()
    site.rude.go.clear()
    site.rude.rules = {site.name(0): "stall-body", site.name(1): "stall-body", site.name(2): "held-body"}
    landed = Arrivals.land

    def land(arrivals: Arrivals, key: str, found: object) -> None:
        landed(arrivals, key, found)  # type: ignore[arg-type]
        here.set()

    def begin(*arguments: object) -> object:
        assert not here.is_set(), "only now is the rest let through"
        site.rude.go.set()
        assert here.wait(20)
        monkeypatch.setattr(late, "_compute_until", compute)
        return compute(*arguments)  # type: ignore[arg-type]

    compute = late._compute_until
    monkeypatch.setattr(Arrivals, "land", land)
    monkeypatch.setattr(late, "_compute_until", begin)
    monkeypatch.setattr(loading, "DEADLINE_S", 10.0)
    outcome = site.answer()
    report = outcome.report
    assert [(c.chunk_id, c.tier) for c in report.reused] == [(2, "store")]
    assert [(c.chunk_id, c.reason) for c in report.not_reused] == [(0, "slow"), (1, "slow")]
    assert report.bytes_fetched == site.reader.buffer(len(site.chunks[2].token_ids)).nbytes
    frame, last = len(site.reader.format.frame), len(site.chunks[2].token_ids)
    assert (report.tokens_reused, report.tokens_recomputed) == (frame + last, 0)
    assert report.tokens_computed == outcome.prompt_tokens - frame - last
    assert outcome.text == expected


@pytest.mark.parametrize("bytes_per_s", [4_000, 200_000, 4_000_000])
@pytest.mark.parametrize("method", ["reuse", "default"])
def test_a_throttled_s3_gives_the_tokens_of_what_came_in_time(s3_site: MakeSite, method: str, bytes_per_s: int) -> None:
    """From nothing to everything comes; some of it while chunks are computed."""
    site = s3_site(patience_s=SOON)
    site.rude.always, site.rude.bytes_per_s = "throttled", bytes_per_s
    outcome = site.answer(method=method)
    report = outcome.report
    came = {c.chunk_id for c in report.reused}
    assert came.isdisjoint(c.chunk_id for c in report.not_reused)
    assert len(came) + len(report.not_reused) == 3
    assert {c.reason for c in report.not_reused} <= {"slow"}
    assert report.tokens_reused + report.tokens_recomputed + report.tokens_computed == outcome.prompt_tokens
    assert report.bytes_fetched == sum(site.reader.buffer(len(site.chunks[n].token_ids)).nbytes for n in came)
    if bytes_per_s == 4_000:
        assert not came
    if method == "reuse":  # another one chooses what it computes again from what has come first
        assert outcome.text == site.said_with(came)
    elif not came:
        assert outcome.text == site.answer(method="full").text


def test_an_s3_that_fails_is_left_alone_then_probed_by_one_and_loaded_from_again(s3_site: MakeSite) -> None:
    site = s3_site({"attempts": 1, "threshold": 4, "cool_down_s": 1.0}, patience_s=20.0)
    full, whole = site.answer(method="full").text, site.said_with((0, 1, 2))
    site.rude.always = 503
    for _ in range(2):
        outcome = site.answer()
        assert outcome.text == full
        assert {c.reason for c in outcome.report.not_reused} == {"unavailable"}
    store = site.objects.counters()
    assert (store["breaker_open"], store["breaker_opened"]) == (1, 1)
    requests, begun = len(site.rude.requests), time.monotonic()
    assert site.answer().text == full
    cooled_down = 1 + int(time.monotonic() - begun)
    assert len(site.rude.requests) <= requests + cooled_down, "one probe at most each time"
    assert site.objects.counters()["breaker_refused"] >= 2
    site.rude.behave()
    until(lambda: site.answer().report.reused, "the probe that finds it well")
    assert site.objects.counters()["breaker_open"] == 0
    assert site.said_with((0, 1, 2)) == whole
    assert site.asked() == site.counted()["hits"] + site.counted()["miss_unavailable"]


def test_stalls_over_and_over_leak_no_thread_and_no_connection(s3_site: MakeSite) -> None:
    site = s3_site(patience_s=SOON)
    whole = site.said_with((0, 1, 2))

    def stall() -> None:
        site.rude.always = "stall-body"
        assert len(site.answer(max_tokens=1).report.not_reused) == 3
        site.rude.behave()
        until(lambda: not readers(), "the end of the threads")
        assert site.said_with((0, 1, 2)) == whole

    stall()
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        stall()
    until(lambda: len(os.listdir("/proc/self/fd")) <= files, "the end of its connections")
