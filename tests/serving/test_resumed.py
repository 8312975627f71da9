"""A conversation's next turn takes up the blended prompt of the turn before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_kit import EngineSite
from fixtures_models import Models

from serving.engine.blended import Blended, BlendedCache
from serving.engine.types import Message
from storage.kvstore import KVStore


@pytest.fixture
def talk(tiny_models: Models, tmp_path: Path) -> EngineSite:
    site = EngineSite(tiny_models.reader("llama"), tmp_path / "kv", blended_bytes=64 << 20)
    yield site
    site.engine.close()


def turns(site: EngineSite, count: int) -> tuple[Message, ...]:
    said = [Message("user", "How much is a ticket?")]
    for n in range(count - 1):
        said += [Message("assistant", "Forty euros."), Message("user", f"And for {n + 2} people?")]
    return tuple(said)


@pytest.mark.parametrize("method", ["default", "reuse", "cacheblend:0.3"])
def test_a_second_turn_computes_its_own_text_only(method: str, talk: EngineSite) -> None:
    first = talk.answer(method=method, messages=turns(talk, 1)).report
    second = talk.answer(method=method, messages=turns(talk, 2))
    assert (first.resumed, second.report.resumed) == (False, True)
    assert second.report.tokens_recomputed == 0
    assert second.report.bytes_fetched == 0
    assert second.report.not_reused == []
    assert second.report.tokens_reused + second.report.tokens_computed == second.prompt_tokens
    chunks = sum(len(c.token_ids) for c in talk.chunks)
    assert second.report.tokens_reused > chunks


def test_a_resumed_answer_is_the_one_made_anew(talk: EngineSite, tmp_path: Path) -> None:
    talk.answer(messages=turns(talk, 1))
    resumed = talk.answer(messages=turns(talk, 2), max_tokens=24)
    anew = EngineSite(talk.reader, tmp_path / "other")
    try:
        expected = anew.answer(messages=turns(talk, 2), max_tokens=24)
    finally:
        anew.engine.close()
    assert resumed.report.resumed
    assert not expected.report.resumed
    assert resumed.text == expected.text


def test_chunks_that_are_ranked_otherwise_keep_their_order(talk: EngineSite) -> None:
    first = talk.answer()
    second = talk.answer(chunks=(talk.chunks[2], talk.chunks[0], talk.chunks[1]))
    assert second.report.resumed
    assert [c.chunk_id for c in second.used_chunks] == [c.chunk_id for c in first.used_chunks] == [0, 1, 2]
    assert second.text == first.text


def test_a_chunk_that_stands_twice_is_another_prompt(talk: EngineSite) -> None:
    talk.answer()
    twice = (*talk.chunks, talk.chunks[0])
    assert not talk.answer(chunks=twice).report.resumed
    again = talk.answer(chunks=twice[::-1])
    assert again.report.resumed
    assert [c.chunk_id for c in again.used_chunks] == [0, 1, 2, 0]


def test_a_resumed_prompt_that_no_longer_fits_is_blended_anew(talk: EngineSite) -> None:
    talk.answer()
    long = (Message("user", "and again " * 150),)
    outcome = talk.answer(messages=long, max_tokens=900)
    assert len(outcome.used_chunks) < 3
    assert not outcome.report.resumed


def test_other_chunks_or_another_method_are_another_prompt(talk: EngineSite) -> None:
    talk.answer()
    assert talk.answer().report.resumed
    assert not talk.answer(chunks=talk.chunks[:2]).report.resumed
    assert not talk.answer(method="epic:4").report.resumed
    for _ in range(2):
        assert not talk.answer(method="full").report.resumed


def test_a_chunk_without_a_key_is_never_kept(talk: EngineSite) -> None:
    from dataclasses import replace

    unknown = (replace(talk.chunks[0], kv_key=None), *talk.chunks[1:])
    for _ in range(2):
        assert not talk.answer(chunks=unknown).report.resumed


def test_a_deleted_chunk_is_forgotten_at_once(talk: EngineSite) -> None:
    talk.answer()
    key = str(talk.chunks[1].kv_key)
    assert key in talk.engine.keys_in_memory()
    KVStore(talk.objects).delete([key])
    talk.engine.forget([key])
    outcome = talk.answer()
    assert not outcome.report.resumed
    assert [n.reason for n in outcome.report.not_reused] == ["absent"]


def entry(megabytes: int) -> Blended:
    return Blended(torch.zeros(megabytes << 20, dtype=torch.uint8), 1, ())


def test_the_cache_keeps_what_was_used_last_within_its_bound() -> None:
    cache = BlendedCache(10 << 20)
    for name in "abc":
        cache.put(("m", (name,)), entry(3))
    assert cache.get(("m", ("a",))) is not None
    cache.put(("m", ("d",)), entry(3))
    assert cache.keys() == {"a", "c", "d"}
    cache.put(("m", ("e",)), entry(11))
    assert cache.keys() == {"a", "c", "d"}
    cache.put(("m", ("f",)), entry(10))
    assert cache.keys() == {"f"}
    assert cache.used_bytes == 10 << 20


def test_without_room_nothing_is_kept(engine_site: EngineSite) -> None:
    engine_site.answer()
    assert not engine_site.answer().report.resumed
