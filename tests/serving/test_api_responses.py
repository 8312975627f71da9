"""The Responses API with file_search, by the unmodified client; Dify's retrieval; choices of chat and completions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import openai
import pytest
from api_kit import EchoEngine, Site

from serving.api import chat, completions
from serving.api.answer import NOTHING_FOUND, Answer, Choice
from serving.api.metrics import Metrics
from serving.api.tools import Function, Tools
from serving.engine.types import Delta, Outcome, Report, TokenLogprob

TEXT = "Invoices are due after thirty days.\n\nReminders cost five euros each."


@pytest.fixture
def corpus(site: Site) -> str:
    return site.corpus_of("handbook", {"terms.txt": TEXT})


def search_in(*ids: str, **extra: Any) -> Any:
    return [{"type": "file_search", "vector_store_ids": list(ids), **extra}]


def test_a_response_has_the_search_the_text_and_its_citations(site: Site, corpus: str) -> None:
    response = site.client().responses.create(
        model="echo-1", input="when are invoices due?", tools=search_in(corpus), include=["file_search_call.results"]
    )
    search, message = response.output
    assert (search.type, search.status, search.queries) == ("file_search_call", "completed", ["when are invoices due?"])
    assert {hit.filename for hit in search.results} == {"terms.txt"}
    assert any("thirty days" in hit.text for hit in search.results)
    assert response.output_text == "[1] when are invoices due?"
    [note] = message.content[0].annotations
    assert (note.type, note.filename, response.output_text[: note.index]) == ("file_citation", "terms.txt", "[1]")
    assert response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.usage.input_tokens_details.cached_tokens == response.preread["tokens_reused"] > 0
    assert response.citations[0]["quote"] in TEXT


def test_results_are_shown_only_if_they_are_asked_for(site: Site, corpus: str) -> None:
    response = site.client().responses.create(model=f"echo-1@{corpus}", input="invoices")
    assert response.output[0].results is None


def test_the_stream_s_events_add_up_to_the_response(site: Site, corpus: str) -> None:
    events = list(site.client().responses.create(model="echo-1", input="größe 你好", tools=search_in(corpus), stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [f"response.{name}" for name in (
        "created", "in_progress", "output_item.added", "file_search_call.in_progress", "file_search_call.searching",
        "file_search_call.completed", "output_item.done", "content_part.added", "output_text.delta",
        "output_text.annotation.added", "output_text.done", "content_part.done", "completed",
    )]  # fmt: skip
    final = events[-1].response
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == final.output_text == "[1] größe 你好"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in final.output]
    assert {e.response.id for e in events if hasattr(e, "response")} == {final.id}


def test_the_client_s_stream_helper_reads_it(site: Site, corpus: str) -> None:
    with site.client().responses.stream(model=f"echo-1@{corpus}", input="one two") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "[1] one two"


def test_an_error_in_the_stream_raises_in_the_client(site: Site) -> None:
    site.engine.fail_at = 1
    with pytest.raises(openai.APIError) as raised:
        list(site.client().responses.create(model="echo-1", input="a b c", stream=True))
    assert "secret" not in str(raised.value.body)


def test_functions_are_called_and_their_results_read(site: Site, corpus: str) -> None:
    function = {"type": "function", "name": "lookup", "parameters": {"type": "object", "properties": {"id": {"type": "string"}}}}
    tools = [function, *search_in(corpus)]
    site.engine.answer = 'Let me see.\n<tool_call>\n{"name": "lookup", "arguments": {"id": "7"}}\n</tool_call>'
    response = site.client().responses.create(model="echo-1", input="which?", tools=tools)
    assert [item.type for item in response.output] == ["file_search_call", "message", "function_call"]
    call = response.output[-1]
    assert (call.name, json.loads(call.arguments)) == ("lookup", {"id": "7"})
    site.engine.answer = None
    history = [{"role": "user", "content": "which?"}, call.model_dump(), {
        "type": "function_call_output", "call_id": call.call_id, "output": "the seventh"}]  # fmt: skip
    again = site.client().responses.create(model="echo-1", input=history, tools=tools)
    assert again.output[0].queries == ["which?"], "the person's question, not the tool's result"
    assert "<tool_response>\nthe seventh\n</tool_response>" in again.output_text
    said = [message.content for message in site.engine.requests[-1].messages]
    assert "lookup" in said[0]
    assert said[2].startswith("<tool_call>")


def test_what_needs_a_memory_is_refused_by_name(site: Site) -> None:
    for extra in ({"previous_response_id": "resp_1"}, {"background": True}, {"conversation": "conv_1"}):
        with pytest.raises(openai.BadRequestError) as refused:
            site.client().responses.create(model="echo-1", input="x", **extra)
        assert refused.value.param == next(iter(extra))
    image = [{"type": "input_image"}]
    for wrong in ([{"type": "image"}], [{"role": "user", "content": image}], [{"role": "user", "content": 5}]):
        with pytest.raises(openai.BadRequestError) as refused:
            site.client().responses.create(model="echo-1", input=wrong)
        assert refused.value.param.startswith("input")


def test_nothing_found_is_said_in_every_form(site: Site) -> None:
    empty = site.corpus_of("empty", {})
    client = site.client()
    response = client.responses.create(model=f"echo-1@{empty}", input="anything?")
    assert (response.output_text, response.citations) == (NOTHING_FOUND, [])
    form: Any = {"type": "json_object"}
    asked: Any = {"model": f"echo-1@{empty}", "messages": [{"role": "user", "content": "x"}], "response_format": form}
    message = client.chat.completions.create(**asked).choices[0].message
    assert (message.content, message.refusal) == (None, NOTHING_FOUND), "a sentence is no JSON"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.refusal or "" for c in chunks) == NOTHING_FOUND


TOOLS: Any = [{"type": "function", "function": {"name": "lookup"}}]


@pytest.mark.parametrize("stream", [False, True])
def test_tools_do_not_lift_the_grounding_where_nothing_is_found(site: Site, stream: bool) -> None:
    """A function may know what no passage says, so the model is asked; under the same rules as with passages."""
    empty = site.corpus_of("empty", {})
    spoken: Any = [{"role": "system", "content": "Answer from what you know."}, {"role": "user", "content": "anything?"}]
    asked: Any = {"model": f"echo-1@{empty}", "messages": spoken, "tools": TOOLS, "stream": stream}
    told = site.client().chat.completions.create(**asked)
    end = list(told)[-1] if stream else told
    assert (end.citations, end.preread["nothing_found"]) == ([], True)
    [request] = site.engine.requests
    assert (request.grounded, request.chunks) == (True, ())
    assert "No passage was found" in request.messages[0].content, "before all that the caller says"
    assert [m.role for m in request.messages] == ["system", "system", "user"]


def test_tools_do_not_lift_what_requires_a_passage(site: Site) -> None:
    asked: Any = {"model": f"echo-1@{site.corpus_of('empty', {})}", "messages": [{"role": "user", "content": "x"}]}
    answer = site.client().chat.completions.create(**asked, tools=TOOLS, **CONTEXT_ASKED)
    assert (answer.choices[0].message.refusal, site.engine.requests) == (NOTHING_FOUND, [])


def test_an_answer_says_whether_the_search_found_anything(site: Site, corpus: str) -> None:
    told = []
    for model, tools in ((f"echo-1@{corpus}", TOOLS), (f"echo-1@{corpus}", []), ("echo-1", TOOLS), ("echo-1", [])):
        asked: Any = {"model": model, "messages": [{"role": "user", "content": "invoices"}], "tools": tools}
        answer = site.client().chat.completions.create(**asked)
        told.append((answer.preread["nothing_found"], site.engine.requests[-1].grounded))
        assert not any("No passage" in m.content for m in site.engine.requests[-1].messages)
    assert told == [(False, True)] * 2 + [(False, False)] * 2, "a plain model has nothing to be grounded in"


JSON_ASKED: Any = {"text": {"format": {"type": "json_object"}}}
CONTEXT_ASKED: Any = {"extra_body": {"preread": {"require_context": True}}}


@pytest.mark.parametrize("extra", [JSON_ASKED, CONTEXT_ASKED])
def test_a_response_refuses_in_a_part_of_its_own_whole_and_streamed(site: Site, extra: Any) -> None:
    asked: Any = {"model": f"echo-1@{site.corpus_of('empty', {})}", "input": "x", **extra}
    _, message = site.client().responses.create(**asked).output
    assert [part.to_dict() for part in message.content] == [{"type": "refusal", "refusal": NOTHING_FOUND}]
    with site.client().responses.stream(**asked) as stream:
        events = list(stream)
        assert stream.get_final_response().output[1].content == message.content
    kinds = [event.type for event in events]
    assert not any("output_text" in kind for kind in kinds)
    assert "".join(event.delta for event in events if event.type == "response.refusal.delta") == NOTHING_FOUND
    assert [event.refusal for event in events if event.type == "response.refusal.done"] == [NOTHING_FOUND]
    assert [event.part.type for event in events if event.type.startswith("response.content_part")] == ["refusal"] * 2


def test_filters_and_thresholds_of_the_tool_restrict_the_search(site: Site, corpus: str) -> None:
    client = site.client()
    [file] = client.vector_stores.files.list(corpus).data
    client.vector_stores.files.update(file.id, vector_store_id=corpus, attributes={"year": 2024})
    for kind, found in (("eq", True), ("gt", False)):
        filters = {"type": kind, "key": "year", "value": 2024}
        response = client.responses.create(model="echo-1", input="invoices due", tools=search_in(corpus, filters=filters))
        assert bool(response.citations) is found
    tools = search_in(corpus, ranking_options={"score_threshold": 1.0})
    assert len(client.responses.create(model="echo-1", input="invoices due", tools=tools).citations) <= 1
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="echo-1", input="x", tools=search_in(corpus, ranking_options={"hybrid_search": {}}))


def test_dify_reads_records(site: Site, corpus: str) -> None:
    body = {"knowledge_id": corpus, "query": "invoices due", "retrieval_setting": {"top_k": 1, "score_threshold": 0.1}}
    with site.http() as http:
        [record] = http.post("/retrieval", json=body).json()["records"]
        assert record["content"] in TEXT
        assert record["title"] == "terms.txt"
        assert 0 < record["score"] <= 1
        condition = {"name": ["year"], "comparison_operator": "is", "value": "1999"}
        body["metadata_condition"] = {"conditions": [condition]}
        assert http.post("/retrieval", json=body).json() == {"records": []}
        condition["comparison_operator"] = "sounds like"
        assert http.post("/retrieval", json=body).json()["error"]["param"].endswith("comparison_operator")
    with site.http("") as http:
        assert http.post("/retrieval", json=body).status_code == 401


# --- chat and completions -------------------------------------------------------------------------------------------------


def test_several_choices_come_whole_and_streamed(site: Site, corpus: str) -> None:
    asked: Any = {"model": f"echo-1@{corpus}", "messages": [{"role": "user", "content": "a b"}], "n": 3, "seed": 5}
    whole = site.client().chat.completions.create(**asked)
    assert [(c.index, c.message.content) for c in whole.choices] == [(n, "[1] a b") for n in range(3)]
    assert [request.seed for request in site.engine.requests] == [5, 6, 7]
    assert whole.usage.completion_tokens == 9
    texts, ends = ["", "", ""], []
    for chunk in site.client().chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert texts == ["[1] a b"] * 3
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_told_from_text(site: Site, corpus: str, stream: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add"}}, *search_in(corpus)]
    made = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    asked: Any = {"model": "echo-1", "messages": [{"role": "user", "content": "x"}], "tools": tools}
    client = site.client()

    def ask(answer: str, **extra: Any) -> tuple[str, list[tuple[str, str]], str]:
        site.engine.answer = answer
        if not stream:
            choice = client.chat.completions.create(**asked, **extra).choices[0]
            calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
            return choice.message.content or "", calls, choice.finish_reason
        with client.chat.completions.stream(**asked, **extra) as events:
            for _ in events:
                pass
            choice = events.get_final_completion().choices[0]
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
        return choice.message.content or "", calls, choice.finish_reason

    text, calls, reason = ask(f"I add. {made} {made}")
    assert (text.strip(), calls, reason) == ("I add.", [("add", '{"a": 1}')] * 2, "tool_calls")
    assert ask(f"{made}{made}", parallel_tool_calls=False)[1] == [("add", '{"a": 1}')]
    for odd in ("<tool_call>no JSON</tool_call>", '<tool_call>{"name": "rm"}</tool_call>', "a <tool_cal", "<b> [1] </b>"):
        assert ask(odd) == (odd, [], "stop")
    assert ask(made, tool_choice="none") == (made, [], "stop")
    assert "add" not in site.engine.requests[-1].messages[0].content


@dataclass
class AtOnce:
    """A generation whose pieces are all there before the first is shown."""

    pieces: list[str]
    outcome: Outcome | None = None

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for piece in self.pieces:
            yield Delta(piece, (TokenLogprob(piece.encode(), -0.1),))
        self.outcome = Outcome("".join(self.pieces), "stop", 5, len(self.pieces), (), Report())

    def so_far(self) -> Outcome | None:
        return self.outcome

    def cancel(self) -> None:
        return


def at_once(*pieces: str, offered: Tools | None = None) -> Answer:
    return Answer(
        "m", "http://x/", Metrics(dict, EchoEngine()), [Choice(0, AtOnce([*pieces]), offered)],
        lambda chunks: frozenset(), lambda outcome: None,
    )  # fmt: skip


def test_a_piece_has_its_own_place_however_far_the_choice_has_got() -> None:
    async def shown(frames: AsyncIterator[str], field: str) -> list[Any]:
        choices = [json.loads(frame.removeprefix("data: "))["choices"][0] async for frame in frames]
        return [choice["delta"].get(field) if "delta" in choice else choice[field] for choice in choices]

    calls = [f'<tool_call>{{"name": "f", "arguments": {{"a": {n}}}}}</tool_call>' for n in range(3)]
    answer = at_once(*calls, offered=Tools((Function(name="f"),)))
    listed = [made[0] for made in asyncio.run(shown(chat._frames(answer, False), "tool_calls")) if made]
    assert [(made["index"], made["function"]["arguments"]) for made in listed] == [(n, f'{{"a": {n}}}') for n in range(3)]
    body = completions.CompletionBody(model="m", prompt="x", logprobs=1)
    told = asyncio.run(shown(completions._frames(at_once("ab", "c", "def"), body), "logprobs"))
    assert [logprobs["text_offset"] for logprobs in told] == [[0], [2], [3], []]


def test_a_required_call_is_held_to_its_parameters(site: Site) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools: Any = [{"type": "function", "function": {"name": n, "parameters": parameters}} for n in ("weather", "news")]
    for choice, names in (("required", ["weather", "news"]), ({"type": "function", "function": {"name": "news"}}, ["news"])):
        site.client().chat.completions.create(
            model="echo-1", messages=[{"role": "user", "content": "x"}], tools=tools, tool_choice=choice
        )
        shape = site.engine.requests[-1].shape
        assert [one["properties"]["name"]["const"] for one in shape.schema["anyOf"]] == names
        assert shape.schema["anyOf"][0]["properties"]["arguments"] == parameters


def test_arguments_of_an_earlier_call_that_are_nested_too_deeply_are_refused(site: Site) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "[" * 50_000}}
    spoken: Any = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(openai.BadRequestError) as refused:
        site.client().chat.completions.create(model="echo-1", messages=spoken)
    assert refused.value.param == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize("stream", [False, True])
def test_completions_go_on_with_each_prompt(site: Site, stream: bool) -> None:
    asked: Any = {"model": "echo-1", "prompt": ["one two", "three"], "n": 2, "echo": True}
    texts = ["", "", "", ""]
    if stream:
        for chunk in site.client().completions.create(**asked, stream=True, stream_options={"include_usage": True}):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        usage = chunk.usage
    else:
        answer = site.client().completions.create(**asked)
        texts, usage = [choice.text for choice in answer.choices], answer.usage
    assert texts == ["one twoone two"] * 2 + ["threethree"] * 2
    assert (usage.prompt_tokens, usage.completion_tokens) == (20, 6)
    assert site.engine.requests[0].max_tokens == 16


def test_completions_take_token_ids_and_refuse_what_is_neither(site: Site) -> None:
    client = site.client()
    for prompt, seen in (([5, 6], [(5, 6)]), ([[5], [6, 7]], [(5,), (6, 7)])):
        site.engine.requests.clear()
        client.completions.create(model="echo-1", prompt=prompt)
        assert [request.prompt for request in site.engine.requests] == seen
    for extra in ({"prompt": []}, {"prompt": ""}, {"prompt": [[]]}, {"prompt": [1, "a"]}, {"prompt": ["a"] * 9}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="echo-1", **extra)
        assert refused.value.param == "prompt"
    for extra in ({"suffix": "x"}, {"best_of": 3}, {"echo": True, "logprobs": 1}, {"model": "echo-1@x"}):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**{"model": "echo-1", "prompt": "x", **extra})
        assert refused.value.param == next(iter(extra))


CHAT_SO_FAR = "<chat_history>\nUSER: When are invoices due?\nASSISTANT: After thirty days [1].\n</chat_history>"
# In the form of Open WebUI's default prompts for its own tasks, in other words: a heading, rules, the conversation in a tag.
TASKS = {
    "title": f"""### Task:
