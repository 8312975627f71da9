"""More requests than can be answered: who is refused, what they are told, and that the others are served in time."""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
from api_kit import Site
from engine_kit import EngineSite, drain
from fixtures_models import Models

from serving.doors import search
from serving.engine import admission
from serving.engine.admission import Admission
from storage.errors import Overloaded

ACTIVE, WAITING = 8, 32


class Request:
    """What admission looks at of a generation."""

    outcome = object()


class Simulated:
    """One server that answers in order of arrival, behind the real admission, on a clock of its own."""

    def __init__(self, service_s: float, rate: float, seconds: float) -> None:
        self.now = 0.0
        self.door = Admission(ACTIVE, WAITING, clock=lambda: self.now)
        self.waits: list[float] = []  # from arrival to the beginning of the answer
        self.told: list[int | None] = []
        self._service, self._free_at = service_s, 0.0
        self._leaving: deque[tuple[float, Any]] = deque()
        draw, at = random.Random(7), 0.0
        while (at := at + draw.expovariate(rate)) < seconds:
            self._arrive(at)

    def _arrive(self, at: float) -> None:
        while self._leaving and self._leaving[0][0] <= at:
            self.now, done = self._leaving.popleft()
            self.door.leave(done)
        self.now = at
        request: Any = Request()
        try:
            self.door.enter(request)
        except Overloaded as refused:
            self.told.append(refused.retry_after)
            return
        begins = max(at, self._free_at)
        self._free_at = begins + self._service
        self._leaving.append((self._free_at, request))
        self.waits.append(begins - at)


@pytest.mark.parametrize("service_s", [0.02, 0.5, 2.0])
def test_at_three_times_what_is_sustainable_goodput_stays(service_s: float) -> None:
    """In time: within the wait that admission allows for a place, and that of those who are answered at once."""
    seconds, limit = 2000 * service_s, admission.WAIT_S + (ACTIVE + 1) * service_s
    calm = Simulated(service_s, 0.8 / service_s, seconds)
    stormy = Simulated(service_s, 3 / service_s, seconds)
    in_time = [sum(wait <= limit for wait in run.waits) / seconds for run in (calm, stormy)]
    assert in_time[0] > 0.7 / service_s
    assert in_time[1] > 0.9 / service_s, "the engine works all the time, and for those who still wait"
    assert len(stormy.told) > len(stormy.waits)
    assert len(calm.told) < 0.01 * len(calm.waits)


@pytest.mark.parametrize("service_s", [0.02, 0.5, 2.0])
def test_the_time_to_come_back_is_that_of_those_who_are_there(service_s: float) -> None:
    stormy = Simulated(service_s, 3 / service_s, 500 * service_s)
    told = [seconds for seconds in stormy.told[-100:] if seconds is not None]
    assert len(told) == 100
    places = ACTIVE + min(WAITING, int(admission.WAIT_S / service_s))
    assert max(told) <= math.ceil(1.2 * places * service_s) <= 60
    assert min(told) >= 0.7 * (places - 2) * service_s


def test_before_the_pace_is_known_the_queue_is_bounded_by_number_and_says_no_time() -> None:
    door, requests = Admission(1, 4), [Request() for _ in range(5)]
    for request in requests:
        door.enter(request)  # type: ignore[arg-type]
    with pytest.raises(Overloaded) as refused:
        door.check()
    assert refused.value.retry_after is None


def test_those_who_gave_up_do_not_make_the_engine_look_quick() -> None:
    now = [0.0]
    door = Admission(1, 4, clock=lambda: now[0])

    def one(seconds: float, outcome: object) -> None:
        request: Any = Request()
        request.outcome = outcome
        door.enter(request)
        now[0] += seconds
        door.leave(request)

    for _ in range(20):
        one(2.0, object())
        one(0.001, None)
    for _ in range(3):
        door.enter(Request())  # type: ignore[arg-type]
    with pytest.raises(Overloaded) as refused:
        door.check()
    assert refused.value.retry_after == 6


def test_time_with_nothing_to_do_does_not_make_it_look_slow() -> None:
    now = [0.0]
    door = Admission(1, 4, clock=lambda: now[0])
    for _ in range(20):
        request: Any = Request()
        door.enter(request)
        now[0] += 0.5
        door.leave(request)
        now[0] += 3600
    for _ in range(5):
        door.enter(Request())  # type: ignore[arg-type]
    with pytest.raises(Overloaded) as refused:
        door.check()
    assert refused.value.retry_after == 3


def test_an_engine_under_three_bursts_answers_whom_it_took_and_tells_the_others_when(
    tiny_models: Models, tmp_path: Path
) -> None:
    site = EngineSite(tiny_models.reader("qwen3"), tmp_path / "kv", max_requests=2)

    async def burst() -> tuple[int, list[int | None]]:
        taken, told = [], []
        for _ in range(30):
            try:
                taken.append(site.engine.submit(site.request(max_tokens=4)))
            except Overloaded as refused:
                told.append(refused.retry_after)
            assert len(site.engine._admission.live()) <= 10  # two that are answered, and four times as many that wait
        outcomes = await asyncio.gather(*map(drain, taken))
        assert len({outcome.text for outcome in outcomes}) == 1
        for _ in range(200):  # the last one leaves a moment after its answer
            if not site.engine._admission.live():
                return len(taken), told
            await asyncio.sleep(0.02)
        raise AssertionError("an answered request stays in the engine")

    async def bursts() -> None:
        await drain(site.engine.submit(site.request(max_tokens=4)))
        for _ in range(3):
            taken, told = await burst()
            assert 2 <= taken < 30
            assert taken + len(told) == 30
            assert all(seconds is not None and 1 <= seconds <= 60 for seconds in told)

    try:
        asyncio.run(bursts())
    finally:
        site.engine.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_engine_answers_429_in_openais_shape_before_it_searches(
    site: Site, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    site.corpus_of("handbook", {"terms.txt": "Invoices are due after thirty days."})
    monkeypatch.setattr(search, "chunks", lambda *_: pytest.fail("work for a request that is refused in the end"))
    site.engine.refuse = Overloaded("too many requests wait already; try again in 17 s", retry_after=17)
    body = {"model": "echo-1@handbook", "messages": [{"role": "user", "content": "due?"}], "stream": stream}
    with site.http() as http:
        reply = http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, "17")
    error = reply.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "overloaded", None)
    assert "17 s" in error["message"]
