"""Plain prompts as an unmodified client sends them, with no corpus named: stored text is reused within the key's rights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from model_kit import SECRET, Service, Shared, serving
from sqlalchemy import update

from serving.auth import NewKey, Principal, create_key
from storage.catalogue.schema import Document, Tenant

BERTHS = "# Berths\n\n" + " ".join(
    f"Berth {n} is swept by the night watch before the tide turns, and its lamp is lit at {n % 5 + 5} in the evening."
    for n in range(12)
)
QUESTION = "Which berth has its lamp lit at nine?"
PROMPT = f"Here is a file of ours:\n\n```\n{BERTHS}\n```\n\n{QUESTION}"


@pytest.fixture
def harbour(tmp_path: Path, shared: Shared) -> Iterator[Service]:
    with serving(shared, tmp_path, dtype="float32", blended_cache_bytes=64 << 20) as service:
        service.corpus("harbour", {"berths.md": BERTHS})
        yield service


def ask(service: Service, *messages: str, key: str = "", method: str | None = None) -> Any:
    turns: list[Any] = [
        {"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(messages)
    ]
    extra = {"preread": {"method": method}} if method else {}
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=key or service.key, timeout=60, max_retries=0) as client:
        answer = client.chat.completions.create(model=service.model, messages=turns, max_tokens=6, extra_body=extra)
    report = answer.preread
    counted = report["tokens_reused"] + report["tokens_recomputed"] + report["tokens_computed"]
    assert counted == answer.usage.prompt_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == report["tokens_reused"]
    return answer


def in_text(answer: Any) -> int:
    return sum(each["tokens"] for each in answer.preread["in_text"])


def test_the_text_of_a_stored_document_is_reused_in_a_prompt_that_names_no_corpus(harbour: Service) -> None:
    answer, full = ask(harbour, PROMPT), ask(harbour, PROMPT, method="full")
    assert in_text(answer) > 0.8 * answer.usage.prompt_tokens
    assert {(each["path"]) for each in answer.preread["in_text"]} == {"berths.md"}
    assert answer.preread["not_reused"] == []
    assert answer.usage.prompt_tokens == full.usage.prompt_tokens
    assert (full.preread["tokens_reused"], full.preread["in_text"]) == (0, [])
    assert answer.citations == []
    assert ask(harbour, PROMPT, method="question:1.0").choices[0].message.content == full.choices[0].message.content
    other = ask(harbour, QUESTION)
    assert other.preread["in_text"] == []


def test_what_the_key_may_not_read_is_computed(harbour: Service) -> None:
    spare = harbour.client.vector_stores.create(name="spare").id
    admin = {"name": "narrow", "scopes": ["read"]}
    narrow = harbour.call("POST", "/api_keys", json={**admin, "corpora": [spare]})["key"]
    assert in_text(ask(harbour, PROMPT, key=narrow)) == 0
    with harbour.wiring.catalogue.write() as session:
        session.add(Tenant(id="rival", name="rival", created_at=time.time()))
    rival = Principal("rival", None, frozenset({"admin"}))
    made = create_key(harbour.wiring.catalogue, SECRET.encode(), rival, NewKey("rival", ("admin",)))
    assert in_text(ask(harbour, PROMPT, key=made["key"])) == 0

    wide = harbour.call("POST", "/api_keys", json=admin)
    with harbour.wiring.catalogue.write() as session:
        session.execute(update(Document).values(access=[wide["id"]]))
    assert in_text(ask(harbour, PROMPT)) == 0
    assert in_text(ask(harbour, PROMPT, key=wide["key"])) > 0


def test_a_deleted_document_is_gone_at_once_from_prompts_and_from_turns_that_held_it(harbour: Service) -> None:
    first = ask(harbour, PROMPT)
    said = first.choices[0].message.content
    second = ask(harbour, PROMPT, said, "And at eight?")
    assert second.preread["tokens_prefix"] >= first.usage.prompt_tokens - 1
    assert second.preread["in_text"] == []  # it is in the beginning, which is taken as it was
    [store] = harbour.client.vector_stores.list().data
    [file] = harbour.client.vector_stores.files.list(store.id).data
    harbour.client.vector_stores.files.delete(file.id, vector_store_id=store.id)
    assert harbour.wiring.engine.keys_in_memory() == set()
    third = ask(harbour, PROMPT, said, "And at seven?")
    assert in_text(third) == 0
    assert third.preread["tokens_computed"] > first.usage.prompt_tokens - 20


def test_another_keys_conversation_is_computed_anew(harbour: Service) -> None:
    other = harbour.call("POST", "/api_keys", json={"name": "other", "scopes": ["read"]})["key"]
    talk = ("Tell me about the tides of the northern harbour.", "They turn twice a day.", "And on Sundays?")
    assert ask(harbour, *talk).preread["tokens_prefix"] == 0
    assert ask(harbour, *talk, key=other).preread["tokens_prefix"] == 0
    assert ask(harbour, *talk, key=other).preread["tokens_computed"] == 1
