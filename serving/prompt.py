"""The prompt plan: which chunks and turns fit, in token ids, before any KV is touched."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count

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
    """frame | (label, header, chunk)* | tail. `headers`: of the tables inside which chunks begin; empty for most. A plain prompt
    is `tail` alone, with no frame: `turns`, one behind the other, and the cue for the answer."""

    frame: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    chunks: tuple[RetrievedChunk, ...]
    tail: tuple[int, ...]
    turns: tuple[TurnSpan, ...] = ()
    headers: tuple[tuple[int, ...], ...] = ()

    @property
    def tokens(self) -> int:
        between = sum(map(len, (*self.labels, *self.headers)))
        return len(self.frame) + between + sum(len(c.token_ids) for c in self.chunks) + len(self.tail)

    @property
    def passages(self) -> tuple[Passage, ...]:
        """Where the chunks stand."""
        found, at = [], len(self.frame)
        for label, header, chunk in zip(self.labels, self.headers, self.chunks, strict=True):
            start = at + len(label) + len(header)
            at = start + len(chunk.token_ids)
            found.append(Passage(chunk, start, at))
        return tuple(found)


def plan_prompt(
    fmt: PromptFormat, messages: Sequence[Message], chunks: Sequence[RetrievedChunk], max_model_len: int, max_tokens: int,
    grounded: bool = False,
) -> PromptPlan:  # fmt: skip
    """Fit the prompt beside `max_tokens` of answer: the lowest-ranked chunks go first, then the oldest turns. `grounded`: it
    begins with the frame even if there are no chunks.

    Each text is encoded once, and the template is rendered O(log(turns)) times: with fewer turns a prompt is shorter, so
    how many go is bisected. Raises UserError(code="context_length_exceeded") if the last turn and the system text alone do
    not fit."""
    room = max_model_len - max_tokens
    turns, once, grounded = [Turn(m.role, m.content) for m in messages], fmt.remembering(), grounded or bool(chunks)
    plan = _plan(once, turns, grounded)
    if plan.tokens <= room:
        return _with_chunks(once, plan, chunks, room)

    def tokens(dropped: int) -> int:
        try:
            return _plan(once, _without(turns, dropped), grounded).tokens
        except UserError:
            return 0  # the template refuses this history: we go no further, and are told so below

    starts = _starts(turns)
    if (least := tokens(starts[-1])) > room:
        raise _too_long(least, max_tokens, max_model_len)
    first = bisect_left(starts, True, lo=1, hi=len(starts) - 1, key=lambda dropped: tokens(dropped) <= room)
    return _plan(once, _without(turns, starts[first]), grounded)


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


def _plan(fmt: PromptFormat, turns: Sequence[Turn], grounded: bool) -> PromptPlan:
    """With no chunks yet."""
    if grounded:
        return PromptPlan(tuple(fmt.frame), (), (), tuple(fmt.tail(turns)))
    pieces = fmt.plain_pieces(turns)
    ends = [0, *accumulate(map(len, pieces))]
    spans = tuple(TurnSpan(*ends[i : i + 3]) for i in range(0, len(pieces) - 1, 2))
    return PromptPlan((), (), (), tuple(chain.from_iterable(pieces)), spans)


def _with_chunks(fmt: PromptFormat, plan: PromptPlan, chunks: Sequence[RetrievedChunk], room: int) -> PromptPlan:
    """As many as fit, the best first."""
    labels, headers, tokens = [], [], plan.tokens
    for number, chunk in enumerate(chunks, 1):
        label, header = tuple(fmt.label(number)), tuple(fmt.header(chunk.header)) if chunk.header else ()
        tokens += len(label) + len(header) + len(chunk.token_ids)
        if tokens > room:
            break
        labels.append(label)
        headers.append(header)
    return replace(plan, labels=tuple(labels), headers=tuple(headers), chunks=tuple(chunks[: len(labels)]))


def _starts(turns: Sequence[Turn]) -> list[int]:
    """How many spoken turns may be dropped: the oldest with the answer that followed it, and so on; never the last one."""
    spoken = [turn for turn in turns if turn.role != "system"]
    starts, at = [0], 0
    while at < len(spoken) - 1:
        at += 1
        if at < len(spoken) - 1 and spoken[at].role == "assistant":
            at += 1
        starts.append(at)
    return starts


def _without(turns: Sequence[Turn], dropped: int) -> list[Turn]:
    """All but the first `dropped` spoken ones."""
    spoken = count()
    return [turn for turn in turns if turn.role == "system" or next(spoken) >= dropped]