Name this conversation in a few words, with a picture sign in front.
### Guidelines:
- Say what it is about, in its own language.
- No quotation marks, and no text around it.
### Output:
JSON format: {{ "title": "a short title" }}
### Examples:
- {{ "title": "Paying invoices" }}
### Chat History:
{CHAT_SO_FAR}""",
    "tags": f"""### Task:
Choose up to three wide subjects of the conversation, and as many narrower ones.
### Guidelines:
- If it is too short for that, answer with ["General"] alone.
### Output:
JSON format: {{ "tags": ["subject", "narrower"] }}
### Chat History:
{CHAT_SO_FAR}""",
    "follow-up": f"""### Task:
Propose some questions that the user may want to ask next, seen from the user's side.
### Guidelines:
- Each is short, and nothing in it has been answered already.
### Output:
JSON format: {{ "follow_ups": ["What is a reminder?", "What if an invoice is late?"] }}
### Chat History:
{CHAT_SO_FAR}""",
    "search queries": f"""### Task:
Decide from the conversation whether something is to be searched for, and for what. Today is 2026-11-30.
### Guidelines:
- Answer with a JSON object alone, and with an empty list where nothing has to be searched for.
### Output:
{{ "queries": ["invoice due date"] }}
### Chat History:
{CHAT_SO_FAR}
""",
    "autocomplete": f"""### Task:
