"""What answers reused is counted once, in batches, by day, tenant and corpus; what it saved follows from the rates."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_kit import SECRET, EchoEngine, Site, make_parts, running, running_site
from fixtures_work import Work, make_work
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import select
from test_api_routes import other_tenant

from serving.api.app import build_app
from serving.auth import ensure_admin_key
from serving.economics import balance, month_cost
from serving.engine.types import Outcome, Report
from serving.processes import _until_the_end
from serving.usage import Meter, split
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import DocumentUse, UsageDay
from storage.catalogue.usage import add_usage
from storage.errors import StorageUnavailable
from storage.policy.rules import Rates
from storage.policy.types import DAY

TEXT = "Invoices are due after thirty days.\n\nReminders are sent once a week."
RATES = """
rates: {currency: EUR, gpu_hour: 3.6, prefill_tokens_per_s: 10, gb_month: {object: 1000000}, gb_transferred: 0.5}
"""


@pytest.fixture
def priced(tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "policy.yaml").write_text(RATES)
    with running_site(tmp_path) as made:
        yield made


def ask(site: Site, *corpora: str, key: str | None = None, stream: bool = False) -> None:
    body = {"model": "echo-1", "messages": [{"role": "user", "content": "when are invoices due?"}], "stream": stream}
    with site.http(key) as http:
        http.post("/v1/chat/completions", json={**body, "vector_store_ids": list(corpora)}).raise_for_status()


def usage(site: Site, key: str | None = None, **query: Any) -> dict[str, Any]:
    with site.http(key) as http:
        reply = http.get("/v1/usage", params=query)
        reply.raise_for_status()
        told: dict[str, Any] = reply.json()
        return told


def results(page: dict[str, Any]) -> list[dict[str, Any]]:
    return [result for bucket in page["data"] for result in bucket["results"]]


def test_an_answer_is_counted_by_corpus_with_what_it_saved(priced: Site) -> None:
    corpus = priced.corpus_of("terms", {"terms.txt": TEXT})
    ask(priced, corpus)
    ask(priced, corpus, stream=True)
    assert results(usage(priced)) == [], "no answer writes to the catalogue"
    priced.parts.meter.flush()
    [found] = results(usage(priced))
    report = priced.engine.generations[0].outcome
    assert report is not None
    assert (found["corpus_id"], found["num_model_requests"]) == (corpus, 2)
    assert found["input_tokens"] == 2 * report.prompt_tokens
    assert found["input_cached_tokens"] == 2 * report.report.tokens_reused > 0
    assert found["output_tokens"] == 2 * report.completion_tokens
    saved = found["input_cached_tokens"] / 10
    assert found["preread"]["gpu_seconds_saved"] == pytest.approx(saved)
    assert found["preread"]["money_saved"] == pytest.approx(saved / 3600 * 3.6)
    assert found["preread"]["currency"] == "EUR"


def counted(site: Site) -> tuple[int, int]:
    """Tokens read and written, as the tenant is told."""
    site.parts.meter.flush()
    found = results(usage(site))
    return sum(each["input_tokens"] for each in found), sum(each["output_tokens"] for each in found)


ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w " * 200}]},
    "/v1/completions": {"prompt": "w " * 200},
    "/v1/responses": {"input": "w " * 200},
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("route", ROUTES)
def test_who_hangs_up_before_the_last_token_pays_for_what_was_made(site: Site, route: str, stream: bool) -> None:
    site.engine.pause = 0.05
    with site.http() as http:
        made = http.post("/v1/api_keys", json={"name": "k", "tokens_per_minute": 12}).json()["key"]
    while time.time() % 60 > 45:  # tokens are counted by the clock's minute
        time.sleep(0.5)
    body = {"model": "echo-1", **ROUTES[route], "stream": stream}
    with site.http(made) as http:
        if stream:
            with http.stream("POST", route, json=body) as reply:
                texts = (line for line in reply.iter_lines() if '"w' in line or '" w' in line)
                for _ in range(4):
                    next(texts)
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(route, json=body, timeout=1.0)
    end = time.monotonic() + 20
    while counted(site) == (0, 0) and time.monotonic() < end:
        time.sleep(0.05)
    read, written = counted(site)
    assert read == 10
    assert (4 if stream else 2) <= written < 200
    with site.http(made) as http:
        assert http.post("/v1/completions", json={"model": "echo-1", "prompt": "x"}).status_code == 429


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_breaks_off_is_counted_as_far_as_it_came(site: Site, stream: bool) -> None:
    site.engine.fail_at = 3
    with site.http() as http:
        http.post("/v1/completions", json={"model": "echo-1", "prompt": "a b c d e", "stream": stream})
    assert counted(site) == (10, 3)


@pytest.mark.parametrize("stream", [True, False])
def test_the_choices_of_a_prompt_share_its_tokens(site: Site, stream: bool) -> None:
    with site.http() as http:
        chat = {"model": "echo-1", "messages": [{"role": "user", "content": "a b"}], "n": 3, "stream": stream}
        http.post("/v1/chat/completions", json=chat).raise_for_status()
        assert counted(site) == (10, 6)
        prompts = {"model": "echo-1", "prompt": ["a b", "c d"], "n": 2, "stream": stream}
        http.post("/v1/completions", json=prompts).raise_for_status()
    assert counted(site) == (10 + 20, 6 + 8)


def test_the_event_loop_does_not_wait_for_the_broker_that_counts(site: Site) -> None:
    told: list[tuple[int, bool]] = []

    def spent(tokens: int) -> None:
        told.append((tokens, asyncio._get_running_loop() is None))

    site.parts.meter.spent = spent
    ask(site)
    ask(site, stream=True)
    assert told == [(14, True)] * 2


def test_flushing_twice_counts_once_and_two_processes_add_up(priced: Site) -> None:
    corpus = priced.corpus_of("terms", {"terms.txt": TEXT})
    other = Meter(priced.parts.catalogue)
    ask(priced, corpus)
    outcome = priced.engine.generations[0].outcome
    assert outcome is not None
    other.note("default", [corpus], outcome)
    for _ in range(2):
        priced.parts.meter.flush()
        other.flush()
    [found] = results(usage(priced))
    assert found["num_model_requests"] == 2


def test_several_corpora_share_an_answers_tokens_and_the_plain_model_has_its_own_row(priced: Site) -> None:
    ids = [priced.corpus_of(name, {f"{name}.txt": f"{name} {TEXT}"}) for name in ("one", "two")]
    ask(priced, *ids)
    ask(priced)
    priced.parts.meter.flush()
    found = {result["corpus_id"]: result for result in results(usage(priced))}
    assert set(found) == {*ids, None}
    outcome = priced.engine.generations[0].outcome
    assert outcome is not None
    assert sum(found[corpus]["input_cached_tokens"] for corpus in ids) == outcome.report.tokens_reused
    assert all(found[corpus]["input_cached_tokens"] > 0 for corpus in ids)


def test_a_tenant_sees_its_own_usage_and_a_restricted_key_its_own_corpora(priced: Site) -> None:
    mine, hidden = (priced.corpus_of(name, {f"{name}.txt": f"{name} {TEXT}"}) for name in ("mine", "hidden"))
    ask(priced, mine)
    ask(priced, hidden)
    priced.parts.meter.flush()
    restricted = priced.key("admin", corpora=[mine])
    assert {result["corpus_id"] for result in results(usage(priced, restricted))} == {mine}
    assert [one["corpus_id"] for one in usage(priced, restricted)["preread"]["stored"]] == [mine]
    rival = usage(priced, other_tenant(priced))
    assert results(rival) == []
    assert rival["preread"]["stored"] == []


def test_days_come_in_pages(priced: Site) -> None:
    today = int(priced.parts.clock() // DAY)
    with priced.parts.catalogue.write() as session:
        add_usage(session, {(today - n, "default", "vs_gone"): {"answers": n + 1} for n in range(5)})
    start = (today - 4) * DAY + 7
    first = usage(priced, start_time=start, limit=3)
    assert [bucket["start_time"] for bucket in first["data"]] == [(today - n) * DAY for n in (4, 3, 2)]
    assert all(bucket["end_time"] - bucket["start_time"] == DAY for bucket in first["data"])
    assert first["has_more"]
    second = usage(priced, start_time=start, limit=3, page=first["next_page"])
    assert [result["num_model_requests"] for result in results(first) + results(second)] == [5, 4, 3, 2, 1]
    assert (second["has_more"], second["next_page"]) == (False, None)
    assert len(usage(priced)["data"]) == 31
    with priced.http() as http:
        refused = http.get("/v1/usage", params={"start_time": 20, "end_time": 10})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "start_time")
        assert http.get("/v1/usage", params={"start_time": 10**18}).status_code == 400


def test_usage_outlives_its_corpus_and_uses_go_with_their_document(priced: Site) -> None:
    corpus = priced.corpus_of("terms", {"terms.txt": TEXT})
    ask(priced, corpus)
    priced.parts.meter.flush()
    with priced.parts.catalogue.read() as session:
        assert session.scalars(select(DocumentUse.hits)).all() == [1]
    with priced.http() as http:
        http.delete(f"/v1/vector_stores/{corpus}").raise_for_status()
    assert [result["corpus_id"] for result in results(usage(priced))] == [corpus]
    with priced.parts.catalogue.read() as session:
        assert session.scalars(select(DocumentUse)).all() == []


def test_a_catalogue_that_is_away_loses_no_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_work(tmp_path)
    meter = Meter(work.catalogue)
    outcome = Outcome("x", "stop", 10, 1, (), Report(tokens_reused=4))
    meter.note("t1", ["vs_1"], outcome)
    with monkeypatch.context() as away:
        away.setattr(Catalogue, "write", lambda self: (_ for _ in ()).throw(StorageUnavailable("away")))
        with pytest.raises(StorageUnavailable):
            meter.flush()
    meter.note("t1", ["vs_1"], outcome)
    meter.flush()
    with work.catalogue.read() as session:
        [row] = session.scalars(select(UsageDay)).all()
    assert (row.answers, row.tokens_prompt, row.tokens_reused) == (2, 20, 8)
    work.catalogue.close()


_COUNTS_AND_WAITS = """
import sys, time
from serving.engine.types import Outcome, Report
from serving.usage import Meter
from storage.catalogue.engine import open_catalogue
meter = Meter(open_catalogue(sys.argv[1]))
for number in range(3):
    meter.note("t1", [], Outcome("x", "stop", 10, 1, (), Report(tokens_reused=4)))
