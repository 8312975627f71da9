"""The engine: many answers at once, each as if it were alone, whatever its stored KV does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import LENGTHS, EngineSite, drain
from fixtures_models import CONFIGS, Models, retrieved, save_model
from transformers import AutoModelForCausalLM

from precompute.gate import check_model
from precompute.reader import Reader
from serving.engine import loading
from serving.engine.text import TextStream
from serving.engine.torch_engine import TorchGeneration
from serving.engine.types import Message, Outcome
from serving.prompt import plan_prompt
from storage.errors import Overloaded, PrereadError, Stopping, UserError
from storage.kvstore import KVStore


@pytest.fixture
def site(engine_site: EngineSite) -> EngineSite:
    return engine_site


# --- answers ------------------------------------------------------------------------------------------------------------


def test_answers_made_at_once_are_those_made_alone(site: EngineSite) -> None:
    requests = [
        site.request(f"Question {n}?", method=method, chunks=chunks)
        for n, (method, chunks) in enumerate(
            [
                ("default", site.chunks),
                ("reuse", site.chunks[::-1]),
                ("full", site.chunks),
                ("epic:4", (site.chunks[0],) * 2),
                ("cacheblend:0.2", site.chunks[:2]),
                ("question:0.3", site.chunks),
                ("reuse", ()),
                ("reuse", site.chunks[1:]),
                ("full", ()),
                ("default", site.chunks),
            ]
        )
    ]
    alone = [site.answers(r)[0] for r in requests]
    together = site.answers(*requests)
    assert [o.text for o in together] == [o.text for o in alone]
    assert len({o.text for o in alone}) > 5


@pytest.mark.parametrize("method", ["default", "reuse", "full", "epic:4", "cacheblend:0.2", "question:0.3"])
def test_the_report_adds_up_and_names_what_was_not_reused(method: str, site: EngineSite) -> None:
    pending = retrieved(7, (55,) * 20)
    outcome = site.answer(method=method, chunks=(*site.chunks, pending))
    report = outcome.report
    assert report.tokens_reused + report.tokens_recomputed + report.tokens_computed == outcome.prompt_tokens
    assert report.chunks == 4
    assert [c.chunk_id for c in outcome.used_chunks] == [0, 1, 2, 7]
    reasons = {c.chunk_id: c.reason for c in report.not_reused}
    assert reasons == (dict.fromkeys([0, 1, 2, 7], "method") if method == "full" else {7: "pending"})
    tiers = {c.chunk_id: c.tier for c in report.reused}
    assert tiers == ({} if method == "full" else dict.fromkeys([0, 1, 2], "store"))
    assert (report.bytes_fetched > 0) == (method != "full")
    assert set(report.ms) == {"plan", "queue", "fetch", "assemble", "blend", "first_token"}
    assert report.full_prefill_reason is None


@pytest.mark.parametrize("method", ["default", "reuse", "full", "epic:4", "cacheblend:0.2", "question:0.3"])
def test_a_grounded_prompt_without_a_chunk_is_answered_within_its_frame(method: str, site: EngineSite) -> None:
    bare = site.answer(method=method, chunks=(), grounded=False)
    outcome = site.answer(method=method, chunks=(), grounded=True)
    frame = len(site.reader.format.frame)
    assert outcome.prompt_tokens > max(frame, bare.prompt_tokens)
    assert outcome.text == site.answer(method="full", chunks=(), grounded=True).text != bare.text
    assert outcome.report.tokens_computed + outcome.report.tokens_reused == outcome.prompt_tokens
    assert (outcome.used_chunks, outcome.report.chunks) == ((), 0)


def test_bad_requests_are_refused_at_once(site: EngineSite) -> None:
    async def refused() -> None:
        with pytest.raises(UserError, match="unknown method"):
            site.engine.submit(site.request(method="magic"))
        with pytest.raises(UserError) as caught:
            site.engine.submit(site.request("word " * 3000))
        assert caught.value.code == "context_length_exceeded"

    asyncio.run(refused())


# --- sampling, stop, text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["full", "default"])
def test_a_text_to_go_on_with_may_be_of_a_few_tokens(method: str, site: EngineSite) -> None:
    outcome = site.answer(messages=(), chunks=(), prompt="Once", method=method)
    assert outcome.prompt_tokens == len(site.reader.tokenizer.encode("Once")) < 16
    assert outcome.report.tokens_computed == outcome.prompt_tokens


def test_equal_seeds_give_equal_answers(site: EngineSite) -> None:
    requests = [site.request(temperature=1.0, seed=seed) for seed in (3, 3, 4)]
    one, again, other = site.answers(*requests)
    assert one.text == again.text != other.text
    assert site.answers(requests[0])[0].text == one.text
    assert site.answer(temperature=1.0, top_p=0.0, seed=9).text == site.answer().text


def test_a_stop_sequence_is_met_across_tokens(site: EngineSite) -> None:
    whole = site.answer(max_tokens=60)
    assert (whole.finish_reason, whole.completion_tokens) == ("length", 60)
    at, stop = next(
        (at, whole.text[at : at + 5])
        for at in range(8, len(whole.text) - 5)
        if whole.text[at : at + 5].isascii() and whole.text.find(whole.text[at : at + 5]) == at
    )
    cut = site.answer(max_tokens=60, stop=("never there", stop))
    assert (cut.text, cut.finish_reason) == (whole.text[:at], "stop")
    assert cut.completion_tokens < 60


def stream_of(reader: Reader, text: str, stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    """`text` fed byte by byte: the finest cut into tokens there is."""
    stream = TextStream(reader.tokenizer.decode, stop)
    byte_tokens = [reader.tokenizer.template.convert_tokens_to_ids(c) for c in byte_level(text)]
    assert reader.tokenizer.decode(byte_tokens) == text
    pieces = [stream.feed(i) for i in byte_tokens]
    return [*pieces, stream.finish()], stream


def byte_level(text: str) -> str:
    from tokenizers.pre_tokenizers import ByteLevel

    return "".join(piece for piece, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(text))


def test_a_character_is_never_cut(site: EngineSite) -> None:
    text = "naïve 🐝 hives, 日本語 and 👩‍🚀."
    pieces, stream = stream_of(site.reader, text)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == stream.text == text
    pieces, stream = stream_of(site.reader, "a real \ufffd stays\ufffd")
    assert stream.text == "a real \ufffd stays\ufffd"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one tw", ["two"], "one tw"),
        ("one 🐝🐝 two", ["🐝🐝"], "one "),
        ("aaab", ["aab"], "a"),
        ("one two", ["two", "one"], ""),
        ("abc", [""], "abc"),
        ("x END", ["ENDE", "ND"], "x E"),
    ],
)
def test_nothing_of_a_stop_sequence_is_sent(text: str, stop: list[str], expected: str, site: EngineSite) -> None:
    pieces, stream = stream_of(site.reader, text, stop)
    assert "".join(pieces) == stream.text == expected
    assert stream.stopped == (expected != text)


# --- cancel, load, close --------------------------------------------------------------------------------------------


@pytest.fixture
def slow_forward(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every forward pass takes 50 ms more; the times at which one began."""
    begun: list[float] = []
    forward = Reader.forward

    def slow(self: Reader, *arguments: Any, **named: Any) -> Any:
        begun.append(time.monotonic())
        time.sleep(0.05)
        return forward(self, *arguments, **named)

    monkeypatch.setattr(Reader, "forward", slow)
    return begun


