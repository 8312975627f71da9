"""The prompt plan: which chunks and turns fit, in token ids, before any KV is touched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

from precompute.frame import PromptFormat, Turn
from serving.engine.types import Message
from storage.errors import UserError
from storage.types import RetrievedChunk


@dataclass(frozen=True)
class Passage:
    """Where a chunk stands in a prompt: its tokens from number `skip` on, at [start, end)."""

    chunk: RetrievedChunk
    start: int
    end: int
    skip: int = 0


@dataclass(frozen=True)
class TurnSpan:
    """A turn of a plain prompt: what the template puts before its text, [start, text), and its text, [text, end)."""

    start: int
    text: int
    end: int


@dataclass(frozen=True)
class PromptPlan:
    """frame | (label, chunk)* | tail. A plain prompt is `tail` alone, with no frame: `turns`, one behind the other, and
    the cue for the answer."""

    frame: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    chunks: tuple[RetrievedChunk, ...]
    tail: tuple[int, ...]
    turns: tuple[TurnSpan, ...] = ()

    @property
    def tokens(self) -> int:
        return (
            len(self.frame) + sum(map(len, self.labels)) + sum(len(c.token_ids) for c in self.chunks) + len(self.tail)
        )

    @property
    def passages(self) -> tuple[Passage, ...]:
        """Where the chunks stand."""
        found, at = [], len(self.frame)
        for label, chunk in zip(self.labels, self.chunks, strict=True):
            start, at = at + len(label), at + len(label) + len(chunk.token_ids)
            found.append(Passage(chunk, start, at))
        return tuple(found)


def plan_prompt(
    fmt: PromptFormat, messages: Sequence[Message], chunks: Sequence[RetrievedChunk], max_model_len: int, max_tokens: int
) -> PromptPlan:
    """Fit the prompt beside `max_tokens` of answer: the lowest-ranked chunks go first, then the oldest turns.

    Raises UserError(code="context_length_exceeded") if the last turn and the system text alone do not fit."""
    room = max_model_len - max_tokens
    turns = [Turn(m.role, m.content) for m in messages]
    kept = list(chunks)
    while True:
        plan = _plan(fmt, turns, kept, grounded=bool(chunks))
        if plan.tokens <= room:
            return plan
        if kept:
            kept = kept[:-1]
        elif not _drop_oldest(turns):
            raise _too_long(plan.tokens, max_tokens, max_model_len)


def plan_text(ids: Sequence[int], max_model_len: int, max_tokens: int) -> PromptPlan:
    """The prompt of a plain completion: these ids, and nothing around them. Raises UserError(code="context_length_exceeded")."""
    if len(ids) + max_tokens > max_model_len:
        raise _too_long(len(ids), max_tokens, max_model_len)
    return PromptPlan((), (), (), tuple(ids))


def _too_long(tokens: int, max_tokens: int, max_model_len: int) -> UserError:
    return UserError(
        f"the prompt needs {tokens} tokens and {max_tokens} are reserved for the answer, but the model takes "
        f"{max_model_len}: shorten the question or lower max_tokens",
        code="context_length_exceeded",
    )


def _plan(fmt: PromptFormat, turns: Sequence[Turn], chunks: Sequence[RetrievedChunk], grounded: bool) -> PromptPlan:
    if not grounded:
        pieces = fmt.plain_pieces(turns)
        ends = [0, *accumulate(map(len, pieces))]
        spans = tuple(TurnSpan(*ends[i : i + 3]) for i in range(0, len(pieces) - 1, 2))
        return PromptPlan((), (), (), tuple(chain.from_iterable(pieces)), spans)
    labels = tuple(tuple(fmt.label(n)) for n in range(1, len(chunks) + 1))
    return PromptPlan(tuple(fmt.frame), labels, tuple(chunks), tuple(fmt.tail(turns)))


def _drop_oldest(turns: list[Turn]) -> bool:
    """Remove the oldest spoken turn, and the answer that followed it; False if only the last one is left."""
    spoken = [i for i, t in enumerate(turns) if t.role != "system"]
    if len(spoken) < 2:
        return False
    del turns[spoken[0]]
    if spoken[1] - 1 < len(turns) - 1 and turns[spoken[1] - 1].role == "assistant":
        del turns[spoken[1] - 1]
    return True
