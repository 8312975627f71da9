"""A failing S3 server is left alone and probed; a refusal is no failure, and a clock that is off is named."""

from __future__ import annotations

import datetime
import time

import pytest
from kv_samples import same
from s3_reads_kit import DATA, RECORD, read

from storage.breaker import Breaker
from storage.deadline import until
from storage.errors import ObjectMissing, StorageTimeout, StorageUnavailable
from storage.kvstore import KVStore
from storage.types import Miss


def test_after_failures_in_a_row_the_server_is_left_alone_and_then_probed_by_one(server, connect):
    now = [0.0]
    store = connect(threshold=3, cool_down_s=5, clock=lambda: now[0])
    kv = KVStore(store)
    server.always = 500
    for _ in range(10):
        assert kv.get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    assert len(server.requests) == 3
    assert store.counters()["breaker_open"] == 1
    assert store.counters()["breaker_refused"] == 7
    now[0] = 5.0
    for _ in range(4):
        assert kv.get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    assert len(server.requests) == 4, "one probe, and closed again for another five seconds"
    server.always = None
    assert kv.get(RECORD.key, RECORD.profile) is Miss.UNAVAILABLE
    now[0] = 10.0
    assert same(kv.get(RECORD.key, RECORD.profile), RECORD)
    counters = store.counters()
    assert (counters["breaker_open"], counters["breaker_opened"]) == (0, 1)
    assert kv.counters()["miss_unavailable"] == 15


def test_while_a_probe_is_under_way_nobody_else_asks():
    now = [0.0]
    breaker = Breaker(threshold=1, cool_down_s=5, probe_s=60, clock=lambda: now[0])
    breaker.failed(probe=False)
    now[0] = 5.0
    assert breaker.enter() is True
    for _ in range(3):
        with pytest.raises(StorageUnavailable):
            breaker.enter()
    now[0] = 65.0
    assert breaker.enter() is True, "a probe that was lost blocks nobody for ever"
    breaker.succeeded()
    assert breaker.enter() is False


def test_requests_that_were_under_way_when_it_opened_do_not_put_the_probe_off():
    now = [0.0]
    breaker = Breaker(threshold=2, cool_down_s=5, clock=lambda: now[0])
    for now[0] in (0.0, 1.5, 3.0, 4.5):
        breaker.failed(probe=False)
    now[0] = 6.4
    with pytest.raises(StorageUnavailable):
        breaker.enter()
    now[0] = 6.5
    assert breaker.enter() is True
    assert breaker.counters()["breaker_opened"] == 1


@pytest.mark.parametrize("fault", [403, 404])
def test_refusals_do_not_open_the_breaker(server, connect, fault):
    store = connect(threshold=2)
    server.always = fault
    for _ in range(5):
        with pytest.raises((StorageUnavailable, ObjectMissing)):
            read(store)
    assert len(server.requests) == 5
    assert store.counters()["breaker_open"] == 0


def test_a_caller_in_a_hurry_does_not_open_it_for_the_others(server, connect):
    server.always = "drip-body"
    store = connect(threshold=1)
    for _ in range(3):
        with until(time.monotonic() + 0.05), pytest.raises(StorageTimeout):
            read(store)
    assert store.counters()["breaker_open"] == 0


def test_pauses_are_drawn_from_all_of_a_bound_that_doubles(server, connect, monkeypatch):
    drawn, slept = [], []
    monkeypatch.setattr("storage.retry.random.uniform", lambda low, high: drawn.append((low, high)) or high / 2)
    monkeypatch.setattr("storage.retry.time.sleep", slept.append)
    server.always = 503
    with pytest.raises(StorageUnavailable):
        read(connect(attempts=9))
    assert drawn[:8] == [(0, 0.1), (0, 0.2), (0, 0.4), (0, 0.8), (0, 1.6), (0, 3.2), (0, 5.0), (0, 5.0)]
    assert slept == [high / 2 for _, high in drawn[:8]]


# --- clocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [read, lambda store: store.put("a", [b"x"]), lambda store: list(store.list(""))])
def test_a_clock_that_is_off_is_named_as_the_reason(server, connect, act):
    server.always, server.clock_ahead_s = "skewed", 3600
    with pytest.raises(StorageUnavailable, match=r"RequestTimeTooSkewed .*clock is 3[56]\d\d s behind the server"):
        act(connect(attempts=4))
    assert len(server.requests) == 1, "trying again does not help"


def test_a_refusal_with_the_right_clock_does_not_blame_it(server, connect):
    server.always = 403
    with pytest.raises(StorageUnavailable) as caught:
        read(connect())
    assert "clock" not in str(caught.value)


def test_every_attempt_is_signed_at_its_own_time(server, connect, monkeypatch):
    """After the clock has jumped, by hand or by NTP, no old signature is sent."""
    now = [datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)]
    monkeypatch.setattr("storage.s3_sign._now", lambda: now[0])
    monkeypatch.setattr("storage.retry.time.sleep", lambda seconds: now.__setitem__(0, now[0] + datetime.timedelta(days=1)))
    server.plan = [503]
    store = connect(attempts=2)
    assert read(store) == DATA
    now[0] -= datetime.timedelta(days=300)
    assert read(store) == DATA
    dates = [request.partition("X-Amz-Date=")[2][:8] for request in server.requests]
    assert dates == ["20300101", "20300102", "20290308"]
