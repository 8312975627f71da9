"""Earlier turns whose KV is at hand: a beginning is taken as it is, and a turn that stands elsewhere is moved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fixtures_models import Models
from plain_kit import BEES, HARBOUR, NOTICE, QUESTION, PlainSite, turns

from serving.engine.types import Message, Outcome
from storage.kvstore import KVStore

LONG = tuple(f"{text} And again: {text}" for text in ("Forty euros until dusk, says the ferry.", "The device is at the hive."))
TALK = (f"First: {QUESTION}", LONG[0], f"Then who repairs the device? {LONG[1]}", LONG[1], "And the bees, do they move?")


@pytest.fixture
def talk(tiny_models: Models, tmp_path: Path) -> Iterator[PlainSite]:
    site = PlainSite(tiny_models.reader("llama"), tmp_path / "kv", blended_bytes=64 << 20, canary_share=1.0)
    yield site
    site.engine.close()


def distance(site: PlainSite, answered: int) -> float:
    """Sum of the KL of the first `answered` answers that reused anything, from full prefill."""
    import time

    end = time.monotonic() + 120
    while site.engine.canary_totals()[0] < answered:
        assert time.monotonic() < end
        time.sleep(0.01)
    return site.engine.canary_totals()[1]


def counts(outcome: Outcome) -> tuple[int, int]:
    return outcome.report.tokens_prefix, outcome.report.tokens_moved


def test_a_conversation_that_goes_on_computes_its_new_turn_only(talk: PlainSite) -> None:
    first = talk.ask(*TALK[:1], known=())
    second = talk.ask(*TALK[:3], known=())
    assert counts(first) == (0, 0)
    report = second.report
    assert report.tokens_prefix >= first.prompt_tokens - 1
    assert (report.tokens_moved, report.tokens_recomputed) == (0, 0)
    assert report.tokens_computed == second.prompt_tokens - report.tokens_prefix
    assert second.text == talk.ask(*TALK[:3], method="full").text


def test_a_beginning_is_exact_to_the_token(talk: PlainSite) -> None:
    """What was computed in full is what a full prefill would give, whatever follows."""
    talk.ask(*TALK, known=())
    assert talk.ask(*TALK, known=()).report.tokens_computed == 1  # the last token, for its logits
    changed = (*TALK[:4], TALK[4][:20] + " with their wings, or how?")
    outcome = talk.ask(*changed, known=())
    whole = talk.reader.tokenizer.encode(changed[4])
    assert outcome.report.tokens_computed < len(whole) + 8
    assert outcome.report.tokens_recomputed == 0
    assert distance(talk, 2) < 1e-6


def test_what_was_answered_is_part_of_the_beginning(talk: PlainSite) -> None:
    first = talk.ask(*TALK[:1], known=())
    second = talk.ask(TALK[0], first.text, TALK[2], known=())
    again = talk.reader.tokenizer.encode(first.text)
    if second.report.tokens_prefix < first.prompt_tokens + len(again) - 1:  # it may be read in other tokens than it was written
        assert talk.reader.tokenizer.decode(again) == first.text
        assert len(again) != first.completion_tokens
    assert second.report.tokens_prefix >= first.prompt_tokens - 1


def test_a_trimmed_history_moves_the_turns_that_are_left(talk: PlainSite) -> None:
    system = Message("system", "Be brief, and answer from the device.")
    talk.say((system, *turns(*TALK)), known=())
    trimmed = talk.say((system, *turns(*TALK[2:])), known=())
    report = trimmed.report
    assert report.tokens_prefix > 0
    own = [len(talk.reader.tokenizer.encode(text)) for text in (TALK[2], TALK[3])]
    assert report.tokens_moved == sum(own)
    assert 0 < report.tokens_recomputed < report.tokens_moved
    assert report.tokens_computed < trimmed.prompt_tokens - report.tokens_prefix - sum(own) + 1
    # The next turn of the trimmed history begins like it, and is not moved again.
    after = talk.say((system, *turns(*TALK[2:], "They do, all winter.", "Who?")), known=())
    assert after.report.tokens_prefix >= trimmed.prompt_tokens - 1
    assert (after.report.tokens_moved, after.report.tokens_recomputed) == (0, 0)


def test_moved_turns_are_near_full_prefill_and_turned_by_the_right_angle(talk: PlainSite) -> None:
    """Moved turns alone, with the tokens that are not moved computed, are nearer to full prefill than unmoved K would be."""
    system = Message("system", "Be brief, and answer from the device.")
    talk.say((system, *turns(*TALK)), known=())
    talk.say((system, *turns(*TALK[2:])), known=())
    right = distance(talk, 1)
    assert 0 < right < 1.0
    place = talk.reader.rope.unplace
    try:
        talk.reader.rope.unplace = lambda k, positions: k  # type: ignore[method-assign]
        talk.engine.forget([])
        talk.say((system, Message("user", "Elsewhere."), Message("assistant", LONG[0]), *turns(*TALK[2:])), known=())
    finally:
        talk.reader.rope.unplace = place  # type: ignore[method-assign]
    assert distance(talk, 2) - right > 2 * right


def test_turns_in_another_order_are_moved(talk: PlainSite) -> None:
    talk.ask(HARBOUR, LONG[0], BEES, LONG[1], QUESTION, known=())
    outcome = talk.ask(BEES, LONG[1], HARBOUR, LONG[0], QUESTION, known=())
    moved = sum(len(talk.reader.tokenizer.encode(text)) for text in (HARBOUR, BEES, LONG[0], LONG[1]))
    assert outcome.report.tokens_moved == moved


def test_a_turn_that_was_edited_is_not_moved(talk: PlainSite) -> None:
    talk.ask(HARBOUR, LONG[0], QUESTION, known=())
    outcome = talk.ask("Hello.", LONG[1], HARBOUR.replace("forty", "fifty"), LONG[0], QUESTION, known=())
    assert outcome.report.tokens_moved == len(talk.reader.tokenizer.encode(LONG[0]))


def test_a_turn_that_begins_like_another_one_is_moved_whole(talk: PlainSite) -> None:
    """The beginning they share is not taken instead."""
    talk.ask(f"Listen: {HARBOUR}", LONG[0], f"Listen: {BEES}", LONG[1], QUESTION, known=())
    outcome = talk.ask(f"Listen: {BEES}", LONG[1], QUESTION, known=())
    assert outcome.report.tokens_computed > len(talk.reader.tokenizer.encode(QUESTION))
    moved = sum(len(talk.reader.tokenizer.encode(text)) for text in (f"Listen: {BEES}", LONG[1]))
    assert outcome.report.tokens_moved == moved


def test_nobody_is_given_turns_of_another_asker(talk: PlainSite) -> None:
    talk.ask(*TALK, known=(), scope="me")
    assert counts(talk.ask(*TALK, known=(), scope="you")) == (0, 0)
    assert counts(talk.ask(*TALK, known=(), scope="")) == (0, 0)
    assert counts(talk.ask(*TALK, known=(), scope="me"))[0] > 0


@pytest.mark.parametrize("method", ["full", "reuse", "question:0.2"])
def test_methods_for_comparison_neither_take_nor_keep_turns(method: str, talk: PlainSite) -> None:
    talk.ask(*TALK, known=(), method=method)
    assert counts(talk.ask(*TALK, known=())) == (0, 0)
    assert counts(talk.ask(*TALK, known=(), method=method)) == (0, 0)


def test_a_turn_that_held_a_deleted_chunk_is_forgotten(talk: PlainSite) -> None:
    talk.ask("Hello, who is there?", LONG[0], f"Read: {HARBOUR}", LONG[1], QUESTION)
    key = str(talk.chunks[0].kv_key)
    assert talk.engine.keys_in_memory() == {key}
    KVStore(talk.objects).delete([key])
    talk.engine.forget([key])
    assert talk.engine.keys_in_memory() == set()
    outcome = talk.ask("Hello, who is there?", LONG[0], f"Read: {HARBOUR}", LONG[1], QUESTION, known=())
    own = sum(len(talk.reader.tokenizer.encode(text)) for text in (f"Read: {HARBOUR}", LONG[1], QUESTION))
    assert outcome.report.tokens_computed >= own
    assert outcome.report.tokens_prefix > 0  # what stood before it has not seen it


def test_a_chunk_in_the_beginning_is_neither_fetched_nor_blended_again(talk: PlainSite) -> None:
    first = talk.ask(f"Read: {HARBOUR}\n\n{QUESTION}")
    second = talk.ask(f"Read: {HARBOUR}\n\n{QUESTION}", LONG[0], f"Now read this: {NOTICE}\n\nWho says that?")
    assert [t.chunk_id for t in first.report.in_text] == [0]
    assert [t.chunk_id for t in second.report.in_text] == [2]
    assert second.report.tokens_prefix >= first.prompt_tokens - 1


def test_the_room_is_bounded_and_the_beginning_stays_longest(tiny_models: Models, tmp_path: Path) -> None:
    reader = tiny_models.reader("llama")
    room = 150 * reader.buffer(1).nbytes
    site = PlainSite(reader, tmp_path / "kv", blended_bytes=room)
    system = Message("system", "Be brief, and answer from the device.")
    for number in range(4):
        site.say((system, *turns(f"{number} {HARBOUR}", LONG[0], QUESTION)), known=())
        held = sum(entry.kv.nbytes for entry in site.engine._blended._entries.values())
        assert 0 < held <= room
    outcome = site.say((system, *turns("Something else.")), known=())
    site.engine.close()
    assert outcome.report.tokens_prefix >= len(reader.tokenizer.encode(system.content))


def test_kept_turns_hold_no_more_memory_than_their_own(talk: PlainSite) -> None:
    talk.ask(*TALK, known=())
    for entry in talk.engine._blended._entries.values():
        assert entry.kv.untyped_storage().nbytes() == entry.kv.nbytes
    assert torch.isfinite(torch.cat([e.kv.flatten() for e in talk.engine._blended._entries.values()])).all()
