"""The engine before vLLM: what it sends, what it makes of what comes back, and what it does when nothing does."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures_models import Models
from vllm_server_kit import SECRET, SILENT_S, Trouble, VLLMServer, VLLMSite, spec_of, vllm_server, vllm_site

from precompute import reader as reader_module
from serving.connector.asked import ask
from serving.connector.plan import FIELD, Plan, Told, cache_salt
from serving.engine.torch_engine import TorchEngine
from serving.engine.types import Emphasis, GenerateRequest, Message, Shape
from serving.engine.vllm_client import VLLMClient
from storage.errors import EngineUnavailable, Overloaded, PrereadError, Stopping, UserError
from storage.folder import FolderStore
from storage.kvstore import KVStore

PLAIN = (Message("system", "Be brief."), Message("user", "Hello"), Message("assistant", "Hi"), Message("user", "And?"))
OVERHEARD = "a turn that others must not be given"


@pytest.fixture(scope="module")
def server(tiny_models: Models) -> Iterator[VLLMServer]:
    with vllm_server(tiny_models.reader("llama")) as made:
        yield made


@pytest.fixture
def vllm(server: VLLMServer, tiny_models: Models) -> Iterator[VLLMSite]:
    server.trouble, server.pause, server.well, server.told = Trouble(), 0.0, True, Told(reused=100, recomputed=35)
    server.bodies.clear(), server.plans.clear(), server.tokens.clear(), server.given_up.clear()
    with vllm_site(server, tiny_models.folder("llama"), token="key-of-vllm") as made:
        yield made


@pytest.fixture
def torch_engine(tiny_models: Models, tmp_path: Path) -> Iterator[TorchEngine]:
    made = TorchEngine(tiny_models.reader("llama"), KVStore(FolderStore(tmp_path)))
    yield made
    made.close()


def both(vllm: VLLMSite, torch_engine: TorchEngine, request: GenerateRequest) -> tuple[Any, Any]:
    """Outcome and pieces of vLLM's engine, and of the torch engine with full prefill."""

    async def ask() -> Any:
        generation = torch_engine.submit(replace(request, method="full"))
        deltas = [delta async for delta in generation]
        return generation.outcome, deltas

    return vllm.answer(request), asyncio.run(ask())


# --- the same answers as the torch engine's ---


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stop": ("e",)},
        {"stop": ("nothing that comes",)},
        {"max_tokens": 1},
        {"ignore_eos": True, "max_tokens": 30},
        {"logprobs": 3},
        {"logprobs": 0, "stop": ("a", "o")},
        {"chunks": (), "messages": PLAIN},
        {"messages": (), "chunks": (), "prompt": "The ferry leaves", "method": "full", "logprobs": 2},
        {"messages": (), "chunks": (), "prompt": (5, 6, 7, 400), "method": "full"},
    ],
    ids=str,
)  # fmt: skip
def test_text_pieces_tokens_and_usage_are_those_of_the_torch_engine(
    vllm: VLLMSite, torch_engine: TorchEngine, changes: dict[str, Any]
) -> None:
    (ours, pieces), (theirs, expected) = both(vllm, torch_engine, vllm.request(**changes))
    assert (ours.text, ours.finish_reason) == (theirs.text, theirs.finish_reason)
    assert (ours.prompt_tokens, ours.completion_tokens) == (theirs.prompt_tokens, theirs.completion_tokens)
    assert ours.used_chunks == theirs.used_chunks
    assert [piece.text for piece in pieces] == [piece.text for piece in expected]
    assert "".join(piece.text for piece in pieces) == ours.text
    for piece, other in zip(pieces, expected, strict=True):
        assert [t.bytes for t in piece.tokens] == [t.bytes for t in other.tokens]
        for token, like in zip(piece.tokens, other.tokens, strict=True):
            assert token.logprob == pytest.approx(like.logprob, abs=1e-4)
            assert [t.bytes for t in token.top] == [t.bytes for t in like.top]


# --- what is sent ---


def test_the_prompt_goes_as_exact_token_ids_and_a_signed_plan_names_each_chunk_in_its_place(vllm: VLLMSite) -> None:
    outcome, _ = vllm.answer(vllm.request())
    body, [plan] = vllm.server.bodies[0], vllm.server.plans
    assert isinstance(plan, Plan), plan
    assert len(body["prompt"]) == outcome.prompt_tokens
    assert [span.key for span in plan.spans] == [each.kv_key for each in vllm.chunks]
    for span, each in zip(plan.spans, vllm.chunks, strict=True):
        assert tuple(body["prompt"][span.start : span.end]) == each.token_ids
    assert [span.best for span in plan.spans] == [True, False, False]
    assert plan.tail_start == plan.spans[-1].end
    assert (plan.tenant, plan.group, plan.method, plan.plain) == ("tenant-a", "group-a", "default", False)
    assert plan.profile == vllm.engine.reader.profile
    assert body["cache_salt"] == cache_salt(plan)
    assert vllm.server.tokens == ["Bearer key-of-vllm"]


