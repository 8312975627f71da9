"""Load or compute: how long a source is waited for, whatever it does, and that it is tried again without being waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from engine_kit import EngineSite
from fixtures_models import Models
from s3_kit import until

from serving.engine import loading
from serving.engine.rates import FLOOR_S, PATIENCE, Rates
from storage.breaker import Breaker
from storage.tiers import flights

SPEED = 1_000.0  # tokens of prefill a second
TEN = 10_000  # tokens, so ten seconds of prefill
GPU = 20_000.0  # of an 8B model: 4,096 tokens are 0.2 s


def wait(rates: Rates, tokens: int = TEN, speed: float | None = SPEED, *, meanwhile: bool = True) -> float:
    return rates.waits_s({"store": tokens}, speed, meanwhile=meanwhile)["store"]


# --- the policy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", [True, False])
@pytest.mark.parametrize("seen", [(), ((4096, 1e-3),), ((4096, 0.05),), ((4096, 1.0),), ((0, 5.0),), ((4096, 1e-3), (0, 5.0))])
@pytest.mark.parametrize(("tokens", "speed"), [(1, GPU), (400, GPU), (4096, GPU), (400, SPEED), (32_000, SPEED)])
def test_no_source_is_waited_for_longer_than_a_tenth_of_the_prefill(
    tokens: int, speed: float, seen: tuple[tuple[int, float], ...], meanwhile: bool
) -> None:
    rates = Rates()
    for came, seconds in seen:
        rates.note_load("store", came, seconds)
    assert 0 <= wait(rates, tokens, speed, meanwhile=meanwhile) <= PATIENCE * tokens / speed


def test_a_prompt_of_0_2_s_of_prefill_waits_for_an_unknown_source_0_02_s() -> None:
    assert wait(Rates(), 4096, GPU) == pytest.approx(0.1 * 4096 / GPU)
    assert wait(Rates(), TEN, SPEED) == FLOOR_S, "and a long one no longer than anybody feels"
    assert wait(Rates(), TEN, None) == FLOOR_S, "as long as no prefill has been measured"


def test_a_source_known_to_be_quick_is_waited_for_as_long_as_a_few_times_its_usual() -> None:
    rates = Rates()
    rates.note_load("store", TEN, 0.2)
    assert wait(rates) == pytest.approx(4 * 0.2)
    rates = Rates()
    rates.note_load("store", TEN, 0.5)
    assert wait(rates) == pytest.approx(PATIENCE * 10)
    assert wait(rates, 100) == pytest.approx(PATIENCE * 0.1)


def test_a_source_known_to_be_slow_is_not_waited_for_where_computing_goes_on_meanwhile() -> None:
    rates = Rates()
    rates.note_load("store", TEN, 2.0)  # five times as fast as computing; but both ends at once are faster
    assert wait(rates) == 0
    assert wait(rates, meanwhile=False) == pytest.approx(PATIENCE * 10), "where nothing is computed meanwhile"
    rates = Rates()
    rates.note_load("store", TEN, 11.0)
    assert wait(rates, meanwhile=False) == 0


def test_one_stall_is_enough_and_three_quick_reads_make_it_good() -> None:
    """However long it has been quick, or has stalled."""
    rates = Rates()
    for _ in range(50):
        rates.note_load("store", TEN, 0.1)
    assert wait(rates) > 0
    rates.note_load("store", 0, 5.0)
    assert wait(rates) == 0
    for _ in range(50):
        rates.note_load("store", 0, 5.0)
    for _ in range(3):
        assert wait(rates) == 0
        rates.note_load("store", TEN, 0.1)
    assert wait(rates) > 0


def test_a_source_that_fails_at_once_is_no_quick_one() -> None:
    """It may stall when it is asked again."""
    rates = Rates()
    rates.note_load("store", 0, 0.001)
    assert wait(rates) == 0


def test_tiers_are_told_apart() -> None:
    rates = Rates()
    rates.note_load("store", 0, 5.0)
    rates.note_load("disk", TEN, 0.01)
    waits = rates.waits_s({"store": 5000, "disk": 5000}, SPEED, meanwhile=True)
    assert waits["store"] == 0 < waits["disk"] <= PATIENCE * 10


def test_a_source_that_another_request_waits_for_in_vain_is_not_waited_for() -> None:
    rates = Rates()
    rates.note_load("store", TEN, 0.1)
    rates.note_overdue("store", 1)
    assert wait(rates) == 0
    rates.note_overdue("store", -1)
    assert wait(rates) > 0


# --- through the engine: no interleaving holds a first token ------------------------------------------------------------------


@pytest.fixture
def site(tiny_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineSite]:
    """The product's own patience, over a model that is taken to read 20 tokens a second: a full prefill is ten seconds."""
    made = EngineSite(tiny_models.reader("llama"), tmp_path, patience_s=None)
    monkeypatch.setattr(made.reader, "prefill_tokens_per_s", 20.0)
    monkeypatch.setattr(made.reader, "_note_speed", lambda *_: None)
    yield made
    made.objects.gate.set()
    made.engine.close()


