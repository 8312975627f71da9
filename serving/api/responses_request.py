"""A request of the Responses API as a chat request: what it adds to that is items for turns, and no memory here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, ValidationError, WithJsonSchema

from serving.api.bodies import Body, NotServed, refusal
from serving.api.chat_request import ChatBody, PrereadOptions
from serving.api.errors import BadParameter
from serving.api.sampling import IGNORED, TEMPERATURE, StreamOptions
from serving.api.shapes import asked
from serving.api.tools import MAX_TOOLS

RESULTS, LOGPROBS = "file_search_call.results", "message.output_text.logprobs"
WHOLE = "send the whole conversation as input"
# What the client may send back of an earlier answer, and nobody has to read again.
PASSED_OVER = frozenset({"file_search_call", "reasoning"})


class TextOptions(BaseModel):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Body):
    """The body of responses. Nothing is kept between requests."""

    not_served: ClassVar[Mapping[str, NotServed]] = {
        "previous_response_id": NotServed(instead=WHOLE),
        "conversation": NotServed(instead=WHOLE),
        "prompt": NotServed(),
        "background": NotServed((None, False)),
        "background_options": NotServed((None, {})),
        "context_management": NotServed((None, [])),
        "moderation": NotServed(),
        "access_programs": NotServed((None, {})),
    }
    ignored = IGNORED | {"max_tool_calls", "reasoning", "truncation", "image"}

    model: str
    input: Annotated[str | Annotated[list[dict[str, Any]], Field(min_length=1)], WithJsonSchema(asked.items())]
    instructions: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    tools: Annotated[list[dict[str, Any]] | None, WithJsonSchema(asked.tools(MAX_TOOLS, responses=True))] = None
    tool_choice: Annotated[Any, WithJsonSchema(asked.tool_choice(responses=True))] = None
    parallel_tool_calls: bool | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description=TEMPERATURE)
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: dict[str, Any] | None = None
    preread: PrereadOptions | None = None

    def chat(self) -> ChatBody:
        """The same as a chat request. Raises BadParameter."""
        turns = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self._turns(self.input)
        if self.instructions:
            turns.insert(0, {"role": "system", "content": self.instructions})
        given: dict[str, Any] = {
            "model": self.model,
            "messages": turns,
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "response_format": self._format(),
            "logprobs": self.wants(LOGPROBS) or None,
            "top_logprobs": self.top_logprobs if self.wants(LOGPROBS) else None,
            "preread": self.preread,
        }
        try:
            return ChatBody.model_validate(given)
        except ValidationError as error:
            where, message, code = refusal(error.errors(), given)
            raise BadParameter(where.replace("messages", "input", 1), message.replace("messages", "input", 1), code) from error

    def wants(self, name: str) -> bool:
        return name in (self.include or ())

    def _turns(self, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
        turns: list[dict[str, Any]] = []
        for number, item in enumerate(items):
            kind = item.get("type", "message")
            if kind == "message":
                turns.append({"role": item.get("role"), "content": item.get("content")})
            elif kind == "function_call":
                function = {name: item.get(name) for name in ("name", "arguments")}
                if not (turns and "tool_calls" in turns[-1]):
                    turns.append({"role": "assistant", "content": None, "tool_calls": []})
                turns[-1]["tool_calls"].append({"id": str(item.get("call_id")), "function": function})
            elif kind == "function_call_output":
                turns.append({"role": "tool", "content": item.get("output")})
            elif not isinstance(kind, str) or kind not in PASSED_OVER:
                raise BadParameter(f"input.{number}.type", f"input items of type {kind!r} are not served")
        if not turns:
            raise BadParameter("input", "there is no message in the input")
        return turns

    def _format(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if form is None or form.get("type") != "json_schema":
            return form
        return {"type": "json_schema", "json_schema": form}
