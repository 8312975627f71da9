"""Bodies whose fields are known, and refusals in plain words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

UNKNOWN, UNSUPPORTED = "unknown_parameter", "unsupported_parameter"
# What is expected, by the error that says that it is something else.
EXPECTED: Mapping[str, str] = MappingProxyType({
    "string_type": "a text", "none_required": "null", "bool_type": "true or false", "bool_parsing": "true or false",
    "int_type": "a whole number", "int_parsing": "a whole number", "int_from_float": "a whole number",
    "int_parsing_size": "a smaller whole number", "float_type": "a number", "float_parsing": "a number",
    "finite_number": "a finite number", "list_type": "a list", "dict_type": "an object", "model_type": "an object",
    "model_attributes_type": "an object",
})  # fmt: skip
# How pydantic begins to say what it wanted to have.
WANTED = ("Value error, ", "Input should be ", "List should have ", "String should have ", "Dictionary should have ")


class NotServed(NamedTuple):
    """A field that would change something. `unused`: values that mean that it is not used."""

    unused: tuple[Any, ...] = (None,)
    instead: str = "leave it out"


def _told(schema: dict[str, Any], body: type[Body]) -> None:
    """The OpenAPI document has the fields, too, that are none of a body's own."""
    told: dict[str, Any] = {name: {"description": "Changes nothing."} for name in sorted(body.ignored)}
    told |= {name: {"enum": [*each.unused], "description": "Not served."} for name, each in body.not_served.items()}
    schema["properties"] = told | schema.get("properties", {})
    schema.update(body.also_told)


class Body(BaseModel):
    """A body that refuses fields that it does not know, since a misspelt limit that is passed over is no limit. Of OpenAI's
    clients' fields `ignored` are those that change nothing here."""

    # Strict: a truth value is no number, and a text is neither, as the document says.
    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_told)
    ignored: ClassVar[frozenset[str]] = frozenset()
    not_served: ClassVar[Mapping[str, NotServed]] = MappingProxyType({})
    also_told: ClassVar[Mapping[str, Any]] = MappingProxyType({})  # what the document says of the body as a whole

    @model_validator(mode="before")
    @classmethod
    def _known_only(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in given.items():
            if (unserved := cls.not_served.get(name)) is not None:
                if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in unserved.unused):
                    told = {"name": name, "instead": unserved.instead}
                    raise PydanticCustomError(UNSUPPORTED, "not served: {instead}", told)
            elif name not in known and name not in cls.ignored:
                hint = hint_for(str(name), known | cls.not_served.keys())
                raise PydanticCustomError(UNKNOWN, "Unknown parameter{hint}", {"name": str(name)[:200], "hint": hint})
        return {name: value for name, value in given.items() if name in known}


def hint_for(name: str, known: Iterable[str]) -> str:
    """What may have been meant."""
    near = difflib.get_close_matches(name[:100], sorted(known), n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def refusal(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str, str, str]:
    """Of what pydantic has found wrong with a body: the field, what is wrong with it, and OpenAI's code. Where several kinds of
    value are allowed, what is said is of the kind that was meant."""
    places = [(_place(error, body), error) for error in errors]
    first = places[0][0]
    near = [(place, error) for place, error in places if place[: len(first)] == first]
    # Somebody who gives a list of 21 texts where a text or 20 may stand has not meant to give a text.
    meant = [(place, error) for place, error in near if error["type"] not in EXPECTED] or near
    place, error = max(meant, key=lambda each: len(each[0]))
    param = ".".join(map(str, place))
    if error["type"] == UNKNOWN:
        return param, f"Unknown parameter: {param!r}{error['ctx']['hint']}", UNKNOWN
    if error["type"] == UNSUPPORTED:
        return param, f"{param} is {error['msg']}", UNSUPPORTED
    if error["type"] == "missing":
        return param, f"{param} is missing", "missing_required_parameter"
    kinds = dict.fromkeys(EXPECTED[each["type"]] for at, each in near if at == place and each["type"] in EXPECTED)
    if error["type"] in EXPECTED:
        return param, f"{param}: {' or '.join(kinds)} is expected", "invalid_value"
    return param, f"{param}: {_plain(error)}" if param else _plain(error), "invalid_value"


def _place(error: Mapping[str, Any], body: Any) -> tuple[str | int, ...]:
    """Names and numbers that lead through the body to what is wrong, without the names of kinds of value."""
    found: list[str | int] = []
    here = body
    for part in error["loc"]:
        if (isinstance(here, Mapping) and part in here) or (
            isinstance(here, list) and isinstance(part, int) and part < len(here)
        ):
            found.append(part)
            here = here[part]
    if error["type"] == "missing" or not isinstance(body, Mapping | list):
        found.append(error["loc"][-1])
    if error["type"] in (UNKNOWN, UNSUPPORTED):
        found.append(error["ctx"]["name"])
    return tuple(found)


def _plain(error: Mapping[str, Any]) -> str:
    if error["type"] == "union_tag_invalid":
        return f"its {error['ctx']['discriminator'].strip(chr(39))} is one of {error['ctx']['expected_tags']}"
    message = str(error["msg"])
    for beginning in WANTED:
        message = message.removeprefix(beginning)
    return message.replace(" after validation", "")
