"""A conversation's next turn takes up the blended prompt of the turn before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import EngineSite
from fixtures_models import Models

from serving.blend.methods import default
from serving.engine.blended import BlendedCache, Kept
from serving.engine.types import Message, Outcome
from storage.kvstore import KVStore


@pytest.fixture
def talk(tiny_models: Models, tmp_path: Path) -> Iterator[EngineSite]:
    site = EngineSite(tiny_models.reader("llama"), tmp_path / "kv", blended_bytes=64 << 20)
    yield site
    site.engine.close()


def turns(site: EngineSite, count: int) -> tuple[Message, ...]:
    said = [Message("user", "How much is a ticket?")]
    for n in range(count - 1):
        said += [Message("assistant", "Forty euros."), Message("user", f"And for {n + 2} people?")]
    return tuple(said)


def ask(site: EngineSite, count: int = 2, **changes: Any) -> Outcome:
    """Turn `count` of a conversation, by the method that the product serves."""
    return site.answer(**{"method": "default", "messages": turns(site, count), **changes})


def test_a_second_turn_computes_its_own_text_only(talk: EngineSite) -> None:
    first = ask(talk, 1).report
    second = ask(talk, 2)
    assert (first.resumed, second.report.resumed) == (False, True)
    assert second.report.tokens_recomputed == 0
    assert second.report.bytes_fetched == 0
    assert second.report.not_reused == []
    assert second.report.tokens_reused + second.report.tokens_computed == second.prompt_tokens
    chunks = sum(len(c.token_ids) for c in talk.chunks)
    assert second.report.tokens_reused > chunks


def test_a_resumed_answer_is_that_over_the_same_blended_prompt(talk: EngineSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blended anew with nothing recomputed but the labels' tokens, which no question chooses, it is the same answer."""
    monkeypatch.setattr(default, "SHARE", 0.0)
    anew = ask(talk, 2, max_tokens=24)
    ask(talk, 1)
    resumed = ask(talk, 2, max_tokens=24)
    assert (anew.report.resumed, resumed.report.resumed) == (False, True)
    assert resumed.text == anew.text


def test_a_first_question_chooses_its_own_tokens(talk: EngineSite) -> None:
    """Over the same chunks as another conversation: what was computed again there was chosen by another question."""
    ask(talk, 1)
    again = ask(talk, 1)
    assert not again.report.resumed
    assert again.report.tokens_recomputed > 0


def test_chunks_that_are_ranked_otherwise_keep_their_order(talk: EngineSite) -> None:
    first = ask(talk, 1)
    second = ask(talk, chunks=(talk.chunks[2], talk.chunks[0], talk.chunks[1]))
    assert second.report.resumed
    assert [c.chunk_id for c in second.used_chunks] == [c.chunk_id for c in first.used_chunks] == [0, 1, 2]


def test_a_chunk_that_stands_twice_is_another_prompt(talk: EngineSite) -> None:
    ask(talk, 1)
    twice = (*talk.chunks, talk.chunks[0])
    assert not ask(talk, chunks=twice).report.resumed
    again = ask(talk, chunks=twice[::-1])
    assert again.report.resumed
    assert [c.chunk_id for c in again.used_chunks] == [0, 1, 2, 0]


def test_a_prompt_that_no_longer_fits_loses_its_lowest_ranked_chunk(talk: EngineSite) -> None:
    ask(talk, 1)
    long = (*turns(talk, 1), Message("assistant", "Forty."), Message("user", "and again " * 190))
    ranked = (talk.chunks[2], talk.chunks[0], talk.chunks[1])
    outcome = ask(talk, chunks=ranked, messages=long, max_tokens=900)
    assert not outcome.report.resumed
    assert 0 < len(outcome.used_chunks) < 3
    assert [c.chunk_id for c in outcome.used_chunks] == [2, 0][: len(outcome.used_chunks)]


def test_other_chunks_and_methods_for_comparison_are_never_resumed(talk: EngineSite) -> None:
    ask(talk, 1)
    assert ask(talk).report.resumed
    assert not ask(talk, chunks=talk.chunks[:2]).report.resumed
    for method in ("reuse", "full", "cacheblend:0.3"):
        for _ in range(2):
            assert not ask(talk, method=method).report.resumed


def test_a_chunk_without_a_key_is_never_kept(talk: EngineSite) -> None:
    unknown = (replace(talk.chunks[0], kv_key=None), *talk.chunks[1:])
    for _ in range(2):
        assert not ask(talk, chunks=unknown).report.resumed


def test_a_deleted_chunk_is_forgotten_at_once(talk: EngineSite) -> None:
    ask(talk, 1)
    key = str(talk.chunks[1].kv_key)
    assert key in talk.engine.keys_in_memory()
    KVStore(talk.objects).delete([key])
    talk.engine.forget([key])
    outcome = ask(talk)
    assert not outcome.report.resumed
    assert [n.reason for n in outcome.report.not_reused] == ["absent"]


def keep(cache: BlendedCache, name: str, megabytes: int, forgotten: int = 0) -> None:
    cache.put((name,), Kept(torch.zeros(megabytes << 20, dtype=torch.uint8), frozenset(name)), forgotten)


def test_the_cache_keeps_what_was_used_last_within_its_bound() -> None:
    cache = BlendedCache(10 << 20)
    for name in "abc":
        keep(cache, name, 3)
    assert cache.get(("a",)) is not None
    keep(cache, "d", 3)
    assert cache.keys() == {"a", "c", "d"}
    keep(cache, "e", 11)
    assert cache.keys() == {"a", "c", "d"}
    keep(cache, "f", 10)
    assert cache.keys() == {"f"}


def test_an_answer_begun_before_a_deletion_brings_nothing_back() -> None:
    cache = BlendedCache(10 << 20)
    begun = cache.forgotten
    cache.forget(["a"])
    keep(cache, "a", 1, begun)
    assert cache.keys() == set()
    keep(cache, "a", 1, cache.forgotten)
    assert cache.keys() == {"a"}


def test_without_room_nothing_is_kept(engine_site: EngineSite) -> None:
    ask(engine_site, 1)
    assert not ask(engine_site).report.resumed
