"""What one tenant has stored tells another nothing: not by its report, and not by the time its first answer takes."""

from __future__ import annotations

import itertools
import time
from typing import Any

import httpx
import pytest
from model_kit import Service
from test_needles import document, name

PAIRS = 8
NEVER = 0.001  # how often the test may err where there is no difference


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

    def upload(self, number: int, group: str | None = None) -> str:
        """A corpus of one document, searchable; its KV is owed, not computed."""
        corpus: str = self.call("POST", "/vector_stores", json={"name": f"c{number}"})["id"]
        if group:
            self.call("PUT", f"/corpora/{corpus}/settings", json={"sharing": {"group": group}})
        text = " ".join([document(number)] * 4)
        self.call("POST", f"/corpora/{corpus}/documents", files=[("files", ("a.txt", text.encode()))])
        self.service.worker.ingest_worker.drain()
        return corpus

    def ask(self, number: int, corpus: str) -> tuple[dict[str, Any], float]:
        """The report of the first answer, and the processor's seconds that it took."""
        question = f"What is the code word of the lighthouse {name(number)}?"
        body = {
            "model": self.service.model, "vector_store_ids": [corpus], "max_tokens": 1,
            "messages": [{"role": "user", "content": question}],
        }  # fmt: skip
        began = time.process_time()
        report: dict[str, Any] = self.call("POST", "/chat/completions", json=body)["preread"]
        return report, time.process_time() - began


def reused(report: dict[str, Any]) -> int:
    """How many chunks came with stored KV. (The frame's and the labels' KV is the process's own, and reused by all.)"""
    return int(report["chunks"]) - len(report["not_reused"])


def told(report: dict[str, Any]) -> dict[str, Any]:
    """All of a report that does not depend on the document, the clock, or how many tokens its name has."""
    reasons = [each["reason"] for each in report["not_reused"]]
    return {"reused": report["tokens_reused"], "chunks": report["chunks"], "bytes": report["bytes_fetched"], "reasons": reasons}


def holder_of(service: Service, id: str, numbers: list[int], group: str | None = None) -> Member:
    """A tenant that has stored these documents, KV and all, and has asked about them."""
    holder = Member(service, id)
    if group:
        service.call("PUT", f"/sharing_groups/{group}", json={"tenants": [id]})
    corpora = {number: holder.upload(number, group) for number in numbers}
    service.work()
    for number, corpus in corpora.items():
        report, _ = holder.ask(number, corpus)
        assert reused(report) > 0
    return holder


def p_value(ours: list[float], theirs: list[float]) -> float:
    """Exact two-sided rank-sum test: how often chance alone parts two samples so far."""
    ranked = sorted(ours + theirs)
    ranks = [ranked.index(value) for value in ours]
    middle = len(ours) * (len(ranked) - 1) / 2
    far = abs(sum(ranks) - middle)
    sums = [sum(chosen) for chosen in itertools.combinations(range(len(ranked)), len(ours))]
    return sum(abs(each - middle) >= far for each in sums) / len(sums)


def test_the_first_report_on_what_another_tenant_holds_is_that_on_what_nobody_holds(service: Service) -> None:
    holder_of(service, "holder", [1])
    asker = Member(service, "asker")
    held, _ = asker.ask(1, asker.upload(1))
    fresh, _ = asker.ask(2, asker.upload(2))
    assert told(held) == told(fresh)
    assert reused(held) == 0


def test_where_both_have_declared_it_the_other_s_kv_is_used(service: Service) -> None:
    """What the tests beside this one would see if keys were not the tenants' own."""
    holder_of(service, "holder", [1], "books")
    asker = Member(service, "asker")
    service.call("PUT", "/sharing_groups/books", json={"tenants": ["holder", "asker"]})
    report, _ = asker.ask(1, asker.upload(1, "books"))
    assert reused(report) > 0


@pytest.mark.slow
def test_the_time_of_a_first_answer_does_not_tell_what_another_tenant_holds(service: Service) -> None:
    held, fresh = list(range(PAIRS)), list(range(PAIRS, 2 * PAIRS))
    holder_of(service, "holder", held)
    asker = Member(service, "asker")
    asker.ask(99, asker.upload(99))  # the first answer of all pays for what is made once
    times: dict[int, float] = {}
    for pair in zip(held, fresh, strict=True):
        for number in pair if pair[0] % 2 else pair[::-1]:
            report, times[number] = asker.ask(number, asker.upload(number))
            assert reused(report) == 0
    assert p_value([times[n] for n in held], [times[n] for n in fresh]) > NEVER


def test_the_rank_test_tells_samples_apart_and_equal_ones_not() -> None:
    assert p_value([1.0, 2, 3, 4, 5, 6, 7, 8], [9.0, 10, 11, 12, 13, 14, 15, 16]) < NEVER
    assert p_value([1.0, 3, 5, 7, 9, 11, 13, 15], [2.0, 4, 6, 8, 10, 12, 14, 16]) > 0.5
