"""What a request may ask of the next token: penalties, biases, probabilities, and an answer that fits a schema."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from engine_kit import EngineSite
from hypothesis import given
from hypothesis import strategies as st

from serving.api.tools import Function, Tools
from serving.engine.guide import Guide
from serving.engine.sampling import Sampler
from serving.engine.types import Delta, GenerateRequest, Outcome, Shape
from storage.errors import UserError

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def site(engine_site: EngineSite) -> EngineSite:
    return engine_site


def deltas(site: EngineSite, **changes: Any) -> tuple[list[Delta], Outcome]:
    async def run() -> tuple[list[Delta], Outcome]:
        request = site.request(**changes)
        site.engine.prepare(request)
        generation = site.engine.submit(request)
        got = [delta async for delta in generation]
        assert generation.outcome is not None
        return got, generation.outcome

    return asyncio.run(run())


def drawn(logits: list[float], count: int, **changes: Any) -> list[int]:
    sampler = Sampler(GenerateRequest((), **changes))
    return [sampler.choose(torch.tensor(logits)) for _ in range(count)]


def test_a_presence_penalty_is_paid_once_and_a_frequency_penalty_each_time() -> None:
    assert drawn([1.0, 0.5, 0.0], 4) == [0, 0, 0, 0]
    assert drawn([1.0, 0.5, 0.0], 4, presence_penalty=0.7) == [0, 1, 0, 0]
    assert drawn([1.0, 0.5, 0.0], 5, frequency_penalty=0.4) == [0, 0, 1, 0, 1]
    assert drawn([1.0, 0.5, 0.0], 3, presence_penalty=-1.0, logit_bias={1: 0.6}) == [1, 1, 1]


@given(st.lists(st.floats(-8, 8), min_size=2, max_size=20), st.integers(0, 99))
def test_a_bias_of_100_is_a_command_and_one_of_minus_100_a_ban(logits: list[float], pick: int) -> None:
    token = pick % len(logits)
    assert drawn(logits, 3, logit_bias={token: 100.0}, temperature=1.0, seed=pick) == [token] * 3
    assert token not in drawn(logits, 3, logit_bias={token: -100.0}, temperature=1.0, seed=pick)


def test_logits_are_not_changed_in_place() -> None:
    logits = torch.tensor([1.0, 0.5])
    sampler = Sampler(GenerateRequest((), presence_penalty=2.0))
    assert [sampler.choose(logits), sampler.choose(logits)] == [0, 1]
    assert logits.tolist() == [1.0, 0.5]


def test_probabilities_are_told_of_every_token_that_is_sent(site: EngineSite) -> None:
    got, outcome = deltas(site, logprobs=3, max_tokens=40)
    told = [token for delta in got for token in delta.tokens]
    assert b"".join(token.bytes for token in told).decode(errors="replace") == outcome.text
    for token in told:
        assert len(token.top) == 3
        assert token.logprob == token.top[0].logprob == max(one.logprob for one in token.top), "greedy takes the likeliest"
        assert sum(math.exp(one.logprob) for one in token.top) <= 1.0001
    assert deltas(site, max_tokens=40)[1].text == outcome.text
    assert not any(delta.tokens for delta in deltas(site, max_tokens=4)[0])


def test_nothing_is_told_of_tokens_that_a_stop_sequence_takes_away(site: EngineSite) -> None:
    alphabet: Any = {"shape": Shape({"const": "abcdefghijklmnop"}), "logprobs": 0, "max_tokens": 40}
    told = [token for delta in deltas(site, **alphabet)[0] for token in delta.tokens]
    texts = [token.bytes.decode() for token in told]
    assert "".join(texts) == '"abcdefghijklmnop"'
    held_back = f"{texts[2]}{texts[3]}!"  # so that the last token that is sent comes with the end
    cut, outcome = deltas(site, **alphabet, stop=(held_back, texts[3] + texts[4]))
    assert outcome.text == "".join(texts[:3])
    assert [token for delta in cut for token in delta.tokens] == told[:3]


def test_banned_tokens_are_told_as_likely_as_the_model_holds_them(site: EngineSite) -> None:
    first = deltas(site, logprobs=0, max_tokens=1)[0][0].tokens[0]
    guide = Guide(site.reader)
    token = next(id for id in range(len(site.reader.tokenizer.template)) if guide.bytes_of(id) == first.bytes)
    got, _ = deltas(site, logprobs=20, max_tokens=1, logit_bias={token: -100.0})
    [other] = got[0].tokens
    assert other.bytes != first.bytes
    assert other.top[0] == first
    assert other.logprob < first.logprob


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("seed", [1, 2])
def test_an_untrained_model_writes_what_the_schema_allows(site: EngineSite, temperature: float, seed: int) -> None:
    """A model of random weights would never do so by itself."""
    _, outcome = deltas(site, max_tokens=120, temperature=temperature, seed=seed, shape=Shape(PERSON, "<a>\n", "</a>"))
    assert outcome.finish_reason == "stop"
    written = json.loads(outcome.text.removeprefix("<a>\n").removesuffix("</a>"))
    assert list(written) == ["name", "age"]
    assert len(written["name"]) <= 6
    assert 0 <= written["age"] <= 99
    assert "  " not in outcome.text.replace(written["name"], "")


def test_a_schema_that_is_not_understood_is_refused_before_anything_is_queued(site: EngineSite) -> None:
    for schema in ({"type": "wibble"}, {"not": {"type": "object"}}, {"$ref": "http://elsewhere/x"}):
        with pytest.raises(UserError) as refused:
            site.engine.prepare(site.request(shape=Shape(schema)))
        assert refused.value.code == "invalid_json_schema"
        assert "\n" not in str(refused.value)


def test_a_schema_that_is_too_complex_is_refused_before_anything_is_queued(site: EngineSite) -> None:
    patterns = {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n % 50 + 1}}}x$"} for n in range(1000)}
    with pytest.raises(UserError, match="too complex") as refused:
        site.engine.prepare(site.request(shape=Shape({"type": "object", "properties": patterns})))
    assert refused.value.code == "invalid_json_schema"


def test_parameters_may_refer_to_their_own_definitions_and_to_themselves(site: EngineSite) -> None:
    """Both functions call different things P, and one has a property and a value that look like references."""
    city = {"type": "object", "properties": {"name": {"const": "Bonn"}}, "required": ["name"], "additionalProperties": False}
    place = {"type": "object", "properties": {"P": {"$ref": "#/$defs/P"}}, "required": ["P"], "additionalProperties": False}
    tree = {
        "type": "object", "additionalProperties": False, "required": ["$ref", "const", "to"],
        "properties": {
            "$ref": {"const": "#"}, "const": {"$ref": "#/definitions/P"}, "to": {"enum": [{"$ref": "#"}]}, "on": {"$ref": "#"},
        },
    }  # fmt: skip
    go = Function(name="go", parameters={**place, "$defs": {"P": city}})
    grow = Function(name="grow", parameters={**tree, "$id": "https://example.com/tree", "definitions": {"P": {"const": 7}}})
    for offered, arguments in (
        ((go, grow), {"P": {"name": "Bonn"}}),
        ((go, grow), {"$ref": "#", "const": 7, "to": {"$ref": "#"}, "on": {"$ref": "#", "const": 7, "to": {"$ref": "#"}}}),
    ):
        shape = Tools(offered, required=True).shape()
        assert shape is not None
        site.engine.prepare(site.request(shape=shape))
        name = "go" if "P" in arguments else "grow"
        wanted = f'<tool_call>\n{json.dumps({"name": name, "arguments": arguments})}\n</tool_call>'
        follow(site, shape, wanted)
        with pytest.raises(AssertionError):
            follow(site, shape, wanted.replace("Bonn", "Cologne").replace("7", "8"))


def follow(site: EngineSite, shape: Shape, text: str) -> None:
    """Say this text under the shape: each token of it must be allowed."""
    constraint = Guide(site.reader).constraint(shape)
    for token in site.reader.tokenizer.encode(text):
        assert not constraint.complete
        assert constraint.mask(torch.zeros(int(site.reader.config.vocab_size)))[token] == 0, text
        constraint.took(token)
    assert constraint.complete


def test_a_token_that_the_model_has_not_is_refused(site: EngineSite) -> None:
    for changes in ({"logit_bias": {1 << 20: 1.0}}, {"prompt": (1, 1 << 20)}, {"prompt": (-1,)}):
        with pytest.raises(UserError, match="no token"):
            site.engine.prepare(site.request(**changes))


def test_a_plain_prompt_is_read_as_it_is(site: EngineSite) -> None:
    text = "Once upon a time there was"
    ids = tuple(site.reader.tokenizer.encode(text))
    _, by_text = deltas(site, prompt=text, chunks=(), messages=())
    _, by_ids = deltas(site, prompt=ids, chunks=(), messages=())
    assert by_text.text == by_ids.text
    assert by_text.prompt_tokens == len(ids)
    with pytest.raises(UserError) as refused:
        deltas(site, prompt=ids, max_tokens=site.engine.max_model_len)
    assert refused.value.code == "context_length_exceeded"


def test_an_answer_goes_on_past_its_end_if_it_is_only_measured(site: EngineSite) -> None:
    ends = dict.fromkeys(site.reader.stop_ids, 100.0)
    assert deltas(site, logit_bias=ends)[1].completion_tokens == 1
    _, outcome = deltas(site, logit_bias=ends, ignore_eos=True)
    assert (outcome.completion_tokens, outcome.finish_reason) == (16, "length")


def test_a_frequency_penalty_shows_in_an_answer(site: EngineSite) -> None:
    def most(**changes: Any) -> int:
        got, _ = deltas(site, max_tokens=60, logprobs=0, **changes)
        return Counter(token.bytes for delta in got for token in delta.tokens).most_common(1)[0][1]

    assert most(frequency_penalty=2.0) < most()