def test_sampling_is_said_in_full_so_that_no_generation_config_has_a_word_in_it(vllm: VLLMSite) -> None:
    changes: dict[str, Any] = {
        "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "seed": 1 << 40, "stop": ("x", "y"), "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "logit_bias": {7: -100.0},
    }  # fmt: skip
    vllm.answer(vllm.request(**changes))
    body = vllm.server.bodies[0]
    for name in ("max_tokens", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty"):
        assert body[name] == changes[name]
    assert (body["stop"], body["logit_bias"]) == (["x", "y"], {"7": -100.0})
    assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (0, 0.0, 1.0)
    assert body["stop_token_ids"] == sorted(vllm.engine.reader.stop_ids)
    assert body["add_special_tokens"] is False
    vllm.answer(vllm.request(ignore_eos=True))
    assert (vllm.server.bodies[1]["stop_token_ids"], vllm.server.bodies[1]["ignore_eos"]) == ([], True)


def test_a_schema_goes_as_the_grammar_that_the_torch_engine_uses(vllm: VLLMSite) -> None:
    shape = Shape({"type": "object", "properties": {"n": {"type": "integer"}}}, before="<t>")
    vllm.answer(vllm.request(shape=shape))
    grammar = vllm.server.bodies[0]["structured_outputs"]["grammar"]
    assert grammar.startswith('start: "<t>" value')
    assert '"n": {"type": "integer"}' in grammar
    assert '"whitespace_flexible": false' in grammar


def test_chunks_without_stored_kv_are_in_no_plan_and_full_prefill_has_none(vllm: VLLMSite) -> None:
    some = (vllm.chunks[0], replace(vllm.chunks[1], kv_key=None))
    outcome, _ = vllm.answer(vllm.request(chunks=some))
    [plan] = vllm.server.plans
    assert isinstance(plan, Plan)
    assert [span.key for span in plan.spans] == [some[0].kv_key]
    assert [(each.chunk_id, each.reason) for each in outcome.report.not_reused] == [(1, "pending")]
    full, _ = vllm.answer(vllm.request(method="full"))
    assert "kv_transfer_params" not in vllm.server.bodies[1]
    assert {each.reason for each in full.report.not_reused} == {"method"}
    vllm.answer(vllm.request(chunks=tuple(replace(each, kv_key=None) for each in vllm.chunks)))
    assert "kv_transfer_params" not in vllm.server.bodies[2]


def test_stored_chunks_in_a_plain_prompt_are_in_its_plan(vllm: VLLMSite) -> None:
    decode = vllm.engine.reader.tokenizer.decode
    known = replace(vllm.chunks[2], token_ids=tuple(vllm.engine.reader.tokenizer.encode(decode(vllm.chunks[2].token_ids))))
    text = f"Read this: {decode(known.token_ids)} Thank you for that, and now tell me what it says, in a word or two at most."
    vllm.answer(vllm.request(chunks=(), messages=(Message("user", text),), known=(known,), scope="a"))
    [plan] = vllm.server.plans
    assert isinstance(plan, Plan), plan
    assert plan.plain
    assert [span.key for span in plan.spans] == [known.kv_key]
    assert plan.tail_start == plan.spans[0].end


# --- who shares vLLM's prefix cache ---


def salts(vllm: VLLMSite, *requests: GenerateRequest) -> list[str]:
    vllm.server.bodies.clear()
    for request in requests:
        vllm.answer(request)
    return [body["cache_salt"] for body in vllm.server.bodies]


def test_blended_blocks_are_shared_by_the_same_plan_alone(vllm: VLLMSite) -> None:
    ask = vllm.request
    turns = (Message("user", "How much is a ticket?"), Message("assistant", "Forty euros."), Message("user", "And for two?"))
    same, again, goes_on, other, reordered, method, full = salts(
        vllm, ask(), ask(), ask(messages=turns), ask("Who repairs it?"), ask(chunks=vllm.chunks[::-1]),
        ask(method="cacheblend:0.5"), ask(method="full"),
    )  # fmt: skip
    assert same == again == goes_on
    assert len({same, other, reordered, method}) == 4
    assert other == full, "an order that comes again is read in full"


def test_plain_prompts_share_blocks_within_their_asker_and_completions_with_nobody(vllm: VLLMSite) -> None:
    plain = vllm.request(chunks=(), messages=(Message("user", OVERHEARD),))
    bare = GenerateRequest((), prompt="The ferry", method="full", max_tokens=2)
    mine, mine_again, theirs, one, two = salts(
        vllm, replace(plain, scope="a"), replace(plain, scope="a"), replace(plain, scope="b"), bare, bare
    )
    assert mine == mine_again
    assert len({mine, theirs, one, two}) == 4
    assert all(0 < len(salt) <= 128 and not set(salt) & set("@/\\\0") for salt in (mine, theirs, one, two))


def test_a_plain_conversation_with_stored_passages_has_a_salt_of_its_own_and_of_its_asker(vllm: VLLMSite) -> None:
    decode, encode = vllm.engine.reader.tokenizer.decode, vllm.engine.reader.tokenizer.encode
    known = tuple(replace(each, token_ids=tuple(encode(decode(each.token_ids)))) for each in vllm.chunks)
    rest = "Thank you for that, and now tell me what it says, in a word or two at most."
    texts = [f"Read this: {decode(each.token_ids)} {rest}" for each in known]
    one = vllm.request(chunks=(), messages=(Message("user", texts[2]),), known=known, scope="a")
    turns = (*one.messages, Message("assistant", "Prices."), Message("user", texts[1]))
    first, later, others, nobodys, again = salts(
        vllm, one, replace(one, messages=turns), replace(one, scope="b"), replace(one, scope=""),
        replace(one, messages=turns, scope=""),
    )  # fmt: skip
    assert all(isinstance(plan, Plan) and plan.plain for plan in vllm.server.plans)
    assert [len(plan.spans) for plan in vllm.server.plans[:2] if isinstance(plan, Plan)] == [1, 2]
    assert first == later
    assert len({first, others, nobodys, again}) == 4


# --- what is refused ---


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"emphasis": {0: (Emphasis(0, 5, 2.0),)}}, "unsupported_parameter"),
        ({"method": "nonsense"}, "invalid_request"),
        ({"logit_bias": {1 << 20: 1.0}}, "invalid_value"),
        ({"max_tokens": 5000}, "context_length_exceeded"),
        ({"shape": Shape({"type": "nonsense"})}, "invalid_json_schema"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_before_anything_is_sent(vllm: VLLMSite, changes: dict[str, Any], code: str) -> None:
    with pytest.raises(UserError) as refused:
        vllm.engine.prepare(vllm.request(**changes))
    assert refused.value.code == code
    assert not vllm.server.bodies


def test_vllm_may_serve_less_than_the_model_has(vllm: VLLMSite) -> None:
    with pytest.raises(UserError, match="takes 1024"):
        vllm.engine.prepare(vllm.request(max_tokens=1000))
    assert vllm.engine.max_model_len == 1024 < vllm.engine.reader.max_positions


# --- what is told ---


def test_the_report_says_what_the_connector_has_done_and_what_it_missed(vllm: VLLMSite) -> None:
    keys = [str(each.kv_key) for each in vllm.chunks]
    missed, tiers = {keys[1]: "absent", keys[2]: "slow"}, {keys[0]: "memory"}
    vllm.server.told = Told(reused=40, recomputed=20, missed=missed, tiers=tiers, fetch_ms=2.0, blend_ms=9.0)
    outcome, _ = vllm.answer(vllm.request())
    report = outcome.report
    assert (report.tokens_reused, report.tokens_recomputed) == (40, 20)
    assert report.tokens_reused + report.tokens_recomputed + report.tokens_computed == outcome.prompt_tokens
    assert [(each.chunk_id, each.tier) for each in report.reused] == [(0, "memory")]
    assert [(each.chunk_id, each.reason) for each in report.not_reused] == [(1, "absent"), (2, "slow")]
    assert report.ms["fetch"] == 2.0
    assert report.ms["blend"] == 9.0
    assert 0 < report.ms["first_token"]


def test_a_plan_that_the_connector_refused_reused_nothing(vllm: VLLMSite) -> None:
    vllm.server.told = Told(refused="The plan has expired.", computed=5)
    outcome, _ = vllm.answer(vllm.request())
    assert outcome.report.tokens_computed == outcome.prompt_tokens
    assert {each.reason for each in outcome.report.not_reused} == {"refused"}


def test_without_a_connector_an_answer_is_as_good_and_its_report_has_vllms_own_count(
    vllm: VLLMSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.engine.vllm.ASKED_S", 0.2)
    vllm.server.told = None
    outcome, _ = vllm.answer(vllm.request())
    assert outcome.report.tokens_reused == 7
    assert outcome.text


# --- troubles ---


@pytest.mark.parametrize("how", ["break", "error", "end"])
def test_an_answer_that_vllm_breaks_off_ends_in_a_clear_error_and_the_next_one_works(vllm: VLLMSite, how: str) -> None:
    vllm.server.trouble = Trouble(after=2, how=how)
    with pytest.raises(EngineUnavailable, match="vLLM") as failed:
        vllm.answer(vllm.request(ignore_eos=True))
    assert "secret" not in str(failed.value)
    vllm.server.trouble = Trouble()
    outcome, _ = vllm.answer(vllm.request())
    assert outcome.text


def test_silence_is_not_waited_for_without_end(server: VLLMServer, tiny_models: Models) -> None:
    server.trouble = Trouble(after=1, how="silence")
    with vllm_site(server, tiny_models.folder("llama"), silence_s=0.5) as vllm:
        with pytest.raises(EngineUnavailable) as failed:
            vllm.answer(vllm.request(ignore_eos=True))
        assert failed.value.code == "engine_timeout"


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (400, UserError, "structured outputs do not know this."),
        (401, EngineUnavailable, "VLLM_API_KEY"),
        (404, EngineUnavailable, "no longer serves"),
        (429, Overloaded, "too many"),
        (500, EngineUnavailable, "failed with 500"),
        (503, EngineUnavailable, "failed with 503"),
    ],
)
def test_each_of_vllms_refusals_is_ours(vllm: VLLMSite, status: int, kind: type[PrereadError], says: str) -> None:
    vllm.server.trouble = Trouble(status=status)
    with pytest.raises(kind) as refused:
        vllm.answer(vllm.request())
    assert says in str(refused.value)
    assert "Traceback" not in str(refused.value)


