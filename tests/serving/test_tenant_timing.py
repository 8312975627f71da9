"""What one tenant has stored tells another nothing: not by its report, and not by the time its first answer takes.

The same samples are taken of a tenant that may use the holder's KV: where a hit is not told from a miss, the test has no eyes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fixtures_models import Models
from model_kit import Service, Shared, serving
from scipy.stats import binomtest
from test_needles import document, name

pytestmark = pytest.mark.timeout(900)  # whoever comes first makes the tenants
PAIRS = 24  # of a text that another tenant holds and one that nobody holds, asked about one after the other
NEVER = 0.001  # how often a test may err where there is no difference
CLOCKS = ("processor", "wall")


@dataclass
class Times:
    """Of first answers, in seconds by each clock: about texts that another tenant holds, and that nobody holds, pair by pair."""

    held: dict[str, list[float]]
    fresh: dict[str, list[float]]

    def p_value(self, clock: str) -> float:
        """How often chance alone has one kind win so many of the pairs: the sign test, two-sided and exact. A machine that grows
        slower does so for both of a pair, and one answer that something held up counts as one, however long that was."""
        slower = sum(fresh > held for held, fresh in zip(self.held[clock], self.fresh[clock], strict=True))
        return float(binomtest(slower, PAIRS).pvalue)


class Member:
    """A tenant of the service, by its admin key."""

    def __init__(self, service: Service, id: str) -> None:
        self.service = service
        self.key = service.call("POST", "/tenants", json={"id": id})["api_key"]["key"]

    def call(self, method: str, path: str, **arguments: Any) -> Any:
        headers = {"authorization": f"Bearer {self.key}"}
        answer = httpx.request(method, f"{self.service.url}/v1{path}", headers=headers, timeout=120, **arguments)
        assert answer.status_code < 400, answer.text
        return answer.json()

    def upload(self, numbers: Sequence[int], group: str | None = None) -> str:
        """A corpus of these documents, searchable; their KV is owed, not computed."""
        corpus: str = self.call("POST", "/vector_stores", json={"name": group or "own"})["id"]
        if group:
            self.call("PUT", f"/corpora/{corpus}/settings", json={"sharing": {"group": group}})
        self.call("POST", f"/corpora/{corpus}/documents", files=[("files", (f"{n}.txt", text(n).encode())) for n in numbers])
        self.service.worker.ingest_worker.drain()
        return corpus

    def ask(self, number: int, corpus: str) -> tuple[dict[str, Any], dict[str, float]]:
        """The report of the first answer about a document, and its times."""
        answer, times = self.timed(question(number), vector_store_ids=[corpus])
        assert [each["filename"] for each in answer["citations"]] == [f"{number}.txt"]
        return answer["preread"], times

    def paste(self, number: int) -> tuple[dict[str, Any], dict[str, float]]:
        """The same of a prompt that names no corpus and holds the document."""
        answer, times = self.timed(f"{text(number)}\n\n{question(number)}")
        return answer["preread"], times

    def timed(self, said: str, **changes: Any) -> tuple[dict[str, Any], dict[str, float]]:
        messages = [{"role": "user", "content": said}]
        body = {"model": self.service.model, "max_tokens": 1, "messages": messages, "preread": {"top_k": 1}, **changes}
        began = time.process_time(), time.perf_counter()
        answer: dict[str, Any] = self.call("POST", "/chat/completions", json=body)
        return answer, dict(zip(CLOCKS, (time.process_time() - began[0], time.perf_counter() - began[1]), strict=True))


def text(number: int) -> str:
    """Of one chunk, and long enough for its prefill to be most of an answer's work."""
    return " ".join([document(number)] * 4)


def question(number: int) -> str:
    return f"What is the code word of the lighthouse {name(number)}?"


def reused(report: dict[str, Any]) -> int:
    """How many chunks came with stored KV. (The frame's and the labels' KV is the process's own, and reused by all.)"""
    return len(report["in_text"]) + int(report["chunks"]) - len(report["not_reused"])


def told(report: dict[str, Any]) -> dict[str, Any]:
    """All of a report that does not depend on the document, the clock, or how many tokens its name has."""
    reasons = [each["reason"] for each in report["not_reused"]]
    return {"reused": report["tokens_reused"], "chunks": report["chunks"], "bytes": report["bytes_fetched"], "reasons": reasons}


