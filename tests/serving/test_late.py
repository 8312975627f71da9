"""Stored KV that comes late, or never: loading and computing meet, and nobody waits for a slow source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_kit import EngineSite
from fixtures_models import FAMILIES, Models
from test_blend_gates import ANSWER, BLENDING, blend, greedy, ids_of, prompt

from bench.harness import drive
from precompute.reader import PIECE, Reader
from serving.blend.assembly import Assembly, assemble
from serving.blend.late import Awaited, Late
from serving.blend.methods import parse_method
from serving.engine.loading import DEADLINE_S
from serving.engine.sessions import BlendSession
from serving.engine.types import Emphasis
from storage.types import Miss, RetrievedChunk

CHUNKS = (40, PIECE + 30, 60, 25)


@pytest.fixture(params=FAMILIES)
def reader(request: pytest.FixtureRequest, tiny_models: Models) -> Reader:
    return tiny_models.reader(request.param)


@pytest.fixture
def hasty(tiny_models: Models, tmp_path: Path) -> Iterator[EngineSite]:
    """An engine that waits for stored KV a moment only."""
    site = EngineSite(tiny_models.reader("llama"), tmp_path, patience_s=0.05)
    yield site
    site.objects.gate.set()
    site.engine.close()


class Script:
    """What has come by each time it is asked."""

    def __init__(self, *arrivals: Mapping[int, torch.Tensor | None]) -> None:
        self._left = list(arrivals)

    def __call__(self) -> Mapping[int, torch.Tensor | None]:
        return self._left.pop(0) if self._left else {}


def late_session(
    reader: Reader, method: str, script: Callable[[], Mapping[int, torch.Tensor | None]], awaited: tuple[int, ...]
) -> tuple[BlendSession, torch.Tensor]:
    """The prompt of CHUNKS whose chunks `awaited` come as the script says; the session and its first logits."""
    chosen = parse_method(method)
    segments = prompt(reader, [ids_of(n) for n in CHUNKS], missing=awaited)
    at, waiting = 0, []
    for segment in segments:
        if segment.kind == "chunk":
            number = len([s for s in segments[: segments.index(segment)] if s.kind == "chunk"])
            if number in awaited:
                waiting.append(Awaited(number, at, at + len(segment.ids)))
        at += len(segment.ids)
    assembly = assemble(reader, segments, ANSWER, stored_labels=chosen.stored_labels)
    session = BlendSession(reader, assembly, chosen, Late(waiting, script))
    return session, drive(session.start())


def same(reader: Reader, found: tuple[Assembly, torch.Tensor], expected: tuple[Assembly, torch.Tensor]) -> None:
    torch.testing.assert_close(found[1], expected[1], atol=1e-3, rtol=0)
    end = found[0].tokens
    torch.testing.assert_close(found[0].kv[:, :, :, :end], expected[0].kv[:, :, :, :end], atol=1e-3, rtol=0)
    assert greedy(reader, *found) == greedy(reader, *expected)


def test_what_comes_late_is_as_good_as_if_it_had_been_there(reader: Reader) -> None:
    stored = reader.compile([ids_of(n) for n in CHUNKS])
    session, logits = late_session(reader, "reuse", Script({2: stored[2]}, {1: stored[1], 3: stored[3]}), (1, 2, 3))
    assert session.late is not None
    assert (session.late.placed, session.late.computed) == ([2, 3], [1]), "the first was being computed when it came"
    expected = blend(reader, prompt(reader, [ids_of(n) for n in CHUNKS], missing=[1]), "reuse")
    same(reader, (session.assembly, logits), expected)
    assert session.assembly.computed == 2 * len(reader.format.label(1)) + CHUNKS[1]


@pytest.mark.parametrize("method", BLENDING)
def test_if_nothing_comes_the_answer_is_full_prefills(method: str, reader: Reader) -> None:
    session, logits = late_session(reader, method, Script(), (0, 1, 2, 3))
    assert session.late is not None
    assert session.late.computed == [0, 1, 2, 3]
    whole = prompt(reader, [ids_of(n) for n in CHUNKS])
    expected = blend(reader, whole, "question:1.0")
    same(reader, (session.assembly, logits), expected)


@pytest.mark.parametrize("method", ["default", "reuse"])
def test_a_source_that_stalls_costs_its_wait_and_no_computing(
    method: str, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every row of a full prefill but the frame's is computed once, none in a pass with a mask, and in no more passes than
    there are chunks and pieces."""
    rows: list[int] = []
    passes: list[object] = []
    forward = reader.forward

    def counted(ids: torch.Tensor, positions: torch.Tensor, kv_pass: object, logits: bool = True) -> torch.Tensor | None:
        rows.extend(positions.tolist())
        passes.append(kv_pass)
        return forward(ids, positions, kv_pass, logits)  # type: ignore[arg-type]

    def nothing_yet() -> Mapping[int, torch.Tensor | None]:
        if not passes:  # all is stored that is to be, and the prompt is begun
            monkeypatch.setattr(reader, "forward", counted)
        return {}

    session, _ = late_session(reader, method, nothing_yet, (0, 1, 2, 3))
    frame = len(reader.format.frame)
    assert rows == list(range(frame, session.assembly.tokens))
    assert len(passes) <= len(CHUNKS) + session.assembly.tokens // PIECE + 1
    assert all(not getattr(each, "_groups", ()) for each in passes)
    assert [type(each).__name__ for each in passes[:-1]] == ["ContiguousPass"] * (len(passes) - 1)


