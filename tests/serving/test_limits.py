"""What a key may ask in a minute, told in OpenAI's words, and counted together by processes that share a broker."""

from __future__ import annotations

import time
from pathlib import Path

import openai
import pytest
from api_kit import Site
from promised import missing

from serving.auth import Principal
from serving.limits import ASKING, Limiter, RateLimited
from serving.local_broker import LocalBroker, server_binary

ASK = {"model": "echo-1", "messages": [{"role": "user", "content": "one two three"}]}


def limited(site: Site, **limits: int) -> str:
    with site.http() as http:
        made = http.post("/v1/api_keys", json={"name": "k", **limits})
        made.raise_for_status()
        return str(made.json()["key"])


def begin_of_minute() -> None:
    """Tokens are counted by the clock's minute: a test must not stand on its edge."""
    while time.time() % 60 > 50:
        time.sleep(0.5)


def test_requests_over_the_limit_are_told_when_to_come_back(site: Site) -> None:
    key = limited(site, requests_per_minute=3)
    with site.http(key) as http:
        answers = [http.get("/v1/models") for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        left = [answer.headers["x-ratelimit-remaining-requests"] for answer in answers]
        assert left == ["2", "1", "0", "0", "0"]
        refused = answers[-1]
        assert refused.headers["x-ratelimit-limit-requests"] == "3"
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert refused.headers["x-ratelimit-reset-requests"] == refused.headers["retry-after"] + "s"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    with pytest.raises(openai.RateLimitError):
        site.client(key, max_retries=0).models.list()
    with site.http() as http:
        unlimited = http.get("/v1/models")
    assert unlimited.status_code == 200, "another key's count is its own"
    assert not any(name.startswith("x-ratelimit") for name in unlimited.headers)


def test_a_stranger_costs_nobody_their_requests(site: Site) -> None:
    key = limited(site, requests_per_minute=1)
    with site.http("pr_" + "x" * 43) as http:
        for _ in range(3):
            assert http.get("/v1/models").status_code == 401
    with site.http(key) as http:
        assert http.get("/v1/models").status_code == 200


def test_tokens_are_counted_when_an_answer_ends_and_refuse_the_next_one(site: Site) -> None:
    begin_of_minute()
    client = site.client(limited(site, tokens_per_minute=14), max_retries=0)
    first = client.chat.completions.with_raw_response.create(**ASK)
    assert first.headers["x-ratelimit-remaining-tokens"] == "14"
    spent = first.parse().usage.total_tokens
    assert 0 < spent < 14
    second = client.chat.completions.with_raw_response.create(**ASK, stream=True)
    assert second.headers["x-ratelimit-remaining-tokens"] == str(14 - spent)
    for _ in second.parse():
        pass
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(**ASK)
    assert caught.value.code == "rate_limit_exceeded"
    assert "tokens per minute" in caught.value.message
    assert client.models.list().data, "what spends no tokens goes on"


def who(key_id: str = "key-1") -> Principal:
    return Principal("t", key_id, frozenset({"read"}), requests_per_minute=4, tokens_per_minute=10)


def admitted(limiter: Limiter, principal: Principal, tries: int) -> int:
    count = 0
    for _ in range(tries):
        try:
            limiter.admit(principal, "/v1/models", None)  # type: ignore[arg-type]
            count += 1
        except RateLimited:
            pass
    return count


@pytest.fixture
def broker(tmp_path: Path):
    binary = server_binary()
    if binary is None:
        missing("valkey", "no Valkey or Redis server is installed")
    made = LocalBroker(binary, tmp_path / "broker", tmp_path / "broker.url")
    made.start()
    yield made
    made.stop()


@pytest.mark.services
def test_processes_that_share_a_broker_count_together(broker: LocalBroker) -> None:
    begin_of_minute()
    ours, theirs = (Limiter(lambda: broker.url) for _ in range(2))
    assert admitted(ours, who(), 3) + admitted(theirs, who(), 3) == 4
    assert admitted(theirs, who("key-2"), 1) == 1
    ASKING.set(who())
    ours.spent(10)
    assert not theirs._counters().room(who())[0]


@pytest.mark.services
def test_while_the_broker_is_away_each_process_counts_for_itself(broker: LocalBroker) -> None:
    begin_of_minute()
    limiter, url = Limiter(lambda: url), broker.url
    assert admitted(limiter, who(), 1) == 1
    broker.stop()
    assert admitted(limiter, who(), 6) == 4, "limited all the same"
    broker.start()
    url = broker.url  # after a restart it listens elsewhere
    limiter._away_until = 0.0
    assert admitted(limiter, who("key-3"), 5) == 4
    assert limiter._shared is not None


def test_without_a_shared_broker_a_process_counts_alone() -> None:
    limiter = Limiter(lambda: "filesystem://")
    assert admitted(limiter, who(), 6) == 4
