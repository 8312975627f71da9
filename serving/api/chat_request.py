"""A chat request as OpenAI's clients send it, and what we make of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field, WithJsonSchema

from retrieval.relevance import RELEVANT
from serving.api import tools as calls
from serving.api.bodies import UNSUPPORTED, Body, NotServed
from serving.api.errors import BadParameter
from serving.api.file_search import FileSearch, Score
from serving.api.sampling import SamplingBody
from serving.api.shapes import asked
from serving.api.times import Moment
from serving.emphasis import LEAST, MOST
from serving.engine.types import Message, Shape

MAX_TOP_K = 100
SCHEMA_LIMIT = 64 << 10  # characters
SHORT_QUESTION = 25  # characters; "and in 2023?" means little without the turn before
EARLIER = 200  # characters of the user turn before that help a short question
EMPHASIS = asked.weights(LEAST, MOST, r"^(doc|file)-[^:]*$")  # or <id>:<start>-<end>, whose order no schema can say
TASK, HISTORY = "### Task:", "<chat_history>"


class TextPart(BaseModel):
    type: Annotated[str, Field(json_schema_extra={"enum": ["text", "input_text", "output_text", "refusal"]})]
    text: str | None = None
    refusal: str | None = None


class ChatMessage(BaseModel):
    role: Annotated[str, Field(json_schema_extra={"enum": ["system", "developer", "user", "assistant", "tool"]})]
    content: str | list[TextPart] | None = None
    tool_calls: list[calls.ToolCall] | None = None

    def plain(self, where: str) -> Message:
        """The message as text. Raises BadParameter."""
        role = {"developer": "system", "tool": "user"}.get(self.role, self.role)
        if role not in ("system", "user", "assistant"):
            known = "use system, developer, user, assistant or tool"
            raise BadParameter(f"{where}.role", f"role {self.role!r} is not served: {known}")
        content = self.text(where)
        if self.role == "tool":
            content = calls.response_text(content)
        made = [call.plain(f"{where}.tool_calls.{i}") for i, call in enumerate(self.tool_calls or ())]
        return Message(role, "\n".join([content, *made] if content else made))

    def text(self, where: str) -> str:
        """What it says. Raises BadParameter."""
        if isinstance(self.content, list):
            return "\n".join(_text_of(part, where) for part in self.content)
        return self.content or ""


def _text_of(part: TextPart, where: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in ("text", "input_text", "output_text", "refusal") or text is None:
        raise BadParameter(f"{where}.content", f"content of type {part.type!r} is not served: send text")
    return text


class PrereadOptions(Body):
    """Our own options, under `preread`."""

    method: str | None = None
    top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K)] | None = None
    emphasis: Annotated[dict[str, float], Field(max_length=200, json_schema_extra=EMPHASIS)] = Field({})  # see serving.emphasis
    as_of: Moment | None = None  # passages of what was current then
    require_context: bool = False  # refuse rather than answer without a passage
    min_score: Score | None = None  # of a passage; by default RELEVANT with require_context, and any without


class ChatBody(SamplingBody):
    """The body of chat/completions."""

    not_served: ClassVar[Mapping[str, NotServed]] = {
        "functions": NotServed((None, []), "use tools"),
        "function_call": NotServed((None, "none"), "use tool_choice"),
        "modalities": NotServed((None, ["text"])),
        "audio": NotServed(),
        "web_search_options": NotServed(),
        "prediction": NotServed(),
        "moderation": NotServed(),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[
        Annotated[list[dict[str, Any]], Field(max_length=calls.MAX_TOOLS)] | None, WithJsonSchema(asked.tools(calls.MAX_TOOLS))
    ] = None
    tool_choice: Annotated[Any, WithJsonSchema(asked.tool_choice())] = None
    parallel_tool_calls: bool | None = None
    vector_store_ids: list[str] | None = None
    metadata: dict[str, Any] | None = None
    preread: PrereadOptions | None = None

    def check(self) -> None:
        """See `SamplingBody.check`."""
        super().check()
        for number, tool in enumerate(self.tools or ()):
            if tool.get("type") not in ("file_search", "function"):
                message = f"tools of type {str(tool.get('type'))[:100]!r} are not served: file_search and function are"
                raise BadParameter(f"tools.{number}", message, UNSUPPORTED)
        self.filters()
        for name in self.preread.emphasis if self.preread else ():
            if not name.startswith(("doc-", "file-")):
                raise BadParameter("preread.emphasis", f"{name[:100]!r} is no id of a document or a file")
        if self.top_logprobs and not self.logprobs:
            raise BadParameter("top_logprobs", "top_logprobs needs logprobs to be true")

    def plain_messages(self) -> tuple[Message, ...]:
        """All messages as text; results of tools that follow one another are one turn. Raises BadParameter."""
        messages: list[Message] = []
        for number, message in enumerate(self.messages):
            plain = message.plain(f"messages.{number}")
            if number and message.role == self.messages[number - 1].role == "tool":
                plain = Message(plain.role, f"{messages.pop().content}\n{plain.content}")
            messages.append(plain)
        if not any(message.role == "user" and message.content.strip() for message in messages):
            raise BadParameter("messages", "there is no user message with text")
        return tuple(messages)

    def functions(self) -> calls.Tools | None:
        """The functions that the model may call. Raises BadParameter."""
        return calls.offered(self.tools or (), self.tool_choice, self.parallel_tool_calls is not False)

    def searches(self) -> list[FileSearch]:
        """The file_search tools. Raises BadParameter."""
        tools = enumerate(self.tools or ())
        return [FileSearch.read(tool, f"tools.{number}") for number, tool in tools if tool.get("type") == "file_search"]

    def shape(self) -> Shape | None:
        """What `response_format` asks for. Raises BadParameter."""
        form = self.response_format or {"type": "text"}
        match form.get("type"):
            case "text":
                return None
            case "json_object":
                return Shape({"type": "object"})
            case "json_schema":
                given = form.get("json_schema")
                schema = given.get("schema") if isinstance(given, dict) else None
                if not isinstance(schema, dict):
                    raise BadParameter("response_format.json_schema.schema", "a JSON schema is expected here")
                if len(json.dumps(schema)) > SCHEMA_LIMIT:
                    raise BadParameter("response_format", f"a schema of up to {SCHEMA_LIMIT:,} characters is served")
                return Shape(schema)
        raise BadParameter("response_format.type", "response_format is text, json_object or json_schema")

    def top_k(self, default: int) -> int:
        """How many chunks to look up."""
        if self.preread and self.preread.top_k:
            return self.preread.top_k
        return next((tool.max_num_results for tool in self.searches() if tool.max_num_results), default)

    def filters(self) -> dict[str, Any] | None:
        """What the file_search tool restricts the search to. Raises BadParameter."""
        given = [tool.filters for tool in self.searches() if tool.filters is not None]
        if len(given) > 1:
            raise BadParameter("tools", "filters are served with one file_search tool, not with several")
        return given[0] if given else None

    def min_score(self) -> float | None:
        """Below which nothing is taken. None: whatever was found, but where an answer without a passage is to be refused.
        Raises BadParameter."""
        if self.preread and self.preread.min_score is not None:
            return self.preread.min_score
        options = [tool.ranking_options for tool in self.searches() if tool.ranking_options]
        thresholds = [one.score_threshold for one in options if one.score_threshold is not None]
        needs = RELEVANT if self.preread and self.preread.require_context else None
        return max(thresholds, default=needs)

    def rerank(self) -> bool:
        """Whether a reranker may have the last word."""
        return all(tool.ranking_options is None or tool.ranking_options.ranker != "none" for tool in self.searches())

    def is_housekeeping(self) -> bool:
        """A chat page asks for a title, tags or next questions of the conversation: nothing is to be looked up for that. Such
        requests of Open WebUI are one turn that begins with a heading for the task and encloses the conversation in a tag."""
        said = [message for message in self.messages if message.role not in ("system", "developer")]
        text = said[0].text("messages") if len(said) == 1 else ""
        return text.lstrip().startswith(TASK) and HISTORY in text


def corpus_names(body: ChatBody, model_id: str) -> list[str]:
    """The corpora that the request names, from the first place that names any. Raises BadParameter."""
    _, _, named = body.model.removeprefix(model_id).partition("@")
    if named:
        return [named]
    if body.vector_store_ids:
        return body.vector_store_ids
    searched = [name for tool in body.searches() for name in tool.vector_store_ids or ()]
    if searched:
        return searched
    corpus = (body.metadata or {}).get("corpus")
    if corpus is not None and not isinstance(corpus, str):
        raise BadParameter("metadata.corpus", "metadata.corpus is the id or name of one vector store")
    return [corpus] if corpus else []


def retrieval_query(messages: Sequence[ChatMessage]) -> str:
    """The last user message; if it is very short, behind the end of the user turn before it."""
    said = [message.text("messages").strip() for message in messages if message.role == "user"]
    turns = [text for text in said if text] or [""]
    if len(turns) > 1 and len(turns[-1]) < SHORT_QUESTION:
        return f"{turns[-2][-EARLIER:]}\n{turns[-1]}"
    return turns[-1]