def test_vllm_that_is_not_there_is_told_before_an_answer_begins(tiny_models: Models, server: VLLMServer) -> None:
    nobody = replace(server, url="http://127.0.0.1:9")
    with vllm_site(nobody, tiny_models.folder("llama")) as vllm:
        with pytest.raises(EngineUnavailable, match=r"127\.0\.0\.1:9"):
            vllm.engine.prepare(vllm.request())
        with pytest.raises(EngineUnavailable):
            vllm.engine.check()


def test_vllm_whose_engine_has_died_is_not_well(vllm: VLLMSite) -> None:
    vllm.engine.check()
    vllm.server.well = False
    with pytest.raises(EngineUnavailable):
        vllm.engine.check()


def test_vllm_that_comes_back_under_another_name_is_asked_by_that_name(vllm: VLLMSite) -> None:
    vllm.answer(vllm.request())
    vllm.server.name = "another-name"
    with pytest.raises(EngineUnavailable):
        vllm.answer(vllm.request())
    outcome, _ = vllm.answer(vllm.request())
    assert outcome.text
    assert vllm.server.bodies[-1]["model"] == "another-name"


def test_cancelling_makes_vllm_give_the_answer_up_and_frees_its_place(vllm: VLLMSite) -> None:
    vllm.server.pause = 0.05

    async def ask() -> None:
        request = vllm.request(ignore_eos=True, max_tokens=400)
        generation = vllm.engine.submit(request, await asyncio.to_thread(vllm.engine.prepare, request))
        pieces = aiter(generation)
        await anext(pieces)
        generation.cancel()
        with pytest.raises(PrereadError, match="cancelled"):
            await exhausted(pieces)
        assert generation.outcome is None
        so_far = generation.so_far()
        assert so_far is not None
        assert 1 <= so_far.completion_tokens < 400

    asyncio.run(ask())
    assert vllm.server.given_up.wait(20)
    until(lambda: not vllm.engine._admission.live())