@pytest.mark.parametrize("method", BLENDING)
def test_every_method_takes_up_what_was_placed_late(method: str, reader: Reader) -> None:
    """A chunk that turns out missing is computed by the method, as if it had been missing from the first."""
    stored = reader.compile([ids_of(n) for n in CHUNKS])
    session, logits = late_session(reader, method, Script({1: stored[1], 2: None, 3: stored[3]}), (1, 2, 3))
    assert session.late is not None
    assert (session.late.placed, session.late.computed) == ([1, 3], [])
    assert bool(torch.isfinite(logits).all())
    assert not session.assembly.kv[:, :, :, : session.assembly.tokens].isnan().any()
    if not parse_method(method).stored_labels:  # labels of late chunks are computed; others take theirs from what is stored
        expected = blend(reader, prompt(reader, [ids_of(n) for n in CHUNKS], missing=[2]), method)
        same(reader, (session.assembly, logits), expected)


# --- through the engine -----------------------------------------------------------------------------------------------


def test_a_source_that_stalls_is_not_waited_for(hasty: EngineSite) -> None:
    """The gate stays shut until the whole answer is there."""
    hasty.objects.gate.clear()
    outcome = hasty.answer()
    assert not hasty.objects.gate.is_set()
    assert [(c.chunk_id, c.reason) for c in outcome.report.not_reused] == [(0, "slow"), (1, "slow"), (2, "slow")]
    hasty.objects.gate.set()
    assert outcome.text == hasty.answer(method="full").text
    report = outcome.report
    frame = len(hasty.reader.format.frame)
    assert (report.tokens_reused, report.bytes_fetched) == (frame, 0)
    assert report.tokens_computed == outcome.prompt_tokens - frame


