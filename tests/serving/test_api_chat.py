from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest
from api_kit import Site

from retrieval.relevance import RELEVANT
from serving.api import answer, stream
from storage.errors import Overloaded, UserError

TEXT = (
    "Invoices are due after thirty days unless the contract of the customer says so.\n\n"
    "Reminders cost five euros each and are sent once a week until payment arrives."
)


def ask(site: Site, model: str = "echo-1", question: str = "when are invoices due?", **extra: object) -> dict:
    body = {"model": model, "messages": [{"role": "user", "content": question}], **extra}
    with site.http() as http:
        reply = http.post("/v1/chat/completions", json=body)
        return {"status": reply.status_code, **reply.json()}


def test_plain_model_answers_without_sources(site: Site) -> None:
    reply = site.client().chat.completions.create(
        model="echo-1", messages=[{"role": "user", "content": "hello there"}], max_tokens=5, stop="x", seed=1
    )
    assert reply.choices[0].message.content == "hello there"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.model_extra is not None
    assert reply.model_extra["citations"] == []
    assert site.engine.requests[0].max_tokens == 5
    assert site.engine.requests[0].stop == ("x",)


@pytest.mark.parametrize(
    "choose",
    [
        lambda id: {"model": f"echo-1@{id}"},
        lambda id: {"model": "echo-1@handbook"},
        lambda id: {"vector_store_ids": [id]},
        lambda id: {"tools": [{"type": "file_search", "vector_store_ids": [id], "max_num_results": 1}]},
        lambda id: {"metadata": {"corpus": "handbook"}},
    ],
)
def test_every_way_to_choose_a_corpus_cites_it(site: Site, choose) -> None:
    corpus_id = site.corpus_of("handbook", {"terms.txt": TEXT})
    reply = ask(site, **choose(corpus_id))
    assert {c["corpus_id"] for c in reply["citations"]} == {corpus_id}
    first = reply["citations"][0]
    assert TEXT[first["start"] : first["end"]] == first["quote"]
    assert (first["n"], first["cited"], first["filename"]) == (1, True, "terms.txt")
    [note] = reply["choices"][0]["message"]["annotations"]
    span = note["url_citation"]
    assert reply["choices"][0]["message"]["content"][span["start_index"] : span["end_index"]] == "[1]"
    assert span["url"] == f"{site.url}/#passage/{corpus_id}/{first['file_id']}/{first['start']}-{first['end']}"
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == reply["preread"]["tokens_reused"] > 0
    assert reply["preread"]["ms"]["retrieval"] > 0


def test_the_model_id_is_asked_before_the_other_places(site: Site) -> None:
    one, two = site.corpus_of("one", {"a.txt": TEXT}), site.corpus_of("two", {"b.txt": TEXT})
    reply = ask(site, model="echo-1@one", vector_store_ids=[two], metadata={"corpus": "two"})
    assert {c["corpus_id"] for c in reply["citations"]} == {one}
    reply = ask(site, vector_store_ids=[two], metadata={"corpus": "one"})
    assert {c["corpus_id"] for c in reply["citations"]} == {two}


def test_several_corpora_are_searched_together(site: Site) -> None:
    ids = [site.corpus_of(name, {f"{name}.txt": f"{name} {TEXT}"}) for name in ("one", "two")]
    reply = ask(site, vector_store_ids=ids, preread={"top_k": 4})
    assert {c["corpus_id"] for c in reply["citations"]} == set(ids)


def test_sources_the_text_does_not_mention_are_listed_as_uncited(site: Site) -> None:
    site.corpus_of("handbook", {"terms.txt": TEXT})
    site.engine.answer = "see [2, 9], and [7] and [2]"
    reply = ask(site, model="echo-1@handbook")
    assert [(c["n"], c["cited"]) for c in reply["citations"]] == [(1, False), (2, True)]
    assert len(reply["choices"][0]["message"]["annotations"]) == 1
    assert len(ask(site, model="echo-1@handbook", preread={"top_k": 1})["citations"]) == 1


def test_nothing_found_says_so_and_asks_no_model(site: Site) -> None:
    corpus_id = site.corpus_of("empty", {})
    reply = ask(site, vector_store_ids=[corpus_id])
    assert reply["choices"][0]["message"]["content"] == answer.NOTHING_FOUND
    assert (reply["citations"], reply["usage"]["total_tokens"], site.engine.requests) == ([], 0, [])
    assert (reply["preread"]["method"], reply["preread"]["nothing_found"]) == ("none", True)


