"""A chat request as OpenAI's clients send it, and what we make of it. What would change the answer and is not
served is refused in one line; what would not is ignored."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from serving.api.errors import BadParameter
from serving.api.times import Moment
from serving.engine.types import Message

MAX_STOPS = 4
MAX_TOP_K = 100
SHORT_QUESTION = 25  # characters; "and in 2023?" means little without the turn before
EARLIER = 200  # characters of the user turn before that help a short question
# Parameters that would change the answer, and the values that mean "not used".
NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none"),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "prediction": (None,),
}


class TextPart(BaseModel):
    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    role: str
    content: str | list[TextPart] | None = None

    def plain(self, where: str) -> Message:
        """The message as text. Raises BadParameter."""
        role = "system" if self.role == "developer" else self.role
        if role not in ("system", "user", "assistant"):
            raise BadParameter(
                f"{where}.role", f"role {self.role!r} is not served: use system, user or assistant"
            )
        if isinstance(self.content, list):
            return Message(role, "\n".join(_text_of(part, where) for part in self.content))
        return Message(role, self.content or "")


def _text_of(part: TextPart, where: str) -> str:
    if part.type not in ("text", "input_text") or part.text is None:
        raise BadParameter(f"{where}.content", f"content of type {part.type!r} is not served: send text")
    return part.text


class StreamOptions(BaseModel):
    include_usage: bool = False


class PrereadOptions(BaseModel):
    """Our own options, under `preread`."""

    model_config = ConfigDict(extra="allow")
    method: str | None = None
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K)] | None = None
    emphasis: Annotated[dict[str, float], Field(max_length=200)] = {}  # see serving.emphasis
    as_of: Moment | None = None  # passages of what was current then
    require_context: bool = False  # refuse rather than answer without a passage


class ChatBody(BaseModel):
    """The body of chat/completions."""

    model_config = ConfigDict(extra="allow")
    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Literal[1] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    vector_store_ids: list[str] | None = None
    metadata: dict[str, Any] | None = None
    preread: PrereadOptions | None = None

    @field_validator("n", mode="before")
    @classmethod
    def _one(cls, n: Any) -> Any:
        if n not in (None, 1):
            raise ValueError("only one choice is served: leave n out or set it to 1")
        return n

    def check(self) -> None:
        """Refuse what would change the answer and is not served. Raises BadParameter."""
        extra = self.model_extra or {}
        for name, unused in NOT_SERVED.items():
            if name in extra and extra[name] not in unused:
                raise BadParameter(name, f"{name} is not served: leave it out", "unsupported_parameter")
        for number, tool in enumerate(self.tools or ()):
            if tool.get("type") != "file_search":
                message = f"tools of type {tool.get('type')!r} are not served: only file_search is"
                raise BadParameter(f"tools.{number}", message, "unsupported_parameter")
            if tool.get("filters"):
                raise BadParameter(
                    f"tools.{number}.filters", "filters are served by vector_stores/{id}/search only"
                )
        for name in (self.preread.model_extra or {}) if self.preread else ():
            near = difflib.get_close_matches(name, PrereadOptions.model_fields, n=1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"known are {', '.join(PrereadOptions.model_fields)}"
            )
            raise BadParameter(
                f"preread.{name}", f"unknown option {name!r} in preread: {hint}", "unknown_parameter"
            )

    def plain_messages(self) -> tuple[Message, ...]:
        """All messages as text. Raises BadParameter."""
        messages = tuple(message.plain(f"messages.{i}") for i, message in enumerate(self.messages))
        if not any(message.role == "user" and message.content.strip() for message in messages):
            raise BadParameter("messages", "there is no user message with text")
        return messages

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises BadParameter."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS:
            raise BadParameter("stop", f"at most {MAX_STOPS} stop strings are served")
        return tuple(stop for stop in stops if stop)

    def top_k(self, default: int) -> int:
        """How many chunks to look up."""
        if self.preread and self.preread.top_k:
            return self.preread.top_k
        asked = [tool.get("max_num_results") for tool in self.tools or ()]
        return next((min(k, MAX_TOP_K) for k in asked if isinstance(k, int) and k > 0), default)


def corpus_names(body: ChatBody, model_id: str) -> list[str]:
    """The corpora that the request names, from the first place that names any. Raises BadParameter."""
    _, _, named = body.model.removeprefix(model_id).partition("@")
    if named:
        return [named]
    if body.vector_store_ids:
        return body.vector_store_ids
    searched = [name for tool in body.tools or () for name in tool.get("vector_store_ids") or ()]
    if searched:
        if not all(isinstance(name, str) for name in searched):
            raise BadParameter("tools", "vector_store_ids are strings")
        return searched
    corpus = (body.metadata or {}).get("corpus")
    if corpus is not None and not isinstance(corpus, str):
        raise BadParameter("metadata.corpus", "metadata.corpus is the id or name of one vector store")
    return [corpus] if corpus else []


def retrieval_query(messages: tuple[Message, ...]) -> str:
    """The last user message; if it is very short, behind the end of the user turn before it."""
    turns = [
        message.content.strip() for message in messages if message.role == "user" and message.content.strip()
    ]
    if len(turns) > 1 and len(turns[-1]) < SHORT_QUESTION:
        return f"{turns[-2][-EARLIER:]}\n{turns[-1]}"
    return turns[-1]