@dataclass
class Tenants:
    holder: Member
    asker: Member  # shares with nobody
    friend: Member  # shares with the holder
    holder_corpora: list[str]
    asker_corpus: str
    friend_corpus: str

    def warm(self) -> None:
        """The holder asks about all that it holds, so that its KV is in memory: nearest to an asker who might have it too. A
        store of which nothing is known yet is not waited for, and what comes late is there for the next question."""
        for corpus in self.holder_corpora:
            for number in HELD:
                assert any(reused(self.holder.ask(number, corpus)[0]) == 1 for _ in range(5))

    def times(self, who: Member, corpus: str | None, hits: bool) -> Times:
        """Samples of both kinds in turns: the n-th of one and the n-th of the other are a pair."""
        taken = Times({clock: [] for clock in CLOCKS}, {clock: [] for clock in CLOCKS})
        for number in range(2 * PAIRS):
            report, times = who.paste(number) if corpus is None else who.ask(number, corpus)
            held = number in HELD
            assert (reused(report) > 0) == (hits and held)
            for clock in CLOCKS:
                (taken.held if held else taken.fresh)[clock].append(times[clock])
        return taken


HELD = {number for number in range(2 * PAIRS) if number % 4 in (0, 3)}  # one of each pair, and neither kind is always first
WARM = (97, 98, 99)  # the first answers of all pay for what is made once


@contextmanager
def sharing(shared: Shared, folder: Path, pairs: int) -> Iterator[Tenants]:
    """A service whose holder has the KV of one text of each pair."""
    with serving(shared, folder, dtype="float32") as service:
        holder, asker, friend = (Member(service, id) for id in ("holder", "asker", "friend"))
        service.call("PUT", "/sharing_groups/books", json={"tenants": ["holder", "friend"]})
        numbers = range(2 * pairs)
        corpora = [holder.upload(sorted(HELD & {*numbers}), group) for group in (None, "books")]
        service.work()
        uploaded = [*numbers, *WARM]
        made = Tenants(holder, asker, friend, corpora, asker.upload(uploaded), friend.upload(uploaded, "books"))
        for number in WARM:
            for who, corpus in ((asker, made.asker_corpus), (friend, made.friend_corpus)):
                who.ask(number, corpus)
                who.paste(number)
        yield made


@pytest.fixture(scope="module")
def tenants(shared: Shared, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    with sharing(shared, tmp_path_factory.mktemp("tenants"), pairs=1) as made:
        yield made


@pytest.fixture(scope="module")
def timed_tenants(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """Of a service whose model makes a prefill of a document dear, and all else cheap."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64}
    with sharing(Shared(tiny_models.folder("timed", "llama", **shape)), tmp_path_factory.mktemp("timing"), PAIRS) as made:
        yield made


def test_the_first_report_on_what_another_tenant_holds_is_that_on_what_nobody_holds(tenants: Tenants) -> None:
    held, fresh = 0, 1
    reports = [tenants.asker.ask(number, tenants.asker_corpus)[0] for number in (held, fresh)]
    assert told(reports[0]) == told(reports[1])
    assert reused(reports[0]) == 0
    pasted = [tenants.asker.paste(number)[0] for number in (held, fresh)]
    assert told(pasted[0]) == told(pasted[1])


def test_where_both_have_declared_it_the_other_s_kv_is_used(tenants: Tenants) -> None:
    """What the test above would see if keys were not the tenants' own. What a busy machine's store brings late is there for the
    next question."""
    assert any(reused(tenants.friend.ask(0, tenants.friend_corpus)[0]) == 1 for _ in range(5))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["asked", "pasted"])
def test_the_time_of_a_first_answer_does_not_tell_what_another_tenant_holds(timed_tenants: Tenants, way: str) -> None:
    """Neither of a question to a corpus nor of a prompt that holds the text; and the test would see it if it did: by the
    processor's clock. What others do on this machine may drown any difference in wall time, which is what callers have."""
    tenants, asked = timed_tenants, way == "asked"
    tenants.warm()
    friends = tenants.times(tenants.friend, tenants.friend_corpus if asked else None, hits=True)
    strangers = tenants.times(tenants.asker, tenants.asker_corpus if asked else None, hits=False)
    for clock in CLOCKS:
        print(way, clock, "p of friends", friends.p_value(clock), "of strangers", strangers.p_value(clock))  # noqa: T201
    assert friends.p_value("processor") < NEVER, "a hit is told from a miss"
    assert all(strangers.p_value(clock) > NEVER for clock in CLOCKS)