async def cancelled_within_a_second(generation: TorchGeneration) -> None:
    generation.cancel()
    begun = time.monotonic()
    with pytest.raises(PrereadError) as caught:
        async for _ in generation:
            pass
    assert caught.value.code == "cancelled"
    assert time.monotonic() - begun < 1
    assert generation.outcome is None


def test_cancel_ends_a_prefill(site: EngineSite, slow_forward: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precompute.reader.PIECE", 4)

    async def cancel() -> None:
        generation = site.engine.submit(site.request("word " * 300, method="full"))
        await asyncio.sleep(0.3)
        assert slow_forward
        await cancelled_within_a_second(generation)
        await asyncio.sleep(0.15)
        passes = len(slow_forward)
        await asyncio.sleep(0.3)
        assert len(slow_forward) == passes

    asyncio.run(cancel())


def test_cancel_ends_decoding(site: EngineSite, slow_forward: list[float]) -> None:
    async def cancel() -> None:
        generation = site.engine.submit(site.request(max_tokens=400))
        async for _ in generation:
            break
        generation.cancel()
        await asyncio.sleep(0.15)
        passes = len(slow_forward)
        await asyncio.sleep(0.3)
        assert len(slow_forward) == passes

    asyncio.run(cancel())


def test_what_is_cut_off_has_cost_its_prompt_and_what_was_written(site: EngineSite, slow_forward: list[float]) -> None:
    async def cut() -> None:
        generation = site.engine.submit(site.request(max_tokens=400))
        assert generation.so_far() is None, "nobody has begun with it"
        said = 0
        async for _ in generation:
            said += 1
            if said == 3:
                break
        generation.cancel()
        cost = generation.so_far()
        assert cost is not None
        assert cost.prompt_tokens == generation.plan.tokens
        assert 3 <= cost.completion_tokens < 100
        assert cost.used_chunks == generation.plan.chunks

    asyncio.run(cut())


def test_cancel_ends_a_request_whose_kv_does_not_come(site: EngineSite) -> None:
    site.objects.gate.clear()

    async def cancel() -> None:
        generation = site.engine.submit(site.request())
        await asyncio.sleep(0.1)
        await cancelled_within_a_second(generation)

    asyncio.run(cancel())


def test_a_full_queue_refuses_and_takes_up_again(tiny_models: Models, tmp_path: Path) -> None:
    site = EngineSite(tiny_models.reader("qwen3"), tmp_path / "kv", max_requests=1)
    site.objects.gate.clear()

    async def crowd() -> None:
        waiting = [site.engine.submit(site.request()) for _ in range(5)]
        with pytest.raises(Overloaded):
            site.engine.submit(site.request())
        site.objects.gate.set()
        outcomes = await asyncio.gather(*map(drain, waiting))
        assert len({o.text for o in outcomes}) == 1
        for _ in range(100):  # the last one leaves the queue a moment after its answer
            try:
                await drain(site.engine.submit(site.request()))
                break
            except Overloaded:
                await asyncio.sleep(0.01)

    try:
        asyncio.run(crowd())
    finally:
        site.engine.close()


def test_cancelled_requests_make_room(tiny_models: Models, tmp_path: Path, slow_forward: list[float]) -> None:
    """Those that wait behind a long answer as well."""
    site = EngineSite(tiny_models.reader("qwen3"), tmp_path / "kv", max_requests=1)

    async def crowd() -> None:
        long = site.engine.submit(site.request(max_tokens=400))
        waiting = [site.engine.submit(site.request()) for _ in range(4)]
        await asyncio.sleep(0.5)
        for generation in waiting:
            await cancelled_within_a_second(generation)
        await asyncio.sleep(0.3)
        site.engine.submit(site.request()).cancel()
        long.cancel()

    try:
        asyncio.run(crowd())
    finally:
        site.engine.close()


def test_closing_ends_what_runs(tiny_models: Models, tmp_path: Path, slow_forward: list[float]) -> None:
    site = EngineSite(tiny_models.reader("qwen3"), tmp_path / "kv", max_requests=1)

    async def close() -> None:
        running = [site.engine.submit(site.request(max_tokens=400)) for _ in range(3)]
        await asyncio.sleep(0.2)
        await asyncio.to_thread(site.engine.close)
        for generation in running:
            with pytest.raises(PrereadError):
                await asyncio.wait_for(drain(generation), 2)

    asyncio.run(close())


def test_an_engine_that_is_to_end_refuses_what_waits_and_finishes_what_it_answers(
    tiny_models: Models, tmp_path: Path, slow_forward: list[float]
) -> None:
    site = EngineSite(tiny_models.reader("qwen3"), tmp_path / "kv", max_requests=1)

    async def end() -> None:
        begun = site.engine.submit(site.request(max_tokens=20))
        async for _ in begun:
            break
        waiting = [site.engine.submit(site.request()) for _ in range(3)]
        site.engine.drain()
        with pytest.raises(Stopping):
            site.engine.submit(site.request())
        for generation in waiting:
            with pytest.raises(Stopping):
                await asyncio.wait_for(drain(generation), 10)
        assert len([delta async for delta in begun]) > 1
        assert begun.outcome is not None

    try:
        asyncio.run(end())
    finally:
        site.engine.close()


def test_an_engine_ends_what_takes_too_long_for_a_process_that_is_to_end(
    tiny_models: Models, tmp_path: Path, slow_forward: list[float]
) -> None:
    site = EngineSite(tiny_models.reader("qwen3"), tmp_path / "kv", max_requests=1)

    async def end() -> None:
        begun = site.engine.submit(site.request(max_tokens=400))
        async for _ in begun:
            break
        site.engine.drain()
        site.engine.abandon()
        with pytest.raises(Stopping):
            await asyncio.wait_for(drain(begun), 10)
        await asyncio.sleep(0.3)
        passes = len(slow_forward)
        await asyncio.sleep(0.3)
        assert len(slow_forward) == passes

    try:
        asyncio.run(end())
    finally:
        site.engine.close()


# --- stored KV that fails -------------------------------------------------------------------------------------------


def test_damaged_and_deleted_kv_is_named_and_computed(site: EngineSite) -> None:
    """With nothing left to reuse, the answer is that of a full prefill."""
    expected = site.answer(method="full").text
    flipped = site.path(0)
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    site.path(1).unlink()
    some = site.answer().report
    assert {c.chunk_id: c.reason for c in some.not_reused} == {0: "damaged", 1: "absent"}
    assert some.tokens_computed >= LENGTHS[0] + LENGTHS[1]
    site.path(2).write_bytes(site.path(2).read_bytes()[:-64])
    for method in ("reuse", "default", "cacheblend:0.1", "epic:3"):
        outcome = site.answer(method=method)
        assert [c.chunk_id for c in outcome.report.not_reused] == [0, 1, 2]
        assert outcome.text == expected


def test_kv_of_other_tokens_is_not_used(site: EngineSite) -> None:
    """A key that names another chunk's record: the ids decide."""
    first, second, _ = site.chunks
    outcome = site.answer(chunks=(replace(first, kv_key=second.kv_key),))
    assert [c.reason for c in outcome.report.not_reused] == ["wrong_key"]
    assert outcome.text == site.answer(chunks=(first,), method="full").text


def test_a_store_that_stalls_is_not_waited_for(site: EngineSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here patience is longer than the deadline of a fetch; see test_late.py for the other case."""
    monkeypatch.setattr(loading, "DEADLINE_S", 0.2)
    site.objects.gate.clear()
    outcome = site.answer()
    assert [c.reason for c in outcome.report.not_reused] == ["timeout"] * 3
    site.objects.gate.set()
    assert outcome.text == site.answer(method="full").text


def test_a_store_that_raises_costs_no_answer(site: EngineSite, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(KVStore, "get_many", broken)
    outcome = site.answer()
    assert len(outcome.report.not_reused) == 3
    assert outcome.text == site.answer(method="full").text


# --- models that are not blended ----------------------------------------------------------------------------------------


def served_by_full_prefill(site: EngineSite) -> None:
    """The reason is told, and the answer is that of the model's own generate()."""
    reader = site.reader
    own = AutoModelForCausalLM.from_pretrained(reader.folder, dtype=torch.float32)
    request = site.request(method="default")
    plan = plan_prompt(reader.format, request.messages, request.chunks, reader.max_positions, request.max_tokens)
    ids = list(plan.frame)
    for label, chunk in zip(plan.labels, plan.chunks, strict=True):
        ids += [*label, *chunk.token_ids]
    ids += plan.tail
    prompt = torch.tensor([ids])
    made = own.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False,
        eos_token_id=sorted(reader.stop_ids), pad_token_id=0,
    )  # fmt: skip
    outcome = site.answers(request)[0]
    assert outcome.text == reader.tokenizer.decode(made[0, len(ids) :].tolist())
    assert outcome.report.full_prefill_reason == site.engine.full_prefill_reason is not None
    assert {c.reason for c in outcome.report.not_reused} == {"model"}
    assert outcome.report.tokens_computed == outcome.prompt_tokens == len(ids)


def test_a_windowed_model_answers_by_full_prefill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.engine.sessions.PIECE", 64)  # pieces longer than the window
    common = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = CONFIGS["mistral"](
        **common, intermediate_size=96, max_position_embeddings=512, sliding_window=32, initializer_range=0.2
    )
    site = EngineSite(Reader(save_model(tmp_path / "windowed", config), dtype="float32"), tmp_path / "kv")
    served_by_full_prefill(site)
    site.engine.close()


def test_a_model_that_fails_the_gate_answers_by_full_prefill(tiny_models: Models, tmp_path: Path) -> None:
    reader = Reader(tiny_models.folder("cohere"), dtype="float32", filler=1)
    check_model(reader)
    site = EngineSite(reader, tmp_path / "kv")
    served_by_full_prefill(site)
    site.engine.close()


def test_a_blended_models_full_prefill_is_generate_too(site: EngineSite) -> None:
    own = AutoModelForCausalLM.from_pretrained(site.reader.folder, dtype=torch.float32)
    plan = plan_prompt(site.reader.format, [Message("user", "Hello?")], [], 2048, 16)
    prompt = torch.tensor([plan.tail])
    made = own.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False,
        eos_token_id=sorted(site.reader.stop_ids), pad_token_id=0,
    )  # fmt: skip
    expected = site.reader.tokenizer.decode(made[0, len(plan.tail) :].tolist())
    assert site.answer(question="Hello?", chunks=()).text == expected


def test_a_prepared_prompt_is_not_planned_again(site: EngineSite, monkeypatch: pytest.MonkeyPatch) -> None:
    request = site.request()
    prepared = site.engine.prepare(request)
    expected = site.answers(request)[0]
    monkeypatch.setattr("serving.engine.planner.plan_prompt", lambda *_: pytest.fail("planned on the event loop"))

    async def choices() -> list[Outcome]:
        return [await drain(site.engine.submit(request, prepared)) for _ in range(2)]

    assert [each.text for each in asyncio.run(choices())] == [expected.text] * 2