meter.flush()
meter.note("t1", [], Outcome("x", "stop", 10, 1, (), Report(tokens_reused=4)))
print("counted", flush=True)
time.sleep(60)
"""


def test_a_process_that_is_killed_loses_only_what_it_counted_since_its_last_flush(work: Work) -> None:
    url = work.catalogue.engine.url.render_as_string(hide_password=False)
    process = subprocess.Popen([sys.executable, "-c", _COUNTS_AND_WAITS, url], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "counted\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert work.count(UsageDay, UsageDay.answers == 3, UsageDay.tokens_reused == 12) == 1


def test_it_is_flushed_every_few_seconds_not_with_every_tick(tmp_path: Path) -> None:
    work, now = make_work(tmp_path), [1000.0]
    meter = Meter(work.catalogue, clock=lambda: now[0])
    meter.note("t1", [], Outcome("x", "stop", 10, 1, (), Report()))
    meter.tick()
    assert work.count(UsageDay) == 0
    now[0] += 10
    meter.tick()
    assert work.count(UsageDay, UsageDay.corpus_id == "") == 1
    work.catalogue.close()


def test_a_server_that_ends_properly_writes_down_what_it_counted(tmp_path: Path) -> None:
    import asyncio

    parts, work = make_parts(tmp_path, EchoEngine(), [])
    assert ensure_admin_key(parts.catalogue, SECRET)
    app = build_app(parts)
    with running(app):
        parts.meter.note("default", [], Outcome("x", "stop", 10, 1, (), Report()))

    async def end() -> None:
        async with _until_the_end(parts.meter, lambda: ended.append(True), app):
            assert work.count(UsageDay) == 0

    ended: list[bool] = []
    asyncio.run(end())
    assert ended == [True], "spans that wait are sent as well"
    assert work.count(UsageDay) == 1
    parts.catalogue.close()


def test_what_workers_compute_is_counted_as_spent(work: Work) -> None:
    from precompute import rows

    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "alpha one two", "b.txt": "beta one two three"})
    with work.catalogue.write() as session:
        batch = rows.claim(session, "w", 60, 4096, None)
        assert batch is not None
        rows.mark_done(session, batch, {owed.key: 100 for owed in batch.rows}, 2.0)
    with work.catalogue.write() as session:  # a lease that is lost counts nothing twice
        rows.mark_done(session, batch, {owed.key: 100 for owed in batch.rows}, 2.0)
    with work.catalogue.read() as session:
        [row] = session.scalars(select(UsageDay)).all()
    assert (row.tenant_id, row.corpus_id, row.tokens_compiled) == ("t1", corpus.id, 7)
    assert row.seconds_compiled == pytest.approx(2.0)


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    made = make_work(tmp_path)
    yield made
    made.catalogue.close()


names = st.text(max_size=3)


@given(
    st.dictionaries(names, st.integers(0, 10**9), max_size=4),
    st.dictionaries(names, st.integers(1, 10**6), min_size=1, max_size=5),
)
def test_parts_of_an_amount_add_up_to_it(amounts: dict[str, int], shares: dict[str, int]) -> None:
    amounts.pop("answers", None)
    parts = split(amounts, shares)
    assert set(parts) == set(shares)
    for name, amount in amounts.items():
        assert sum(part[name] for part in parts.values()) == amount
        for corpus, part in parts.items():
            assert abs(part[name] - amount * shares[corpus] / sum(shares.values())) < 1
    assert all(part["answers"] == 1 for part in parts.values())


def test_the_balance_follows_from_its_formulae() -> None:
    counts = {"tokens_reused": 72_000, "seconds_compiled": 7.2, "bytes_fetched": 2e9}
    rates = Rates("EUR", 2.0, 20.0, {"object": 0.02, "memory": 3.0}, 0.1)
    found = balance(counts, rates, None)
    assert (found.gpu_seconds_saved, found.gpu_seconds_spent) == (3600, 7.2)
    assert (found.money_saved, found.money_spent) == pytest.approx((2.0, 2.0 * 7.2 / 3600 + 0.2))
    assert month_cost({"object": 5e9, "memory": 1e9, "disk": 9e9}, rates) == pytest.approx(3.1)
    unknown = balance(counts, Rates(), None)
    assert (unknown.gpu_seconds_saved, unknown.money_saved) == (None, None)
    assert balance(counts, Rates(), 72.0).gpu_seconds_saved == 1000


def test_many_answers_make_one_row_and_few_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = make_work(tmp_path)
    meter, writes, real = Meter(work.catalogue), [], Catalogue.write
    monkeypatch.setattr(Catalogue, "write", lambda self: (writes.append(1), real(self))[1])
    for _ in range(500):
        meter.note("t1", ["vs_1"], Outcome("x", "stop", random.randint(1, 9), 1, (), Report()))
    assert writes == []
    meter.flush()
    assert writes == [1]
    assert work.count(UsageDay, UsageDay.answers == 500) == 1
    work.catalogue.close()


def test_a_chat_page_s_own_tasks_are_counted_apart_from_the_corpus_chosen_there(site: Site) -> None:
    corpus = site.corpus_of("handbook", {"a.txt": TEXT})
    ask(site, corpus)
    task = "### Task:\nGenerate a title.\n\n<chat_history>\nUSER: when are invoices due?\n</chat_history>"
    with site.http() as http:
        body = {"model": f"echo-1@{corpus}", "messages": [{"role": "user", "content": task}]}
        http.post("/v1/chat/completions", json=body).raise_for_status()
    site.parts.meter.flush()
    results = [result for day in usage(site)["data"] for result in day["results"]]
    counted = {(result["kind"], result["corpus_id"]): result["num_model_requests"] for result in results}
    assert counted == {("answer", corpus): 1, ("task", None): 1}