def test_an_answer_that_is_cancelled_while_its_connection_is_closed_is_given_up_too(vllm: VLLMSite) -> None:
    vllm.server.pause = 0.05
    asked = {"model": vllm.server.name, "prompt": [1, 2, 3], "max_tokens": 400, "stop_token_ids": [], "cache_salt": "s"}

    async def read(client: VLLMClient) -> None:
        async with client.completion(asked) as events:
            await anext(events)
            doing = asyncio.current_task()
            assert doing is not None
            doing.cancel()  # is felt where next something is waited for: by what closes

    async def ask() -> None:
        client = VLLMClient(vllm.server.url, 1)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(read(client))
        assert await asyncio.to_thread(vllm.server.given_up.wait, 5)
        await asyncio.wait_for(client.well(), 5)  # by the one connection that it may have
        await client.close()

    asyncio.run(ask())


def test_a_cancelled_answer_that_vllm_has_not_begun_is_not_waited_for(vllm: VLLMSite) -> None:
    vllm.server.trouble = Trouble(after=0, how="silence")

    async def ask() -> None:
        request = vllm.request()
        generation = vllm.engine.submit(request, await asyncio.to_thread(vllm.engine.prepare, request))
        while not vllm.server.bodies:
            await asyncio.sleep(0.01)
        generation.cancel()
        with pytest.raises(PrereadError, match="cancelled"):
            await exhausted(aiter(generation))

    asyncio.run(ask())
    until(lambda: not vllm.engine._admission.live(), SILENT_S / 2)


