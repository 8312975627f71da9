"""Stored chunks in the caller's own text: found to the token, placed where they stand, and nothing else changed."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fixtures_models import FAMILIES, Models
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_kit import BEES, HARBOUR, NOTICE, QUESTION, TEXTS, PlainSite, close, passages_in, plan_of, stored_chunk

from bench.harness import drive
from precompute.frame import Turn
from precompute.gate import check_model
from precompute.reader import Reader
from serving.blend.assembly import Segment, assemble
from serving.blend.methods import default, parse_method
from serving.engine.conversations import KeptTurn, Recalled
from serving.engine.plain import plain_segments
from serving.passages import find_passages
from storage.anchors import SHORTEST
from storage.kvstore import KVStore
from storage.types import KVRecord

AROUND = f"Read this:\n\n{HARBOUR}\n\nand this:\n{BEES}\n\n{QUESTION}"


@pytest.fixture
def llama(tiny_models: Models) -> Reader:
    return tiny_models.reader("llama")


@pytest.fixture
def plain(tiny_models: Models, tmp_path: Path) -> Iterator[PlainSite]:
    site = PlainSite(tiny_models.reader("llama"), tmp_path / "kv")
    yield site
    site.engine.close()


# --- the prompt stays the caller's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["question:1.0", "cacheblend:1.0"])
def test_recomputing_everything_equals_full_prefill_of_the_plain_prompt(
    method: str, family: str, tiny_models: Models
) -> None:
    reader = tiny_models.reader(family)
    plan, found = passages_in(reader, AROUND, stored_chunk(reader, 0, HARBOUR), stored_chunk(reader, 1, BEES))
    assert len(found) == 2
    ids = tuple(reader.format.plain([Turn("user", AROUND)]))
    kv = [reader.compile([p.chunk.token_ids])[0][:, :, :, p.skip : p.skip + p.end - p.start] for p in found]
    segments = plain_segments(plan, Recalled(), found, kv)
    assert tuple(i for s in segments for i in s.ids) == ids
    whole = assemble(reader, [Segment("tail", ids)], 4)
    expected = drive(parse_method("full").blend(reader, whole))
    one = assemble(reader, segments, 4)
    assert len(one.stored) > 100
    result = drive(parse_method(method).blend(reader, one))
    assert close(result, expected)
    assert close(one.kv[:, :, :, : len(ids)], whole.kv[:, :, :, : len(ids)])
    reused = assemble(reader, segments, 4)
    assert not close(drive(parse_method("reuse").blend(reader, reused)), expected)  # guards the test itself


def test_an_answer_reports_what_it_found_in_the_text(plain: PlainSite) -> None:
    full = plain.ask(AROUND, method="full")
    outcome = plain.ask(AROUND, scope="")
    report = outcome.report
    assert outcome.prompt_tokens == full.prompt_tokens
    assert [(t.chunk_id, t.tokens > 40) for t in report.in_text] == [(0, True), (1, True)]
    assert [r.chunk_id for r in report.reused] == [0, 1]
    stored = sum(t.tokens for t in report.in_text)
    assert report.tokens_reused + report.tokens_recomputed == stored
    assert report.tokens_recomputed == round(0.25 * stored)
    assert report.bytes_fetched == stored * plain.reader.buffer(1).nbytes
    assert (outcome.used_chunks, report.chunks) == ((), 0)  # nothing to be cited: there are no labels
    assert plain.ask(AROUND, method="question:1.0").text == full.text


def test_full_prefill_on_request_reuses_nothing(plain: PlainSite) -> None:
    report = plain.ask(AROUND, method="full").report
    assert (report.tokens_reused, report.tokens_recomputed, report.in_text) == (0, 0, [])


def test_a_model_that_cannot_be_blended_answers_by_full_prefill(tiny_models: Models, tmp_path: Path) -> None:
    reader = tiny_models.reader("stablelm")
    check_model(reader)
    site = PlainSite(reader, tmp_path / "kv", blended_bytes=64 << 20)
    first, second = site.ask(AROUND), site.ask(AROUND)
    site.engine.close()
    assert first.text == second.text
    for outcome in (first, second):
        assert outcome.report.full_prefill_reason
        assert outcome.report.tokens_computed == outcome.prompt_tokens


def test_a_chunk_without_stored_kv_is_computed_and_the_reason_told(plain: PlainSite) -> None:
    KVStore(plain.objects).delete([str(plain.chunks[1].kv_key)])
    pending = stored_chunk(plain.reader, 7, HARBOUR, stored=False)
    report = plain.ask(AROUND, known=(pending, plain.chunks[1])).report
    assert {(n.chunk_id, n.reason) for n in report.not_reused} == {(7, "pending"), (1, "absent")}
    assert report.tokens_computed > 100
    assert report.tokens_reused == report.tokens_recomputed == 0


def test_of_two_chunks_with_the_same_text_the_one_with_kv_is_used(plain: PlainSite) -> None:
    pending = stored_chunk(plain.reader, 0, BEES, stored=False)
    report = plain.ask(AROUND, known=(pending, plain.chunks[1])).report
    assert [r.chunk_id for r in report.reused] == [1]


def test_a_source_that_stalls_is_not_waited_for(tiny_models: Models, tmp_path: Path) -> None:
    site = PlainSite(tiny_models.reader("llama"), tmp_path / "kv", patience_s=0.01)
    site.objects.gate.clear()
    outcome = site.ask(AROUND)
    site.objects.gate.set()
    assert {n.reason for n in outcome.report.not_reused} == {"slow"}
    assert outcome.report.tokens_computed == outcome.prompt_tokens
    assert outcome.text == site.ask(AROUND, method="full").text
    site.engine.close()


def test_each_token_has_the_kv_of_its_own_place_in_the_chunk(
    tiny_models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the beginning that an earlier prompt shares ends within the chunk."""
    monkeypatch.setattr(default, "SHARE", 0.0)
    site = PlainSite(tiny_models.reader("llama"), tmp_path / "kv", blended_bytes=64 << 20)
    site.ask(f"Read: {HARBOUR[:60]}", known=())
    report = site.ask(f"Read: {HARBOUR} {QUESTION}").report
    site.engine.close()
    [found] = report.in_text
    cut = len(site.chunks[0].token_ids) - found.tokens
    assert (found.position, cut > 5) == (report.tokens_prefix, True)
    stored = KVStore(site.objects).get(str(site.chunks[0].kv_key), site.reader.profile)
    assert isinstance(stored, KVRecord)
    [turn] = [e for e in site.engine._blended._entries.values() if isinstance(e, KeptTurn) and len(e.ids) > 100]
    at = found.position - turn.start
    assert torch.equal(turn.kv[:, 1, :, at : at + found.tokens], stored.kv[:, 1, :, cut:])
    placed = site.reader.rope.place(stored.kv[:, 0, :, cut:], torch.arange(found.position, found.position + found.tokens))
    assert close(turn.kv[:, 0, :, at : at + found.tokens], placed)


