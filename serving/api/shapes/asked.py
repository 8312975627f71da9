"""What the OpenAPI document says of fields whose values are read by hand, since pydantic would refuse them in no plain words:
JSON Schema, as tight as the reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
SOME_TEXT: Schema = {"type": "string", "minLength": 1}
TOKEN_IDS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PATH: Schema = {"type": "string", "minLength": 1, "maxLength": 4096, "pattern": r"^[^\x00]+$"}
OBJECT: Schema = {"type": "object"}
NAMED = r"^[A-Za-z0-9_.-]{1,64}$"  # a function


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def texts_or_ids(most: int) -> Schema:
    """A text, token ids, or up to `most` of either."""
    several = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [SOME_TEXT, {**several, "items": SOME_TEXT}, TOKEN_IDS, {**several, "items": TOKEN_IDS}]}


def closed(kind: str | None, required: Mapping[str, Schema], more: Mapping[str, Schema] | None = None) -> Schema:
    """An object of a `type`, with no other fields than these."""
    named = {"type": {"const": kind}, **required} if kind else dict(required)
    return {"type": "object", "required": [*named], "properties": {**named, **(more or {})}, "additionalProperties": False}


def _filters(deeper: int) -> Schema:
    """OpenAI's grammar, see retrieval.filters; written out for some levels, since a schema of a field cannot name itself."""
    value: Schema = {"type": ["string", "number", "boolean"]}
    compared = closed(None, {"type": {"enum": ["eq", "ne", "gt", "gte", "lt", "lte"]}, "key": TEXT, "value": value})
    among = closed(None, {"type": {"enum": ["in", "nin"]}, "key": TEXT, "value": {"type": "array", "items": value}})
    if not deeper:
        return {"anyOf": [compared, among]}
    several = {"type": "array", "minItems": 1, "maxItems": 16, "items": _filters(deeper - 1)}
    return {"anyOf": [compared, among, closed(None, {"type": {"enum": ["and", "or"]}, "filters": several})]}


FILTERS = _filters(2)
_RANKING = {
    "ranker": {"enum": ["none", "auto", "default-2024-11-15"]},
    "score_threshold": or_null({"type": "number", "minimum": 0, "maximum": 1}),
}
FILE_SEARCH = closed(
    "file_search",
    {},
    {
        "vector_store_ids": or_null({"type": "array", "items": TEXT}),
        "max_num_results": or_null({"type": "integer", "minimum": 1, "maximum": 50}),
        "filters": or_null(FILTERS),
        "ranking_options": or_null(closed(None, {}, _RANKING)),
    },
)
_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": NAMED}, "description": or_null(TEXT), "parameters": or_null(OBJECT),
    },
}  # fmt: skip
_IS_FUNCTION: Schema = {"type": {"const": "function"}}
_OF_CHAT = {"type": "object", "required": ["type", "function"], "properties": {**_IS_FUNCTION, "function": _FUNCTION}}
_OF_RESPONSES = {**_FUNCTION, "required": ["type", "name"], "properties": {**_IS_FUNCTION, **_FUNCTION["properties"]}}


def tools(most: int, responses: bool = False) -> Schema:
    """file_search, and functions in the form of chat/completions or of responses."""
    item = {"anyOf": [FILE_SEARCH, _OF_RESPONSES if responses else _OF_CHAT]}
    return or_null({"type": "array", "maxItems": most, "items": item})


def tool_choice(responses: bool = False) -> Schema:
    name: Schema = {"name": {"type": "string", "pattern": NAMED}}
    named = name if responses else {"function": {"type": "object", "required": ["name"], "properties": name}}
    function = {"type": "object", "required": ["type", *named], "properties": {**_IS_FUNCTION, **named}}
    search = {"type": "object", "required": ["type"], "properties": {"type": {"const": "file_search"}}}
    return {"anyOf": [{"enum": ["none", "auto", "required", None]}, function, search]}


def items() -> Schema:
    """The input of responses: a text, or a conversation as items. `type` message may be left out."""
    part: Schema = {
        "type": "object", "required": ["type", "text"],
        "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": TEXT},
    }  # fmt: skip
    said: Schema = {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "type": {"const": "message"},
            "role": {"enum": ["user", "assistant", "system", "developer"]},
            "content": {"anyOf": [TEXT, {"type": "array", "items": part}]},
        },
    }
    call = {"call_id": TEXT, "name": {"type": "string", "pattern": NAMED}, "arguments": TEXT}
    others = [
        {"type": "object", "required": ["type", *fields], "properties": {"type": {"const": kind}, **fields}}
        for kind, fields in {"function_call": call, "function_call_output": {"call_id": TEXT, "output": TEXT},
                             "file_search_call": {}, "reasoning": {}}.items()
    ]  # fmt: skip
    return {"anyOf": [TEXT, {"type": "array", "minItems": 1, "items": {"anyOf": [said, *others]}}]}


def weights(least: float, most: float, names: str | None = None) -> Schema:
    """For `json_schema_extra`. What is emphasised → how much; `names`: a pattern."""
    named = {"propertyNames": {"pattern": names}} if names else {}
    return {"additionalProperties": {"type": "number", "minimum": least, "maximum": most}, **named}


def one_of(*names: str, filled: Schema) -> Schema:
    """For `json_schema_extra`. Exactly one of these fields is `filled`."""
    return {"oneOf": [{"required": [name], "properties": {name: filled}} for name in names]}
