"""The parameters that all who ask for a text share, as OpenAI's clients send them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from serving.api.bodies import Body
from serving.api.errors import BadParameter

MAX_STOPS = 4
MAX_CHOICES = 8  # each is an answer of its own in the engine's queue
MAX_BIASES = 1024
# Parameters that change nothing here: who asks, what is kept, how it is billed, how much is thought.
IGNORED = frozenset({
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "reasoning_effort", "verbosity",
})  # fmt: skip
TEMPERATURE = "Where none is given it is 0: the likeliest token each time, so that answers can be repeated. (OpenAI's is 1.)"


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingBody(Body):
    """Fields common to chat/completions and completions."""

    ignored = IGNORED

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(None, description=TEMPERATURE)
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=MAX_BIASES, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}),
    ] | None = None
    ignore_eos: bool = False  # vLLM's: for measuring

    def check(self) -> None:
        """Refuse what no schema can say. Raises BadParameter."""
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
