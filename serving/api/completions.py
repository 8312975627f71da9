"""POST /v1/completions: a text, or token ids of the served model, to go on with. No template, no passages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field, WithJsonSchema

from serving.api.access import Parts, Reader
from serving.api.answer import Answer, Choice, finished
from serving.api.asking import check_model, submit
from serving.api.bodies import UNSUPPORTED, NotServed
from serving.api.errors import BadParameter
from serving.api.json_body import StrictJSON
from serving.api.logprobs import completion_logprobs
from serving.api.sampling import MAX_CHOICES, SamplingBody
from serving.api.shapes import answers, asked
from serving.api.shapes.common import told
from serving.api.stream import HEARTBEAT, Stream, event, guarded, with_heartbeats
from serving.engine.types import GenerateRequest, TokenLogprob

router = APIRouter(prefix="/v1/completions", tags=["completions"], route_class=StrictJSON)
MAX_TOKENS = 16  # OpenAI's default
Prompt = str | tuple[int, ...]


class CompletionBody(SamplingBody):
    not_served: ClassVar[Mapping[str, NotServed]] = {"suffix": NotServed((None, ""))}

    prompt: Annotated[Any, WithJsonSchema(asked.texts_or_ids(MAX_CHOICES))] = "<|endoftext|>"
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    def check(self) -> None:
        """See `SamplingBody.check`."""
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise BadParameter("best_of", "best_of is served where it is n: all that is made is answered", UNSUPPORTED)
        if self.echo and self.logprobs is not None:
            raise BadParameter("echo", "echo with logprobs is not served: leave one out", UNSUPPORTED)
        if self.echo and not all(isinstance(prompt, str) for prompt in self.prompts()):
            raise BadParameter("echo", "echo is served for prompts that are texts", UNSUPPORTED)
        if len(self.prompts()) * (self.n or 1) > MAX_CHOICES:
            raise BadParameter("prompt", f"at most {MAX_CHOICES} choices are served: prompts times n")

    def prompts(self) -> list[Prompt]:
        """What is to be gone on with. Raises BadParameter."""
        given = self.prompt if isinstance(self.prompt, list) else [self.prompt]
        if given is self.prompt and given and all(_is_id(one) for one in given):
            given = [given]
        prompts: list[Prompt] = []
        for one in given:
            if isinstance(one, list) and all(_is_id(id) for id in one):
                prompts.append(tuple(one))
            elif isinstance(one, str):
                prompts.append(one)
            else:
                raise BadParameter("prompt", "prompt is a text, a list of texts, token ids, or a list of such")
        if not prompts or not all(prompts):
            raise BadParameter("prompt", "prompt has nothing to go on with")
        return prompts


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@router.post("", response_model=None, responses=told(answers.Completion))
async def create_completion(parts: Parts, who: Reader, body: CompletionBody, request: Request) -> Stream | dict[str, Any]:
    body.check()
    check_model(parts, body.model)
    if body.model != parts.engine.model_id:
        raise BadParameter("model", "a plain text cannot be grounded in a vector store: use chat/completions with this model")
    answer = Answer(
        body.model, str(request.base_url), request.app.state.metrics, [], lambda _: frozenset(),
        partial(parts.meter.note, who.tenant_id, ()), per_prompt=body.n or 1, kind="cmpl",
    )  # fmt: skip
    base = GenerateRequest(messages=(), method="full", max_tokens=body.max_tokens or MAX_TOKENS, logprobs=body.logprobs)
    requests = [
        replace(base, prompt=prompt, **body.sampling(number)) for prompt in body.prompts() for number in range(body.n or 1)
    ]
    await submit(parts, answer, requests)
    if body.stream:
        return Stream(answer, guarded(answer, _frames(answer, body)))
    await finished(answer, request)
    choices = [_shown(body, choice, _echo(body, choice) + choice.text, choice.tokens) for choice in answer.choices]
    return {**answer.envelope("text_completion"), "choices": choices, "usage": answer.usage(), **_provenance(answer)}


def _shown(
    body: CompletionBody, choice: Choice, text: str, tokens: Sequence[TokenLogprob], start: int = 0, end: str | None = ""
) -> dict[str, Any]:
    """A choice, or a piece of one that begins at character `start`. `end`: why it ended; empty: as the choice says."""
    told = None if body.logprobs is None else completion_logprobs(tokens, start)
    reason = choice.finish_reason if end == "" else end
    return {"index": choice.index, "text": text, "logprobs": told, "finish_reason": reason}


def _echo(body: CompletionBody, choice: Choice) -> str:
    return str(body.prompts()[choice.index // (body.n or 1)]) if body.echo else ""


def _provenance(answer: Answer) -> dict[str, Any]:
    return {"preread": answer.provenance(answer.choices[0], frozenset())["preread"]}


async def _frames(answer: Answer, body: CompletionBody) -> AsyncIterator[str]:
    """The completions as server-sent events."""

    def frame(shown: dict[str, Any], **extra: Any) -> str:
        usage_field = {"usage": None} if body.include_usage else {}
        return event({**answer.envelope("text_completion"), "choices": [shown], **usage_field, **extra})

    for choice in answer.choices:
        if echo := _echo(body, choice):
            yield frame(_shown(body, choice, echo, (), 0, None))
    async for step in with_heartbeats(answer.pieces()):
        if step is None:
            yield HEARTBEAT
            continue
        choice, piece = step
        if piece is None:
            extra = _provenance(answer) if choice.index == 0 else {}
            yield frame(_shown(body, choice, "", (), len(choice.text)), **extra)
        else:
            yield frame(_shown(body, choice, piece.text, piece.tokens, piece.at, None))
    if body.include_usage:
        yield event({**answer.envelope("text_completion"), "choices": [], "usage": answer.usage()})