def test_unknown_corpus_and_anothers_look_alike(site: Site) -> None:
    corpus_id = site.corpus_of("handbook", {"terms.txt": TEXT})
    stranger = site.client(site.key("read", corpora=[site.corpus_of("other", {})]))
    answers = []
    for name in (corpus_id, "vs_nothing"):
        with pytest.raises(openai.NotFoundError) as caught:
            stranger.chat.completions.create(
                model=f"echo-1@{name}", messages=[{"role": "user", "content": "hi"}]
            )
        answers.append(caught.value.message.replace(name, "*"))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"stop": list("abcde")}, "stop"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function"),
        ({"tools": [{"type": "file_search", "filters": {"type": "eq", "key": "a", "value": 1}}] * 2}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"temprature": 1}, "temprature"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages.0.role"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
        ({"preread": {"topk": 3}}, "preread.topk"),
        ({"preread": {"top_k": 0}}, "preread.top_k"),
    ],
)
def test_what_is_not_served_is_refused_by_name(site: Site, extra: dict, param: str) -> None:
    reply = ask(site, **extra)
    assert (reply["status"], reply["error"]["param"]) == (400, param)
    assert reply["error"]["type"] == "invalid_request_error"
    assert site.engine.requests == []


def test_a_misspelt_option_is_answered_with_its_nearest(site: Site) -> None:
    assert "'temperature'" in ask(site, temprature=1)["error"]["message"]
    assert "'top_k'" in ask(site, preread={"topk": 3})["error"]["message"]


def test_neutral_parameters_and_text_parts_are_accepted(site: Site) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    reply = ask(site, messages=messages, n=1, logprobs=False, user="u", response_format={"type": "text"},
                preread={"method": "full"})  # fmt: skip
    assert reply["status"] == 200
    sent = site.engine.requests[0]
    assert [(m.role, m.content) for m in sent.messages] == [("system", "be brief"), ("user", "one\ntwo")]
    assert sent.method == "full"


def test_a_short_question_is_looked_up_with_the_turn_before(site: Site, monkeypatch) -> None:
    site.corpus_of("handbook", {"terms.txt": TEXT})
    asked = []
    search = site.parts.retriever.search
    monkeypatch.setattr(site.parts.retriever, "search", lambda **k: asked.append(k["query"]) or search(**k))
    turns = [
        {"role": "user", "content": "When are invoices due in 2022?"},
        {"role": "assistant", "content": "x"},
    ]
    ask(site, model="echo-1@handbook", messages=[*turns, {"role": "user", "content": "and in 2023?"}])
    ask(
        site,
        model="echo-1@handbook",
        messages=[*turns, {"role": "user", "content": "Who sends the reminders out?"}],
    )
    assert asked == ["When are invoices due in 2022?\nand in 2023?", "Who sends the reminders out?"]


