"""Function tools in the form that the Hermes and Qwen families learn: functions as JSON within <tools>, calls as JSON within
<tool_call>, results within <tool_response>. They are written as text behind the passages, so that they move no stored KV and
every chat template takes them; a model that has learnt another form is told of this one."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, Field

from serving.api.errors import BadParameter
from serving.engine.types import Message, Shape

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_TOOLS = 128
VALUES = frozenset({"const", "enum", "default", "examples"})  # of JSON Schema: what they hold is no schema
NAMING = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})  # schemas by name
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class Function(BaseModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class CalledFunction(BaseModel):
    name: Name
    arguments: str = "{}"


class ToolCall(BaseModel):
    """A call in an assistant's message of the history."""

    id: str
    function: CalledFunction

    def plain(self, where: str) -> str:
        """The call as text. Raises BadParameter."""
        try:
            try:
                arguments = json.loads(self.function.arguments or "{}")
            except ValueError:
                arguments = self.function.arguments
            return _call_text(self.function.name, arguments)
        except RecursionError as error:
            raise BadParameter(f"{where}.function.arguments", "the arguments of this call are nested too deeply") from error


@dataclass(frozen=True)
class Call:
    """A call that the model has made. `arguments`: JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def shown(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Tools:
    """The functions that a request offers. `required`: the answer is to be a call of one of them."""

    functions: tuple[Function, ...]
    required: bool = False
    parallel: bool = True

    def rules(self) -> str:
        """What the model is told."""
        listed = [{"type": "function", "function": one.model_dump(exclude_none=True)} for one in self.functions]
        signatures = "\n".join(json.dumps(one, ensure_ascii=False) for one in listed)
        call = '{"name": <function name>, "arguments": <arguments as a JSON object>}'
        return (
            f"# Tools\n\nYou may call functions to help with the request. Their signatures:\n<tools>\n{signatures}\n</tools>\n\n"
            f"To call one, answer with its name and arguments as JSON within tags:\n{OPEN}\n{call}\n{CLOSE}"
        )

    def shape(self) -> Shape | None:
        """Holds the answer to a call, where one is required. Raises BadParameter."""
        if not self.required:
            return None
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": one.name},
                    "arguments": _placed(one.parameters or {"type": "object"}, f"#/anyOf/{number}/properties/arguments"),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for number, one in enumerate(self.functions)
        ]
        return Shape({"anyOf": calls}, f"{OPEN}\n", f"\n{CLOSE}")

    @property
    def names(self) -> frozenset[str]:
        return frozenset(one.name for one in self.functions)


class CallReader:
    """Tells calls from text while it comes. What looks like a call and is none, or of no function on offer, stays text."""

    def __init__(self, names: Collection[str], parallel: bool = True) -> None:
        self._names, self._most = names, None if parallel else 1
        self._held, self._inside, self._made = "", False, 0

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """The text and the calls that `text` makes certain."""
        self._held += text
        said, calls = "", list[Call]()
        while True:
            if not self._inside:
                before, found, after = self._held.partition(OPEN)
                if not found:
                    keep = _beginning_of(OPEN, before)
                    said, self._held = said + before[: len(before) - keep], before[len(before) - keep :]
                    return said, calls
                said, self._held, self._inside = said + before, after, True
            body, found, after = self._held.partition(CLOSE)
            if not found:
                return said, calls
            self._held, self._inside = after, False
            text, made = self._read(body, found)
            said, calls = said + text, calls + made

    def finish(self) -> tuple[str, list[Call]]:
        """What is left at the end; a model may leave out the last closing tag."""
        held, self._held = self._held, ""
        return self._read(held, "") if self._inside else (held, [])

    def _read(self, body: str, close: str) -> tuple[str, list[Call]]:
        call = _read_call(body)
        if call is None or call.name not in self._names:
            return OPEN + body + close, []
        self._made += 1
        return "", [call] if self._most is None or self._made <= self._most else []


def _read_call(body: str) -> Call | None:
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(read, dict) or not isinstance(read.get("name"), str):
        return None
    arguments = read.get("arguments", {})
    return Call(read["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _beginning_of(mark: str, text: str) -> int:
    """The length of the longest end of `text` that begins `mark`."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)


def _call_text(name: str, arguments: Any) -> str:
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def _placed(parameters: dict[str, Any], place: str) -> dict[str, Any]:
    """A function's schema as part of another one: what refers to its own root does so by its place there. Raises
    BadParameter."""
    try:
        moved: dict[str, Any] = _moved({name: value for name, value in parameters.items() if name != "$id"}, place)
    except RecursionError as error:
        raise BadParameter("tools", "the parameters of a function are nested too deeply") from error
    return moved


def _moved(schema: Any, place: str, names: bool = False) -> Any:
    """`names`: the keys are names of the caller's own, not words of JSON Schema."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for name, value in schema.items():
        if not names and name == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[name] = place + value[1:]
        elif not names and name in VALUES:
            moved[name] = value
        else:
            moved[name] = _moved(value, place, not names and name in NAMING)
    return moved


def response_text(content: str) -> str:
    """A tool's result as the model reads it."""
    return f"<tool_response>\n{content}\n</tool_response>"


def with_rules(messages: Sequence[Message], tools: Tools) -> tuple[Message, ...]:
    """The messages with the tools' rules in their system text."""
    first, *rest = messages
    if first.role == "system":
        return Message("system", f"{first.content}\n\n{tools.rules()}"), *rest
    return Message("system", tools.rules()), *messages


def offered(tools: Sequence[dict[str, Any]], choice: Any, parallel: bool) -> Tools | None:
    """The functions that the model may call. Raises BadParameter."""
    functions: dict[str, Function] = {}
    for number, tool in enumerate(tools):
        if tool.get("type") == "function":
            functions.update([_function(f"tools.{number}", tool)])
    named = _chosen_name(choice)
    if named is not None and named not in functions:
        raise BadParameter("tool_choice", f"tool_choice names {named!r}, which is not among the tools")
    if choice == "required" and not functions:
        raise BadParameter("tool_choice", "tool_choice is 'required', but there is no function among the tools")
    if not functions or choice == "none":
        return None
    wanted = functions.values() if named is None else [functions[named]]
    return Tools(tuple(wanted), required=choice == "required" or named is not None, parallel=parallel)


def _function(where: str, tool: dict[str, Any]) -> tuple[str, Function]:
    given = tool.get("function", tool)  # the Responses API has the fields beside `type`
    try:
        function = Function.model_validate(given)
    except ValueError as error:
        needed = "a function has a name of letters, digits, _ . -, and parameters as a schema"
        raise BadParameter(f"{where}.function", needed) from error
    return function.name, function


def _chosen_name(choice: Any) -> str | None:
    """Of `tool_choice`, the function that it names. Raises BadParameter."""
    if choice in (None, "auto", "none", "required"):
        return None
    if isinstance(choice, dict) and choice.get("type") == "file_search":
        return None
    if isinstance(choice, dict) and choice.get("type") == "function":
        named = choice.get("function", choice)
        if isinstance(named, dict) and isinstance(named.get("name"), str):
            return str(named["name"])
    raise BadParameter("tool_choice", "tool_choice is none, auto, required, or names one function")
