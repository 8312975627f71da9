"""Load or compute with the product's own patience, against an S3 that stalls or is throttled: what is waited for it is a share of
the prompt's own full prefill, as the engine estimates it, and no wall clocks of two runs are compared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from s3_kit import MakeSite, S3Site, readers, until

from serving.engine import loading
from serving.engine.rates import FLOOR_S, PATIENCE, Rates
from serving.engine.types import Outcome

pytestmark = pytest.mark.services
SLOWLY = 10.0  # tokens a second that the tiny model is taken to read: a busy machine's hiccups are a small share of a prefill
STALLS = ("stall", "stall-body", "drip-body", "drip-head")


@pytest.fixture
def site(s3_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Site]:
    made = s3_site(patience_s=None)
    made.answer(method="full", max_tokens=1)  # the engine's thread has read frame and labels
    monkeypatch.setattr(made.reader, "prefill_tokens_per_s", SLOWLY)
    monkeypatch.setattr(made.reader, "_note_speed", lambda *_: None)
    monkeypatch.setattr(loading, "DEADLINE_S", 1.5)
    yield made
    made.rude.behave()
    until(lambda: not readers(), "the end of its reads")


def rates(site: S3Site) -> Rates:
    return site.engine._fetcher._rates


def stored_tokens(site: S3Site) -> int:
    return sum(len(chunk.token_ids) for chunk in site.chunks)


def share_waited(site: S3Site, outcome: Outcome) -> float:
    """Of the full prefill's time."""
    return outcome.report.ms["fetch"] / 1000 / (outcome.prompt_tokens / SLOWLY)


def patience_s(site: S3Site) -> float:
    return rates(site).waits_s({"store": stored_tokens(site)}, SLOWLY, meanwhile=True)["store"]


@pytest.mark.parametrize("fault", STALLS)
def test_a_stall_costs_less_than_a_fifth_of_the_prefill_and_then_nothing(site: S3Site, fault: str) -> None:
    full = site.answer(method="full").text
    site.rude.always = fault
    assert patience_s(site) == FLOOR_S, "of the source nothing is known"
    for number in range(3):
        outcome = site.answer()
        assert outcome.text == full
        assert [(c.chunk_id, c.reason) for c in outcome.report.not_reused] == [(n, "slow") for n in range(3)]
        assert share_waited(site, outcome) <= 0.2
        assert patience_s(site) == 0, number
    until(lambda: rates(site).load_tokens_per_s("store") is not None and not readers(), "the end of the fetches")
    assert patience_s(site) == 0, "it is known as slow now, and nobody has to wait in vain for that"
    assert site.answer().report.ms["fetch"] / 1000 < PATIENCE * stored_tokens(site) / SLOWLY


def test_a_source_that_was_quick_before_it_stalls_is_waited_for_less_than_a_fifth_of_the_prefill(site: S3Site) -> None:
    until(lambda: site.answer().report.not_reused == [], "the first that comes in time")
    for _ in range(20):
        rates(site).note_load("store", 1_000, 0.1)
    patience = patience_s(site)
    assert 0 < patience <= PATIENCE * stored_tokens(site) / SLOWLY
    site.rude.always = "stall-body"
    outcome = site.answer()
    assert {c.reason for c in outcome.report.not_reused} == {"slow"}
    assert share_waited(site, outcome) <= 0.2
    assert patience_s(site) == 0, "while that one waits in vain"
    until(lambda: site.counted()["miss_timeout"] == 3 and not readers(), "the end of the fetch")
    until(lambda: not rates(site)._overdue["store"], "its note")
    assert patience_s(site) == 0, "and after it"


def test_an_s3_that_is_well_again_is_trusted_again_though_nobody_waits_for_it_meanwhile(site: S3Site) -> None:
    site.rude.always = "stall-body"
    site.answer(max_tokens=1)
    until(lambda: site.counted()["miss_timeout"] == 3 and not readers(), "the end of the fetch")
    site.rude.behave()
    hits = site.counted()["hits"]
    for number in range(6):
        assert share_waited(site, site.answer(max_tokens=1)) <= 0.2
        until(lambda before=hits + 3 * number: site.counted()["hits"] == before + 3, "what was not waited for")  # type: ignore[misc]
        until(lambda: not readers(), "the end of the fetch")
    until(lambda: patience_s(site) > 0, "trust")
    assert site.said_with((0, 1, 2)) == site.answer().text


@pytest.mark.parametrize("method", ["reuse", "default"])
def test_a_throttled_s3_is_waited_for_once_and_after_that_only_what_has_come_is_used(site: S3Site, method: str) -> None:
    """A hundredth of a chunk a second: nothing comes before computing has got there."""
    full = site.answer(method="full").text
    site.rude.always, site.rude.bytes_per_s = "throttled", 500
    for _ in range(2):
        outcome = site.answer(method=method)
        assert {c.reason for c in outcome.report.not_reused} == {"slow"}
        assert outcome.text == full
        assert share_waited(site, outcome) <= 0.2
    site.rude.bytes_per_s = 1 << 30  # so that the test ends
    assert patience_s(site) == 0


def test_a_throttled_s3_that_brings_all_within_the_deadline_is_known_by_its_speed(site: S3Site) -> None:
    """Too slow to be waited for, and fast enough to be read to its end in the background."""
    size = sum(site.behind.size(site.name(n)) or 0 for n in range(3))
    site.rude.always, site.rude.bytes_per_s = "throttled", size
    first = site.answer(max_tokens=1)
    assert {c.reason for c in first.report.not_reused} == {"slow"}
    until(lambda: rates(site).load_tokens_per_s("store") is not None and not readers(), "the end of the fetch")
    speed = rates(site).load_tokens_per_s("store")
    assert speed is not None
    assert speed <= 1.2 * stored_tokens(site), "a second for all of them"


def test_the_breakers_probe_is_no_first_tokens_wait(s3_site: MakeSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """An S3 that failed, and stalls when one request asks whether it is well again."""
    site = s3_site({"attempts": 1, "threshold": 3, "cool_down_s": 0.1}, patience_s=None)
    monkeypatch.setattr(site.reader, "prefill_tokens_per_s", SLOWLY)
    monkeypatch.setattr(site.reader, "_note_speed", lambda *_: None)
    monkeypatch.setattr(loading, "DEADLINE_S", 1.5)
    full = site.answer(method="full").text
    site.rude.always = 503
    until(lambda: site.answer().text == full and site.objects.counters()["breaker_open"], "the breaker to open")
    site.rude.always = "stall-body"
    asked = len(site.rude.requests)

    def probe() -> bool:
        outcome = site.answer()
        assert outcome.text == full
        assert {c.reason for c in outcome.report.not_reused} <= {"slow", "unavailable"}, "nobody waited for it to time out"
        assert share_waited(site, outcome) <= 0.2
        return len(site.rude.requests) > asked

    until(probe, "the probe")
    site.rude.behave()
    until(lambda: not readers(), "the end of its reads")