# --- hostile near-matches ---------------------------------------------------------------------------------------------


def text_of(reader: Reader, text: str, number: int = 0) -> str:
    """The text of passage `number` of those that are found of TEXTS."""
    chunks = [stored_chunk(reader, n, each) for n, each in enumerate(TEXTS)]
    plan, found = passages_in(reader, text, *chunks)
    return reader.tokenizer.decode(plan.tail[found[number].start : found[number].end])


def test_one_changed_character_ends_the_reuse_there(llama: Reader) -> None:
    changed = BEES.replace("14 days", "41 days")
    found = text_of(llama, f"Look: {changed} {QUESTION}")
    assert changed.startswith(found)
    assert len(found) == pytest.approx(changed.index("41"), abs=2)


def test_a_change_near_the_start_leaves_nothing(llama: Reader) -> None:
    changed = BEES.replace("thirty-five", "thirty-nine")
    _, found = passages_in(llama, f"Look: {changed} {QUESTION}", stored_chunk(llama, 0, BEES))
    assert found == ()


def test_of_a_chunk_cut_in_half_the_first_half_is_used_and_the_second_is_not(llama: Reader) -> None:
    """What stands behind has read what the prompt does not hold."""
    words = HARBOUR.split(" ")
    first, second = " ".join(words[: len(words) * 2 // 3]), " ".join(words[len(words) // 3 :])
    assert first.startswith(text_of(llama, f"Look: {first}"))
    _, found = passages_in(llama, f"Look: {second}", stored_chunk(llama, 0, HARBOUR))
    assert found == ()


def test_a_chunk_that_stands_twice_is_placed_twice(plain: PlainSite) -> None:
    report = plain.ask(f"{HARBOUR}\n\n{HARBOUR}\n\n{QUESTION}").report
    assert [t.chunk_id for t in report.in_text] == [0, 0]
    assert report.in_text[0].position + report.in_text[0].tokens <= report.in_text[1].position
    twice = f"{HARBOUR}\n\n{HARBOUR}\n\n{QUESTION}"
    assert plain.ask(twice, method="question:1.0").text == plain.ask(twice, method="full").text


def test_special_tokens_in_a_text_are_text(llama: Reader) -> None:
    plan, found = passages_in(llama, f"Look: {NOTICE}\n{QUESTION}", stored_chunk(llama, 0, NOTICE))
    assert "<|im_end|>" in llama.tokenizer.decode(plan.tail[found[0].start : found[0].end])
    special = set(llama.tokenizer.encode_control("<|im_end|><|im_start|>"))
    assert not special & set(plan.tail[found[0].start : found[0].end])


def test_no_passage_reaches_from_one_turn_into_the_next(llama: Reader) -> None:
    whole = stored_chunk(llama, 0, HARBOUR)
    ids = llama.tokenizer.encode(HARBOUR)
    cut = len(ids) - 20
    parts = llama.tokenizer.decode(ids[:cut]), llama.tokenizer.decode(ids[cut:])
    # A chunk that would match if the turns' tokens were read on without a stop.
    plan = plan_of(llama, parts[0], parts[1], QUESTION)
    across = replace(whole, token_ids=plan.tail[plan.turns[0].text : plan.turns[1].end])
    found = find_passages(plan, [across], llama.tokenizer.decode)
    assert [(p.start, p.end) for p in found] == [(plan.turns[0].text, plan.turns[0].end)]


def test_a_start_that_is_cut_into_other_tokens_is_compared_by_its_characters(llama: Reader) -> None:
    """Behind a blank the first word is one token with it, in the chunk it is one without."""
    chunk = stored_chunk(llama, 0, HARBOUR.removeprefix("The "))
    plan, [found] = passages_in(llama, f"Look: {HARBOUR} {QUESTION}", chunk)
    assert found.skip > 0
    assert plan.tail[found.start : found.end] == chunk.token_ids[found.skip : found.skip + found.end - found.start]
    for other in ("wherry", "Ferry", ""):
        changed = HARBOUR.replace("The ferry", f"The {other}")
        assert passages_in(llama, f"Look: {changed} {QUESTION}", chunk)[1] == ()


WORDS = st.lists(st.sampled_from([*HARBOUR.split(" "), "\n", "<|im_end|>", "é", "…"]), max_size=60).map(" ".join)


@settings(max_examples=60)
@given(before=WORDS, after=WORDS, chunk=st.sampled_from(TEXTS), cut=st.integers(0, 300), new=WORDS)
def test_what_is_found_is_the_chunk_from_its_start_on(
    tiny_models: Models, before: str, after: str, chunk: str, cut: int, new: str
) -> None:
    """Whatever stands around it, and wherever it was edited."""
    reader = tiny_models.reader("llama")
    stored = stored_chunk(reader, 0, chunk)
    whole, edited = f"{before}{chunk}{after}", f"{before}{chunk[:cut]}{new}{chunk[cut:]}{after}"
    for text in (whole, edited):
        plan, found = passages_in(reader, text, stored)
        for p in found:
            assert plan.tail[p.start : p.end] == stored.token_ids[p.skip : p.skip + p.end - p.start]
            assert p.end - p.start >= SHORTEST - 4
            read = reader.tokenizer.decode(plan.tail[plan.turns[0].text : p.end])
            assert read.endswith(reader.tokenizer.decode(stored.token_ids[: p.skip + p.end - p.start]))
    assert passages_in(reader, f"{before}\n\n{chunk}\n\n{after}", stored)[1]


def test_the_share_that_default_computes_again_goes_by_what_is_new_or_moved_and_not_by_the_turns_before_it() -> None:
    """In a long conversation a file that was stored for another place is read as thoroughly as in a short prompt."""
    stored = torch.arange(5000, 6000)
    placed = SimpleNamespace(
        stored=stored, fresh=torch.arange(6000, 6040), spans=[(5000, 6000)], anchors=stored[:0], best=stored[:0], tail_start=6000,
        plain=True,
    )  # fmt: skip
    attention = torch.arange(6040.0)

    class Probe:
        layers = 10

        def question_attention(self, rows: int, first: int, last: int) -> Generator[None, None, torch.Tensor]:
            yield
            return attention

    assert len(drive(default.Default().choose(placed, Probe()))) == default.SHARE * len(stored)  # type: ignore[arg-type]
