"""Turns of plain prompts whose KV is at hand from earlier prompts of the same asker.

A turn is kept under the digest of the asker, of all that stood before it, and of its own tokens. A prompt that begins like an
earlier one takes that beginning as it is, to the token: nothing of it is computed again. A turn that stands elsewhere now
(the history was trimmed, or put in another order) is found by its text alone, moved, and blended like a chunk.

Digests only find: tokens are compared. Each asker has turns of its own, so that nobody can tell by the clock what
another one said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch

from serving.engine.blended import BlendedCache, Kept
from serving.prompt import Passage, PromptPlan, TurnSpan
from storage.keys import length_prefixed, token_bytes

SHORTEST = 16  # tokens of a turn's text, or of what is left of a passage, that are worth a place of their own


@dataclass(frozen=True)
class KeptTurn(Kept):
    """`ids` stood at positions from `start` on; the turn's text begins with number `text` of them. `moved`: its text had been
    taken from another place already."""

    ids: tuple[int, ...] = ()
    start: int = 0
    text: int = 0
    moved: bool = False


class Piece(NamedTuple):
    """`kv` [layers, 2, kv_heads, end - start, head_dim] for positions [start, end) of a prompt; its K stands at `at`."""

    kv: torch.Tensor
    start: int
    end: int
    at: int
    chunks: frozenset[str]

    def until(self, end: int) -> Piece:
        return self._replace(kv=self.kv[:, :, :, : end - self.start], end=end)


@dataclass(frozen=True)
class Recalled:
    """What is at hand of a prompt: `prefix`, from position 0 without a gap, and `moved` turns behind it."""

    prefix: tuple[Piece, ...] = ()
    moved: tuple[Piece, ...] = ()

    @property
    def prefix_tokens(self) -> int:
        return self.prefix[-1].end if self.prefix else 0

    @property
    def moved_tokens(self) -> int:
        return sum(piece.end - piece.start for piece in self.moved)

    def without(self, passages: Sequence[Passage]) -> tuple[Passage, ...]:
        """The passages as far as they have to be blended still. (A turn is moved whole, so none lies in one partly.)"""
        found = []
        for each in passages:
            if cut := max(0, self.prefix_tokens - each.start):
                each = replace(each, start=each.start + cut, skip=each.skip + cut)
            left = each.end - each.start
            if left >= (SHORTEST if cut else 1) and not any(m.start < each.end and m.end > each.start for m in self.moved):
                found.append(each)
        return tuple(found)

    def chunks_before(self, end: int) -> Iterator[str]:
        """KV keys of the chunks that pieces before a position have seen."""
        return chain.from_iterable(p.chunks for p in (*self.prefix, *self.moved) if p.start < end)


class Conversations:
    """Finds and keeps turns in a `BlendedCache`. `scope` is the asker, whose turns nobody else is given."""

    def __init__(self, cache: BlendedCache) -> None:
        self._cache = cache

    def recall(self, scope: str, plan: PromptPlan) -> Recalled:
        """What is at hand of a plain prompt; never its last token, whose logits are asked for."""
        prefix, moved = list(self._prefix(scope, plan)), []
        for turn in plan.turns[:-1]:  # the last one is what is asked, and reads all that stands before it now
            start = prefix[-1].end if prefix else 0
            piece = self._moved(scope, plan, turn) if turn.end > start else None
            if piece is not None:
                if turn.text < start:  # which begins like another one there
                    prefix[-1] = prefix[-1].until(turn.text)
                moved.append(piece)
        return Recalled(tuple(piece for piece in prefix if piece.start < piece.end), tuple(moved))

    def keep(self, scope: str, plan: PromptPlan, kv: torch.Tensor, seen: Seen, forgotten: int) -> None:
        """Keep the turns of a prompt that has been computed, `kv` [layers, 2, kv_heads, capacity, head_dim]."""
        befores = list(_befores(scope, plan))
        for turn, before in reversed(list(zip(plan.turns, befores, strict=False))):  # its beginning leaves last
            moved = any(turn.text <= piece.start < turn.end for piece in seen.recalled.moved)
            self._put(scope, before, plan.tail[turn.start : turn.end], turn, kv, moved, seen, forgotten)

    def keep_answer(
        self, scope: str, plan: PromptPlan, answer: Sequence[int], kv: torch.Tensor, seen: Seen, forgotten: int
    ) -> None:
        """Keep the cue for the answer and those of its tokens whose KV is there."""
        *_, before = _befores(scope, plan)
        start, text = plan.turns[-1].end, plan.tokens
        turn = TurnSpan(start, text, text + len(answer))
        self._put(scope, before, (*plan.tail[start:], *answer), turn, kv, False, seen, forgotten)

    def _put(
        self, scope: str, before: bytes, ids: tuple[int, ...], turn: TurnSpan, kv: torch.Tensor, moved: bool, seen: Seen,
        forgotten: int,
    ) -> None:  # fmt: skip
        key = _digest(before, ids)
        if self._cache.get(key) is not None:  # which counts as use
            return
        text = turn.text - turn.start
        names = (("after", before), ("text", _digest(scope.encode(), ids[text:])))
        part = kv[:, :, :, turn.start : turn.end]
        entry = KeptTurn(part, frozenset(seen.chunks(turn.end)), names, ids, turn.start, text, moved)
        self._cache.put(key, entry, forgotten)

    def _prefix(self, scope: str, plan: PromptPlan) -> Iterator[Piece]:
        ids, last, at = plan.tail, plan.tokens - 1, 0
        for turn, before in zip(plan.turns, _befores(scope, plan), strict=False):
            own = ids[turn.start : turn.end]
            entry = self._cache.get(_digest(before, own))
            if not isinstance(entry, KeptTurn) or entry.ids != own or turn.end > last:
                break
            at = turn.end
            yield Piece(entry.kv, turn.start, at, turn.start, entry.chunks)
        else:
            before = list(_befores(scope, plan))[-1]
        if (part := self._part(before, ids[at:last], at)) is not None:
            yield part

    def _part(self, before: bytes, rest: Sequence[int], at: int) -> Piece | None:
        """The longest beginning of `rest` that has stood behind the same before."""
        turns = [entry for entry in self._cache.named(("after", before)) if isinstance(entry, KeptTurn)]
        common = [_alike(entry.ids, rest) for entry in turns]
        if not any(common):
            return None
        best = common.index(max(common))
        entry, end = turns[best], max(common)
        return Piece(entry.kv[:, :, :, :end], at, at + end, at, entry.chunks)

    def _moved(self, scope: str, plan: PromptPlan, turn: TurnSpan) -> Piece | None:
        """The text of a turn from where it stood; what was moved once is not moved again while the first one is there."""
        text = plan.tail[turn.text : turn.end]
        if len(text) < SHORTEST:
            return None
        name = ("text", _digest(scope.encode(), text))
        found = [e for e in self._cache.named(name) if isinstance(e, KeptTurn) and e.ids[e.text :] == text]
        if not found:
            return None
        entry = min(found, key=lambda each: each.moved)  # of equals the latest
        return Piece(entry.kv[:, :, :, entry.text :], turn.text, turn.end, entry.start + entry.text, entry.chunks)


class Seen(NamedTuple):
    """What of a prompt was not computed from its text: what was recalled, and the passages with stored KV."""

    recalled: Recalled
    passages: Sequence[Passage]

    def chunks(self, end: int) -> Iterator[str]:
        """KV keys of the stored chunks that a token before `end` may have seen."""
        stored = (p.chunk.kv_key for p in self.passages if p.start < end)
        return chain((key for key in stored if key), self.recalled.chunks_before(end))


def _befores(scope: str, plan: PromptPlan) -> Iterator[bytes]:
    """For each turn, and for the answer's cue, the digest of the asker and all that stands before it."""
    before = _digest(scope.encode(), ())
    yield before
    for turn in plan.turns:
        before = _digest(before, plan.tail[turn.start : turn.end])
        yield before


def _digest(before: bytes, ids: Sequence[int]) -> bytes:
    return hashlib.sha256(length_prefixed([before, token_bytes(ids)])).digest()


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens are the same at the start of both."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
