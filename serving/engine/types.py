"""What the API says to an engine and what it hears back. Engines are variants behind `Engine`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

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
class GenerateRequest:
    """One answer to be made. `chunks` come in retrieval rank order; the engine may drop the last ones to fit.
    `emphasis`: by chunk id; of spans that overlap the last one counts."""

    messages: tuple[Message, ...]
    chunks: tuple[RetrievedChunk, ...] = ()
    method: str = "default"  # full | reuse | epic:K | cacheblend:R | default
    max_tokens: int = 256
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    emphasis: Mapping[int, tuple[Emphasis, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class ChunkNotReused:
    chunk_id: int
    reason: str  # a `Miss`, "pending" (KV not computed yet), "policy" (a rule keeps it out), "method" or "model"


@dataclass(frozen=True)
class ChunkReused:
    chunk_id: int
    tier: str  # that had it: device | memory | disk | store, or what lies behind


@dataclass
class Report:
    """How the prompt's KV came about. Token counts are of the prompt; the three add up to it."""

    method: str = "default"
    chunks: int = 0
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


@dataclass(frozen=True)
class Delta:
    """A piece of the answer: whole characters only."""

    text: str


@dataclass
class Outcome:
    """Set when the stream has ended."""

    text: str
    finish_reason: str  # stop | length
    prompt_tokens: int
    completion_tokens: int
    used_chunks: tuple[RetrievedChunk, ...]  # in prompt order: label [1] is the first
    report: Report


class Generation(Protocol):
    """A running answer. Iterate it to its end, then read `outcome`; `cancel()` ends the work within a second."""

    outcome: Outcome | None

    def __aiter__(self) -> AsyncIterator[Delta]: ...

    def cancel(self) -> None: ...


class Engine(Protocol):
    """Answers requests over one model."""

    model_id: str
    max_model_len: int
    full_prefill_reason: str | None  # why blending is off for this model, if it is

    def canary_totals(self) -> tuple[int, float]:
        """Answers compared with full prefill so far, and the sum of their KL."""
        ...

    def submit(self, request: GenerateRequest) -> Generation:
        """Queue a request; call from the event loop's thread.

        Raises UserError(code="context_length_exceeded") if the question alone is too long, UserError(code=
        "invalid_request") for an unknown method, and Overloaded if the queue is full."""
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