Go on with what stands in `<text>`, in the manner that `<type>` names.
### **Rules**:
1. Do not repeat the text, and do not answer it.
#### Example 1:
Input:
<type>General</type>
<text>The invoices lay on the</text>
Output:
{{ "text": "desk of the clerk." }}
---
### Context:
{CHAT_SO_FAR}
<type>Search Query</type>
<text>when are invoices</text>
#### Output:
""",
    "picture": f"""
### Task:
Describe a picture that would fit the conversation, as if to somebody who cannot see.
### Output:
{{ "prompt": "a desk full of invoices" }}
### Chat History:
{CHAT_SO_FAR}""",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_a_chat_page_s_own_tasks_look_nothing_up(site: Site, corpus: str, task: str, stream: bool) -> None:
    """Open WebUI asks the model of the conversation, in one turn, for all that it shows around it."""
    messages: Any = [{"role": "user", "content": TASKS[task]}]
    asked: Any = {"model": f"echo-1@{corpus}", "messages": messages, "stream": stream, "max_completion_tokens": 1000}
    told = site.client().chat.completions.create(**asked)
    end = [*told][-1] if stream else told
    assert (end.citations, end.preread["nothing_found"]) == ([], False)
    [request] = site.engine.requests
    assert (request.chunks, request.grounded, request.messages[-1].content) == ((), False, TASKS[task])


def test_what_looks_like_a_chat_page_s_task_is_a_question(site: Site, corpus: str) -> None:

    def ask(text: str) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        return site.client().chat.completions.create(model=f"echo-1@{corpus}", messages=messages)

    assert ask("### Task:\nSay when invoices are due").citations, "a person's own heading"
    assert ask("Explain <chat_history> of invoices").citations
    # What it makes of a question with its own passages is a question all the same.
    assert ask("### Task:\nAnswer with citations.\n<context>none</context>\ninvoices due").citations
