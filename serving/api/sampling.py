"""The parameters that all who ask for a text share, as OpenAI's clients send them. What would change the answer and is not
served is refused in one line; what would not is ignored; what nobody knows is refused, as OpenAI does, with the nearest name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from serving.api.bodies import UNKNOWN, Body, hint_for
from serving.api.errors import BadParameter

MAX_STOPS = 4
MAX_CHOICES = 8  # each is an answer of its own in the engine's queue
MAX_BIASES = 1024
# Parameters that change nothing here: who asks, what is kept, how it is billed, how much is thought.
IGNORED = frozenset({
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "reasoning_effort", "verbosity",
})  # fmt: skip


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


def known_only(schema: dict[str, Any]) -> None:
    """What the OpenAPI document says of a body whose unknown fields are refused by name."""
    schema["additionalProperties"] = False
    schema["properties"].update({name: {"description": "Changes nothing."} for name in IGNORED - schema["properties"].keys()})


class SamplingBody(BaseModel):
    """Fields common to chat/completions and completions."""

    model_config = ConfigDict(extra="allow", json_schema_extra=known_only)
    # Parameters that would change the answer, and the values that mean "not used".
    not_served: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] | None = None
    ignore_eos: bool = False  # vLLM's: for measuring

    def check(self) -> None:
        """Refuse what would change the answer and is not served. Raises BadParameter."""
        for name, value in (self.model_extra or {}).items():
            if name in self.not_served:
                if value not in self.not_served[name]:
                    raise BadParameter(name, f"{name} is not served: leave it out", "unsupported_parameter")
            elif name not in IGNORED:
                raise unknown_parameter(name, name, [*type(self).model_fields, *self.not_served])
        if self.stream_options is not None and not self.stream:
            raise BadParameter("stream_options", "stream_options is only served with stream")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def stops(self) -> tuple[str, ...]:
        """The stop strings. Raises BadParameter."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS:
            raise BadParameter("stop", f"at most {MAX_STOPS} stop strings are served")
        return tuple(stop for stop in stops if stop)

    def biases(self) -> dict[int, float]:
        """By token id. Raises BadParameter."""
        if any(not (id.isascii() and id.isdecimal() and len(id) < 10) for id in self.logit_bias or ()):
            raise BadParameter("logit_bias", "logit_bias names token ids of the served model")
        return {int(id): value for id, value in (self.logit_bias or {}).items()}

    def sampling(self, number: int) -> dict[str, Any]:
        """Fields of the `GenerateRequest` for choice `number`. Raises BadParameter."""
        return {
            "temperature": 0.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "seed": None if self.seed is None else (self.seed + number) % (1 << 63),
            "stop": self.stops(),
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logit_bias": self.biases(),
            "ignore_eos": self.ignore_eos,
        }


def unknown_parameter(param: str, name: str, known: list[str]) -> BadParameter:
    """OpenAI's refusal, with what may have been meant."""
    return BadParameter(param, f"Unknown parameter: {param!r}{hint_for(name, known)}", UNKNOWN)