def test_what_a_slow_source_has_sent_is_used(
    hasty: EngineSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's last chunk is asked for first; the others stall."""
    last, never = hasty.path(2), threading.Event()
    read = hasty.objects.read_into

    def stalling(name: str, buffer: memoryview, offset: int = 0) -> int:
        if last.name not in name:
            never.wait(20)
        return read(name, buffer, offset)

    monkeypatch.setattr(hasty.objects, "read_into", stalling)
    monkeypatch.setattr(hasty.engine._fetcher._rates, "_fixed_s", 2.0)  # a busy machine has its time to read the one
    outcome = hasty.answer()
    never.set()
    monkeypatch.undo()
    assert [c.chunk_id for c in outcome.report.reused] == [2]
    assert [c.reason for c in outcome.report.not_reused] == ["slow", "slow"]
    assert outcome.report.bytes_fetched == hasty.reader.buffer(len(hasty.chunks[2].token_ids)).nbytes
    patient = EngineSite(hasty.reader, tmp_path)
    first, second, third = patient.chunks
    assert outcome.text == patient.answer(chunks=(unread(first), unread(second), third)).text
    patient.engine.close()


def unread(chunk: RetrievedChunk) -> RetrievedChunk:
    """The same, of which no KV is stored."""
    return replace(chunk, kv_key=None)


def test_a_chunk_is_emphasised_whether_it_comes_late_or_not(hasty: EngineSite) -> None:
    emphasis = {1: (Emphasis(1000, 1000 + 10 * len(hasty.chunks[1].token_ids), 8.0),)}
    hasty.objects.gate.clear()
    late = hasty.answer(emphasis=emphasis)
    hasty.objects.gate.set()
    assert late.report.tokens_emphasised == len(hasty.chunks[1].token_ids)
    bare = tuple(unread(chunk) for chunk in hasty.chunks)
    assert late.text == hasty.answer(chunks=bare, emphasis=emphasis).text


def test_patience_ends_for_everyone_while_all_threads_wait_for_the_source(hasty: EngineSite) -> None:
    """More requests than there are threads to fetch, none of which comes back."""
    hasty.objects.gate.clear()
    threads = hasty.engine._fetcher._readers._far._max_workers
    for _ in range(2):
        outcomes = hasty.answers(*[hasty.request(max_tokens=1)] * (threads // 2 + 1))
        # On a busy machine one or the other begins after its deadline.
        assert {c.reason for outcome in outcomes for c in outcome.report.not_reused} - {"timeout"} == {"slow"}
    assert not hasty.objects.gate.is_set()
    bare = tuple(unread(chunk) for chunk in hasty.chunks)
    assert hasty.answer(chunks=bare).report.ms["fetch"] < 1000 * DEADLINE_S


def test_what_is_not_stored_says_nothing_about_the_source(hasty: EngineSite) -> None:
    rates = hasty.engine._fetcher._rates
    for number in range(3):
        hasty.path(number).unlink()
    assert [c.reason for c in hasty.answer().report.not_reused] == ["absent"] * 3
    assert rates.load_tokens_per_s("store") is None


def test_a_reason_found_before_the_fetch_has_ended_is_the_one_reported(tiny_models: Models, tmp_path: Path) -> None:
    """One chunk's KV is still owed; the others stall until the answer is there, which was begun without them."""
    held = threading.Event()

    def why(key: str, miss: Miss) -> str:
        held.set()
        return f"{miss} but owed"

    site = EngineSite(tiny_models.reader("llama"), tmp_path, patience_s=2.0, on_miss=why)
    site.path(1).unlink()
    site.objects.gate.clear()
    outcome = site.answer()
    assert held.is_set()
    assert not site.objects.gate.is_set()
    assert [c.reason for c in outcome.report.not_reused if c.chunk_id == 1] == ["absent but owed"]
    assert [c.reason for c in outcome.report.not_reused if c.chunk_id != 1] == ["slow", "slow"]
    site.objects.gate.set()
    assert outcome.text == site.answer(method="full").text
    site.engine.close()


def test_a_miss_whose_reason_is_not_known_yet_is_not_reported_without_it(tiny_models: Models, tmp_path: Path) -> None:
    """The catalogue, which knows the reason, stalls like the store."""
    known = threading.Event()

    def why(key: str, miss: Miss) -> str:
        known.wait(20)
        return f"{miss} but owed"

    site = EngineSite(tiny_models.reader("llama"), tmp_path, patience_s=0.05, on_miss=why)
    site.path(1).unlink()
    outcome = site.answer()
    assert [(c.chunk_id, c.reason) for c in outcome.report.not_reused if c.chunk_id == 1] == [(1, "slow")]
    known.set()
    site.engine.close()


def test_the_next_answer_uses_what_came_too_late_for_the_last(tiny_models: Models, tmp_path: Path) -> None:
    site = EngineSite(tiny_models.reader("llama"), tmp_path, patience_s=0.05)
    site.objects.gate.clear()
    assert len(site.answer().report.not_reused) == 3
    site.objects.gate.set()
    end = time.monotonic() + 20
    while site.answer().report.not_reused and time.monotonic() < end:
        time.sleep(0.05)
    assert site.answer().report.not_reused == []
    site.engine.close()