def test_a_stop_sequence_that_vllm_has_not_seen_ends_its_work_too(vllm: VLLMSite) -> None:
    vllm.server.pause = 0.05
    text = vllm.answer(vllm.request(ignore_eos=True))[0].text
    outcome, _ = vllm.answer(vllm.request(ignore_eos=True, max_tokens=400, stop=(text[2:4],)))
    assert outcome.finish_reason == "stop"
    assert outcome.text == text[: text.index(text[2:4])]
    assert vllm.server.given_up.wait(20)


def test_more_than_the_queue_holds_are_refused(server: VLLMServer, tiny_models: Models) -> None:
    server.trouble, server.pause = Trouble(), 0.05

    async def ask(vllm: VLLMSite) -> None:
        request = vllm.request(ignore_eos=True, max_tokens=200)
        prepared = await asyncio.to_thread(vllm.engine.prepare, request)
        running = [vllm.engine.submit(request, prepared) for _ in range(5)]
        with pytest.raises(Overloaded):
            vllm.engine.check_room()
        with pytest.raises(Overloaded):
            vllm.engine.submit(request, prepared)
        for each in running:
            each.cancel()

    with vllm_site(server, tiny_models.folder("llama"), max_requests=1) as vllm:
        asyncio.run(ask(vllm))
        until(lambda: not vllm.engine._admission.live())
        vllm.engine.check_room()


def test_told_to_end_it_refuses_what_is_new_and_abandons_what_does_not_end(vllm: VLLMSite) -> None:
    vllm.server.pause = 0.05

    async def ask() -> None:
        request = vllm.request(ignore_eos=True, max_tokens=400)
        prepared = await asyncio.to_thread(vllm.engine.prepare, request)
        generation = vllm.engine.submit(request, prepared)
        vllm.engine.drain()
        with pytest.raises(Stopping):
            vllm.engine.submit(request, prepared)
        vllm.engine.abandon()
        with pytest.raises(Stopping):
            await exhausted(aiter(generation))

    asyncio.run(ask())


def test_the_weights_are_never_loaded(vllm: VLLMSite, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(reader_module.AutoModelForCausalLM, "from_pretrained", refuse)
    spec_of.cache_clear()
    with vllm_site(vllm.server, vllm.engine.reader.folder) as fresh:
        assert fresh.answer(fresh.request(logprobs=1))[0].text


def test_what_is_known_without_weights_is_what_the_reader_says(tiny_models: Models, vllm: VLLMSite) -> None:
    reader, spec = tiny_models.reader("llama"), vllm.engine.reader
    assert spec.profile == reader.profile
    assert spec.stop_ids == reader.stop_ids
    assert spec.prefix_ids == reader.prefix_ids
    assert (spec.layers, spec.max_positions, spec.vocabulary) == (reader.layers, reader.max_positions, reader.vocabulary)


def test_nothing_of_a_plan_but_its_signature_goes_with_the_question_what_became_of_it(vllm: VLLMSite) -> None:
    vllm.answer(vllm.request())
    params = vllm.server.bodies[0]["kv_transfer_params"]
    assert ask(params) == {"preread_told": params[FIELD]["signature"]}
    assert SECRET.decode() not in json.dumps(vllm.server.bodies)


async def exhausted(pieces: AsyncIterator[Any]) -> None:
    async for _ in pieces:
        pass


def until(holds: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        threading.Event().wait(0.02)
