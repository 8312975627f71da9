"""What only a real model shows of the parameters of a chat: shapes, calls, probabilities, choices; by the unmodified client."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from model_kit import LIMIT, Service, Shared
from openai import BadRequestError
from pydantic import BaseModel, Field

QUESTION = "What is the speed limit for carts inside the harbour?"
KNOTS = {"type": "object", "properties": {"knots": {"type": "integer"}}, "required": ["knots"], "additionalProperties": False}
TOOL: Any = {"type": "function", "function": {"name": "limit", "description": "Look up a limit.", "parameters": KNOTS}}


class Limit(BaseModel):
    knots: int = Field(ge=0, le=99)
    where: str = Field(max_length=12)


@pytest.fixture(scope="module")
def shared(embedded: Shared) -> Shared:
    return embedded


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_parameters_of_a_grounded_chat(service: Service) -> None:
    """One corpus for all, since a model's time is dear."""
    service.client = service.client.with_options(timeout=600)
    service.corpus("harbour", {"rules.md": f"# Harbour rules\n\n{LIMIT.format(10)}\n"})
    asked: Any = {"model": f"{service.model}@harbour", "messages": [{"role": "user", "content": QUESTION}]}
    create = service.client.chat.completions.create
    _structured(service, asked)
    _called(service, asked)

    told = create(**asked, max_tokens=3, logprobs=True, top_logprobs=2)
    content = told.choices[0].logprobs.content
    assert len(content) == told.usage.completion_tokens == 3
    assert "".join(token.token for token in content) == told.choices[0].message.content
    assert all(len(token.top_logprobs) == 2 and math.exp(token.logprob) <= 1 for token in content)
    streamed = list(create(**asked, max_tokens=3, logprobs=True, top_logprobs=2, stream=True))
    pieces = [t for chunk in streamed for c in chunk.choices if c.logprobs for t in c.logprobs.content]
    assert pieces == content

    drawn = create(**asked, n=2, seed=11, temperature=1.5, max_tokens=4)
    second = create(**asked, seed=12, temperature=1.5, max_tokens=4)
    texts = [choice.message.content for choice in drawn.choices]
    assert texts[0] != texts[1] == second.choices[0].message.content
    assert drawn.usage.completion_tokens == 8
    with pytest.raises(BadRequestError) as refused:
        create(**asked, logit_bias={"999999": 1})
    assert refused.value.code == "invalid_value"


def _structured(service: Service, asked: Any) -> None:
    parsed = service.client.chat.completions.parse(**asked, response_format=Limit, max_tokens=40)
    assert isinstance(parsed.choices[0].message.parsed, Limit)
    assert parsed.preread["tokens_reused"] > 0  # type: ignore[attr-defined]
    text = service.client.chat.completions.create(**asked, response_format={"type": "json_object"}, max_tokens=3)
    assert text.choices[0].message.content.startswith("{")
    schema = {"name": "x", "schema": {"not": {"type": "object"}}}
    with pytest.raises(BadRequestError) as refused:
        service.client.chat.completions.create(**asked, response_format={"type": "json_schema", "json_schema": schema})
    assert refused.value.code == "invalid_json_schema"


def _called(service: Service, asked: Any) -> None:
    """A required call fits its parameters, streamed too; the passages' KV is reused as without tools."""
    tools: Any = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40}
    whole = service.client.chat.completions.create(**asked, **tools)
    [call] = whole.choices[0].message.tool_calls
    assert (whole.choices[0].finish_reason, call.function.name) == ("tool_calls", "limit")
    assert isinstance(json.loads(call.function.arguments)["knots"], int)
    assert whole.preread["tokens_reused"] > 0
    assert whole.preread["not_reused"] == []
    with service.client.chat.completions.stream(**asked, **tools) as stream:
        for _ in stream:
            pass
        [same] = stream.get_final_completion().choices[0].message.tool_calls
    assert same.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "10 knots"}
    history = [*asked["messages"], whole.choices[0].message.model_dump(exclude_none=True), result]
    after = service.client.chat.completions.create(**{**asked, "messages": history}, tools=[TOOL], max_tokens=2)
    assert after.choices[0].message.content or after.choices[0].message.tool_calls
    assert after.citations, "the person's question is looked up, not the tool's result"


def test_completions_by_text_and_by_the_model_s_tokens(service: Service) -> None:
    text = "The capital of France is"
    ids = service.wiring.reader.tokenizer.encode(text)
    create = service.client.completions.create
    by_text = create(model=service.model, prompt=text, max_tokens=4, logprobs=2)
    by_ids = create(model=service.model, prompt=ids, max_tokens=4, temperature=0)
    assert by_text.choices[0].text == by_ids.choices[0].text == " Paris.\n\n"[: len(by_ids.choices[0].text)]
    assert by_text.usage.prompt_tokens == len(ids)
    told = by_text.choices[0].logprobs
    assert "".join(told.tokens) == by_text.choices[0].text
    assert [by_text.choices[0].text[at:][: len(t)] for at, t in zip(told.text_offset, told.tokens, strict=True)] == told.tokens
    assert all(len(top) == 2 for top in told.top_logprobs)
    penalised = create(model=service.model, prompt=text, max_tokens=1, logit_bias={str(ids[-1]): 100})
    assert penalised.choices[0].text == " is"