def test_stream_gives_role_texts_sources_and_usage(site: Site) -> None:
    site.corpus_of("handbook", {"terms.txt": TEXT})
    stream = site.client().chat.completions.create(
        model="echo-1@handbook",
        messages=[{"role": "user", "content": "größe 你好 ?"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "[1] größe 你好 ?"
    end = chunks[-2]
    assert end.choices[0].finish_reason == "stop"
    assert end.model_extra is not None
    assert end.model_extra["citations"][0]["cited"]
    assert end.model_extra["preread"]["tokens_reused"] > 0
    assert end.choices[0].delta.model_extra["annotations"][0]["type"] == "url_citation"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def lines_of_stream(site: Site, **extra: object) -> list[str]:
    body = {"model": "echo-1", "messages": [{"role": "user", "content": "a b c"}], "stream": True, **extra}
    with site.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        return [line for line in reply.iter_lines() if line]


def test_stream_without_usage_has_none_and_ends_with_done(site: Site) -> None:
    lines = lines_of_stream(site)
    assert lines[-1] == "data: [DONE]"
    assert "usage" not in json.loads(lines[-2][6:])


def test_heartbeats_come_while_the_first_text_does_not(site: Site, monkeypatch) -> None:
    monkeypatch.setattr(stream, "HEARTBEAT_SECONDS", 0.1)
    site.engine.first_pause = 0.35
    lines = lines_of_stream(site)
    assert lines.count(": waiting") >= 2
    assert lines[-1] == "data: [DONE]"


def test_an_error_in_the_stream_is_a_frame_without_internals(site: Site) -> None:
    site.engine.fail_at = 2
    lines = lines_of_stream(site)
    error = json.loads(lines[-2][6:])["error"]
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    with pytest.raises(openai.APIError):
        list(site.client().chat.completions.create(
            model="echo-1", messages=[{"role": "user", "content": "a b c"}], stream=True))  # fmt: skip


def test_an_error_of_the_engine_is_a_500_without_internals(site: Site) -> None:
    site.engine.fail_at = 0
    reply = ask(site)
    assert (reply["status"], reply["error"]["code"]) == (500, "internal_error")
    assert "secret" not in json.dumps(reply)


@pytest.mark.parametrize("stream", [True, False])
def test_what_the_engine_refuses_has_its_status(site: Site, stream: bool) -> None:
    site.engine.refuse = UserError("The question is too long.", code="context_length_exceeded")
    reply = ask(site, stream=stream)
    assert (reply["status"], reply["error"]["code"]) == (400, "context_length_exceeded")
    site.engine.refuse = Overloaded("busy")
    with site.http() as http:
        body = {"model": "echo-1", "messages": [{"role": "user", "content": "x"}], "stream": stream}
        busy = http.post("/v1/chat/completions", json=body)
    assert busy.status_code == 429
    assert 0 < int(busy.headers["retry-after"]) < 120


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_cancels_the_work_within_a_second(site: Site, stream: bool) -> None:
    site.engine.pause = 0.2
    body = {"model": "echo-1", "messages": [{"role": "user", "content": "w " * 200}], "stream": stream}
    with site.http() as http:
        if stream:
            with http.stream("POST", "/v1/chat/completions", json=body) as reply:
                next(reply.iter_lines())
                gone = time.monotonic()
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/v1/chat/completions", json=body, timeout=0.5)
            gone = time.monotonic()
    [generation] = site.engine.generations
    while generation.cancelled_at is None and time.monotonic() < gone + 3:
        time.sleep(0.01)
    assert generation.cancelled_at is not None
    assert generation.cancelled_at - gone < 1


def test_a_finished_answer_is_not_counted_as_cancelled(site: Site) -> None:
    ask(site)
    assert site.engine.generations[0].cancelled_at is None


def test_unknown_model_is_not_found(site: Site) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        site.client().chat.completions.create(model="gpt-4", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"


def test_a_prompt_is_prepared_once_for_all_its_choices_and_away_from_the_event_loop(site: Site) -> None:
    assert len(ask(site, n=3)["choices"]) == 3
    assert len(site.engine.prepared) == 1
    with site.http() as http:
        body = {"model": "echo-1", "prompt": ["one", "two", "one"], "n": 2}
        reply = http.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in reply["choices"]] == ["one", "one", "two", "two", "one", "one"]
    assert [request.prompt for request, _ in site.engine.prepared[1:]] == ["one", "two"]
    assert site.engine.loop_thread not in {thread for _, thread in site.engine.prepared}


@pytest.mark.parametrize(
    ("preread", "ranking", "expected"),
    [
        ({}, {}, None),
        ({"require_context": True}, {}, RELEVANT),
        ({"require_context": True, "min_score": 0.05}, {}, 0.05),
        ({"min_score": 0.0}, {"score_threshold": 0.9}, 0.0),
        ({"require_context": True}, {"score_threshold": 0.6}, 0.6),
        ({}, {"score_threshold": 0.6}, 0.6),
    ],
)
def test_what_counts_as_a_passage_is_the_caller_s_word_or_what_is_relevant(
    site: Site, monkeypatch: pytest.MonkeyPatch, preread: dict[str, Any], ranking: dict[str, Any], expected: float | None
) -> None:
    corpus = site.corpus_of("handbook", {"a.txt": "invoices are due in March"})
    asked: list[float | None] = []
    search = site.parts.retriever.search
    monkeypatch.setattr(
        site.parts.retriever, "search", lambda **each: (asked.append(each["score_threshold"]), search(**each))[1]
    )
    tool = {"type": "file_search", "vector_store_ids": [corpus], **({"ranking_options": ranking} if ranking else {})}
    body = {"model": "echo-1", "messages": [{"role": "user", "content": "when are invoices due?"}], "tools": [tool]}
    with site.http() as http:
        http.post("/v1/chat/completions", json={**body, "preread": preread}).raise_for_status()
    assert asked == [expected]
