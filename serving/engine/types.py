"""What the API says to an engine and what it hears back. Engines are variants behind `Engine`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from storage.types import RetrievedChunk


@dataclass(frozen=True)
class Message:
    role: str  # system | user | assistant
    content: str


@dataclass(frozen=True)
class Emphasis:
    """Characters [start, end) of a document, to be paid `weight` times the attention (as odds, in every head)."""

    start: int
    end: int
    weight: float


@dataclass(frozen=True)
class Shape:
    """An answer is to be JSON of this schema, between two fixed texts."""

    schema: Mapping[str, Any]
    before: str = ""
    after: str = ""


@dataclass(frozen=True)
class GenerateRequest:
    """One answer to be made. `chunks` come in retrieval rank order; the engine may drop the last ones to fit.
    `emphasis`: by chunk id; of spans that overlap the last one counts. `prompt`: a text or token ids to go on with, as they
    are, instead of messages and chunks."""

    messages: tuple[Message, ...]
    chunks: tuple[RetrievedChunk, ...] = ()
    method: str = "default"  # full | reuse | epic:K | cacheblend:R | default
    max_tokens: int = 256
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    emphasis: Mapping[int, tuple[Emphasis, ...]] = field(default_factory=dict)
    grounded: bool = False  # under the grounding rules, even if no chunk was found
    needs_chunks: bool = False  # refuse, as too long, a question that leaves no room for a chunk
    prompt: str | tuple[int, ...] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # by token id
    logprobs: int | None = None  # how many alternatives are told of each token; None: nothing is told
    shape: Shape | None = None
    ignore_eos: bool = False  # the model's end of an answer does not end it; for measuring
    known: tuple[RetrievedChunk, ...] = ()  # stored chunks that may stand in the messages themselves
    scope: str = ""  # whose request this is: nobody else gets what is kept of its messages; empty: nothing is kept


@dataclass(frozen=True)
class ChunkNotReused:
    chunk_id: int
    reason: str  # a `Miss`, "pending" (KV not computed yet), "policy" (a rule keeps it out), "method" or "model";
    # of vLLM "prefix" (the order comes again: read in full, so that its prefix cache has it) or "refused" (the plan)


@dataclass(frozen=True)
class ChunkReused:
    chunk_id: int
    tier: str  # that had it: device | memory | disk | store, or what lies behind


@dataclass(frozen=True)
class ChunkInText:
    """A stored chunk that was found in the caller's own text: so many tokens of it, from a position of the prompt on."""

    chunk_id: int
    file_id: str
    path: str
    position: int
    tokens: int


@dataclass
class Report:
    """How the prompt's KV came about. Token counts are of the prompt; the three add up to it."""

    method: str = "default"
    chunks: int = 0  # that were retrieved, and stand in the prompt
    tokens_reused: int = 0  # taken from stored KV and kept as they were
    tokens_recomputed: int = 0  # taken from stored KV, then computed again
    tokens_computed: int = 0  # had no stored KV: question, missing chunks, some labels
    recomputed_fraction: float = 0.0  # of all token-layers with stored KV
    bytes_fetched: int = 0
    ms: dict[str, float] = field(default_factory=dict)  # plan, queue, fetch, assemble (part of blend), blend, first_token
    not_reused: list[ChunkNotReused] = field(default_factory=list)
    reused: list[ChunkReused] = field(default_factory=list)
    full_prefill_reason: str | None = None  # why the model is not blended at all
    resumed: bool = False  # chunks were blended for an earlier answer, and are taken as they were then
    tokens_emphasised: int = 0  # with another weight than 1
    in_text: list[ChunkInText] = field(default_factory=list)
    tokens_prefix: int = 0  # of a plain prompt: it begins with them like an earlier one, and they are reused as they were
    tokens_moved: int = 0  # of a plain prompt: turns that stood elsewhere in an earlier one


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the answer: its bytes, the natural logarithm of its probability, and the likeliest ones in its place."""

    bytes: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Delta:
    """A piece of the answer: whole characters only. `tokens`: those that begin in it, if they were asked for."""

    text: str
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass
class Outcome:
    """Set when the stream has ended."""

    text: str
    finish_reason: str  # stop | length; of what was cut off: cancelled
    prompt_tokens: int
    completion_tokens: int
    used_chunks: tuple[RetrievedChunk, ...]  # in prompt order: label [1] is the first
    report: Report


class Generation(Protocol):
    """A running answer. Iterate it to its end, then read `outcome`; `cancel()` ends the work within a second."""

    outcome: Outcome | None

    def so_far(self) -> Outcome | None:
        """The outcome, or what it would be if the answer were cut off now, without its text. None: the work has not begun."""
        ...

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def cancel(self) -> None: ...


class Engine(Protocol):
    """Answers requests over one model."""

    model_id: str
    full_prefill_reason: str | None  # why blending is off for this model, if it is

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer at most."""
        ...

    def canary_totals(self) -> tuple[int, float]:
        """Answers compared with full prefill so far, and the sum of their KL."""
        ...

    def prepare(self, request: GenerateRequest) -> Any:
        """What a request needs that may take a while, its prompt before all; call from a thread before `submit`, which does not
        wait. The answer serves for all requests that differ in how tokens are drawn only.

        Raises UserError(code="invalid_json_schema") for a shape that is not served, UserError(code="invalid_value") for a
        token id that the model does not have, UserError(code="context_length_exceeded") if the question alone is too long,
        and UserError(code="invalid_request") for an unknown method."""
        ...

    def submit(self, request: GenerateRequest, prepared: Any = None) -> Generation:
        """Queue a request; call from the event loop's thread. `prepared`: of `prepare`; without it the prompt is planned here.

        Raises Overloaded if the queue is full."""
        ...

    def check_room(self) -> None:
        """Raises Overloaded if `submit` would now: before work is done for a request that is refused in the end."""
        ...

    def check(self) -> None:
        """Raises PrereadError if the engine cannot answer."""
        ...

    def drain(self) -> None:
        """Refuse with Stopping what comes and what waits; answers that are being computed go on. Signal handlers may call it."""
        ...

    def abandon(self) -> None:
        """End with Stopping what still goes on."""
        ...

    def close(self) -> None: ...