def waited_s(site: EngineSite, **changes: Any) -> float:
    """What an answer has waited for stored KV, which stalls. A busy machine has what is left of a fifth of the prefill."""
    outcome = site.answer(max_tokens=1, **changes)
    assert {c.reason for c in outcome.report.not_reused} == {"slow"}
    seconds = outcome.report.ms["fetch"] / 1000
    assert seconds <= 0.2 * outcome.prompt_tokens / 20
    return seconds


def rates_of(site: EngineSite) -> Rates:
    return site.engine._fetcher._rates


def test_a_stall_is_waited_for_once_and_then_not_at_all(site: EngineSite, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[float] = []
    timer = threading.Timer

    def timed(seconds: float, act: Any) -> threading.Timer:
        begun.append(seconds)
        return timer(seconds, act)

    monkeypatch.setattr(threading, "Timer", timed)
    site.objects.gate.clear()
    assert waited_s(site) >= 0.5 * FLOOR_S  # of which a busy machine may have taken something before
    assert begun
    assert max(begun) <= FLOOR_S
    begun.clear()
    for _ in range(3):
        waited_s(site)
    assert not begun, "the first one's fetch still waits, which is enough to know"


def test_a_stalled_source_is_tried_by_every_request_and_trusted_again_when_it_is_well(
    site: EngineSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "DEADLINE_S", 0.3)
    site.objects.gate.clear()
    for _ in range(3):
        waited_s(site)
    until(lambda: rates_of(site).load_tokens_per_s("store") is not None, "the end of a fetch")
    time.sleep(0.4)  # the others have ended, too
    site.objects.gate.set()
    monkeypatch.undo()
    for _ in range(6):
        site.answer(max_tokens=1)
        until(lambda: not rates_of(site)._overdue["store"], "what was waited for")
        time.sleep(0.05)
    monkeypatch.setattr(site.reader, "prefill_tokens_per_s", 20.0)
    assert site.answer(max_tokens=1).report.not_reused == []


def test_what_lies_in_memory_comes_while_all_threads_wait_for_the_store(
    tiny_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = EngineSite(tiny_models.reader("llama"), tmp_path, patience_s=None, tiers={"memory_bytes": 1 << 24})
    monkeypatch.setattr(site.reader, "prefill_tokens_per_s", 20.0)
    monkeypatch.setattr(site.reader, "_note_speed", lambda *_: None)
    site.kv.get(str(site.chunks[1].kv_key), site.reader.profile)
    site.objects.gate.clear()
    for _ in range(site.engine._fetcher._readers._far._max_workers + 5):
        outcome = site.answer(max_tokens=1)
        assert [(c.chunk_id, c.tier) for c in outcome.report.reused] == [(1, "memory")]
        assert outcome.report.ms["fetch"] <= 1000 * 0.2 * outcome.prompt_tokens / 20
    site.objects.gate.set()
    site.engine.close()


def test_one_tier_that_stalls_does_not_keep_what_another_brings(
    tiny_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a source known to stall nothing is waited for, though another's chunk is."""
    site = EngineSite(tiny_models.reader("llama"), tmp_path, patience_s=None, tiers={"memory_bytes": 1 << 24})
    monkeypatch.setattr(site.reader, "prefill_tokens_per_s", 2.0)  # so that a busy machine has ten seconds
    site.kv.get(str(site.chunks[0].kv_key), site.reader.profile)
    site.objects.gate.clear()
    rates_of(site).note_load("store", 0, 5.0)
    outcome = site.answer(max_tokens=1)
    assert [c.tier for c in outcome.report.reused] == ["memory"]
    site.objects.gate.set()
    site.engine.close()


STALLS = ("cold", "joined", "no readers", "probe", "fetches", "reasons", "quick before")


@pytest.mark.parametrize("how", STALLS)
def test_however_it_comes_about_a_stall_holds_no_first_token(site: EngineSite, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first measurement that is all warm-up; a read that an earlier request began, with its own deadline; all readers in use;
    a request that is the breaker's probe; all fetching threads in use; a catalogue that does not answer; an average that a
    hundred quick reads have made."""
    rates, held = rates_of(site), threading.Event()
    site.objects.gate.clear()
    if how == "cold":
        monkeypatch.setattr(site.reader, "prefill_tokens_per_s", 0.1)  # the frame's few rows, with a model's first allocations
        outcome = site.answer(max_tokens=1)
        assert outcome.report.ms["fetch"] < 1000 * 1.0, "not a tenth of half an hour"
        return
    if how == "joined":
        held_key = str(site.chunks[2].kv_key)
        threading.Thread(target=site.kv.get, args=(held_key, site.reader.profile), daemon=True).start()
        until(lambda: site.kv._flights._open, "the other's read")
    elif how == "no readers":
        monkeypatch.setattr(flights, "MAX_READERS", 0)
    elif how == "probe":
        breaker, read = Breaker(1, 0.0), site.objects.read_into
        breaker.failed(False)

        def probing(name: str, buffer: memoryview, offset: int = 0) -> int:
            breaker.enter()
            return read(name, buffer, offset)

        monkeypatch.setattr(site.objects, "read_into", probing)
    elif how == "fetches":
        for _ in range(site.engine._fetcher._readers._far._max_workers):
            site.engine._fetcher._readers._far.submit(held.wait, 20)
    elif how == "reasons":
        site.path(0).unlink()
        monkeypatch.setattr(site.engine._fetcher, "_on_miss", lambda key, miss: str(held.wait(20)))
    else:
        for _ in range(100):
            rates.note_load("store", 100_000, 1.0)
    if how == "probe":
        outcome = site.answer(max_tokens=1)
        assert outcome.report.ms["fetch"] <= 1000 * 0.2 * outcome.prompt_tokens / 20
    else:
        waited_s(site)
    held.set()


def test_a_few_rows_of_prefill_say_little_about_its_speed(tiny_models: Models) -> None:
    """The question's rows, each time the last of a prompt, take hardly less time than a whole piece."""
    reader = tiny_models.reader("llama")
    reader.prefill_tokens_per_s = 1_000.0
    for _ in range(10):
        reader._note_speed(8, time.perf_counter() - 0.5)
    assert reader.prefill_tokens_per_s > 900
    for _ in range(10):
        reader._note_speed(512, time.perf_counter() - 5.12)
    assert reader.prefill_tokens_per_s == pytest.approx(100, rel=0.4)


def test_computing_what_comes_late_tells_how_fast_prefill_is(tiny_models: Models, tmp_path: Path) -> None:
    site = EngineSite(tiny_models.reader("llama"), tmp_path, patience_s=0.0)
    site.objects.gate.clear()
    site.answer(max_tokens=1)  # the engine's thread has read frame and labels
    site.reader.prefill_tokens_per_s = 1e9
    site.answer(max_tokens=1)
    assert site.reader.prefill_tokens_per_s < 1e9
    site.objects.gate.set()
    site.engine.close()


def test_no_wait_is_left_behind_in_the_books(site: EngineSite) -> None:
    site.objects.gate.clear()
    waited_s(site)
    books: Mapping[str, int] = rates_of(site)._overdue
    assert books["store"] == 1
    site.objects.gate.set()
    until(lambda: not any(books.values()), "what has come")
