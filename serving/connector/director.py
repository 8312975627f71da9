"""The connector's half in vLLM's scheduler: which prompts are loaded, when, and what became of them. Pure.

All ranks do the same in the same step, since they act on orders alone: a prompt is blended when every rank has said that its
chunks are there, without those that any rank misses. One event of one rank never starts anything: its collectives would wait.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.blend.methods import parse_method
from serving.connector.plan import Plan, Span, Told, asks, cache_salt, verify
from storage.errors import UserError

AT_ONCE = 4  # prompts whose chunks are fetched, or lie in memory until they are blended
STEPS = 15  # without a blend, that tell how long one takes
BLENDS_PER_STEP = 1  # a piece of so many prompts is computed between two steps of all others


@dataclass(frozen=True)
class Job:
    """A prompt to be blended: positions [start, tokens) of pages `blocks`; those before are there already."""

    request_id: str
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    start: int
    plan: Plan


@dataclass(frozen=True)
class Save:
    """Stretches of a prompt that was computed in full, to be stored."""

    request_id: str
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    plan: Plan


@dataclass
class Orders:
    """What every rank does in one step. `advance`: by request, the keys that are not to be used (they matter at a blend's first
    piece). `beside`: tokens that other requests compute in this step; `step_s`: how long their steps take without a blend, where
    that is known."""

    start: list[Job] = field(default_factory=list)
    advance: dict[str, frozenset[str]] = field(default_factory=dict)
    cancel: list[str] = field(default_factory=list)
    save: list[Save] = field(default_factory=list)
    beside: int = 0
    step_s: float | None = None


@dataclass
class Staged:
    """A prompt's chunks are in the memory of so many ranks. `missed`, `tiers`: by key; see `Told`."""

    missed: dict[str, str]
    tiers: dict[str, str]
    fetch_ms: float
    ranks: int = 1


@dataclass
class Heard:
    """What ranks say after a step. `ended`: prompts that are blended, or failed (`Told.refused`); `broken`: why this rank blends
    nothing at all."""

    staged: dict[str, Staged] = field(default_factory=dict)
    ended: dict[str, Told] = field(default_factory=dict)
    saved: dict[str, list[str]] = field(default_factory=dict)
    broken: str = ""

    def joined(self, other: Heard) -> Heard:
        """What both say. A key that either misses is missed; a prompt that failed anywhere has failed."""
        broken = self.broken or other.broken
        found = Heard({**other.staged, **self.staged}, {**other.ended, **self.ended}, dict(self.saved), broken)
        for request_id in self.staged.keys() & other.staged.keys():
            a, b = self.staged[request_id], other.staged[request_id]
            slower = max(a.fetch_ms, b.fetch_ms)
            found.staged[request_id] = Staged(a.missed | b.missed, b.tiers | a.tiers, slower, a.ranks + b.ranks)
        for request_id, told in other.ended.items():
            if told.refused:
                found.ended[request_id] = told
        for request_id, keys in other.saved.items():
            found.saved[request_id] = found.saved.get(request_id, []) + keys
        return found


@dataclass(frozen=True)
class Asked:
    """A request as the scheduler has it. `local`: tokens that vLLM's own prefix cache has; `obstacle`: why it is not blended,
    whatever its plan says; empty: nothing."""

    request_id: str
    prompt: Sequence[int]
    params: Any
    salt: str | None
    local: int
    obstacle: str = ""


@dataclass
class _Known:
    plan: Plan | None
    told: Told
    prompt: tuple[int, ...]
    done: bool = False  # its blend has failed, or its KV is saved: nothing more is done for it


@dataclass
class _Running:
    job: Job
    state: str = "waiting"  # waiting | fetching | staged | blending | cancelled
    ranks: int = 0
    missed: frozenset[str] = frozenset()


class _Steps:
    """How long a step takes that computes others' tokens and nothing of ours: the median of the last ones."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=STEPS)
        self._begun: float | None = None

    def next(self, now: float, *, others_alone: bool) -> float | None:
        """A step begins now."""
        if self._begun is not None:
            self._took.append(now - self._begun)
        self._begun = now if others_alone else None
        return statistics.median(self._took) if self._took else None


class Director:
    """See above. `own`: what the profile of a plan must say of the model; `obstacle`: why nothing is blended, or empty."""

    def __init__(
        self, secret: bytes, own: Mapping[str, Any], *, block: int, ranks: int, obstacle: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._secret, self._own, self._block, self._ranks, self._clock = secret, dict(own), block, ranks, clock
        self._obstacle = obstacle
        self._known: dict[str, _Known] = {}
        self._running: dict[str, _Running] = {}
        self._cancel: list[str] = []
        self._steps = _Steps()

    def claim(self, asked: Asked) -> int:
        """How many tokens behind the local ones are to be loaded: all of the prompt, or none."""
        if not asks(asked.params):
            return 0
        known = self._known.get(asked.request_id)
        if known is None:
            known = self._known[asked.request_id] = self._read(asked)
        told, tokens, plan = known.told, len(known.prompt), known.plan
        if plan is None or known.done or not plan.spans:
            return 0
        told.reused, told.recomputed, told.computed = asked.local, 0, tokens - asked.local
        if self._obstacle:
            known.plan, told.refused = None, self._obstacle
            return 0
        beyond = sum(max(0, span.end - max(span.start, asked.local)) for span in plan.spans)
        enough = self._block if asked.local else 1  # of a repeated prompt's last block the rest is computed sooner than loaded
        return tokens - asked.local if beyond >= enough else 0

    def _read(self, asked: Asked) -> _Known:
        prompt = tuple(asked.prompt)
        plan = asked.obstacle or self._obstacle or verify(asked.params, self._secret, asked.prompt, self._clock())
        if isinstance(plan, Plan):
            plan = self._unfit(plan, asked.salt) or plan
        if isinstance(plan, Plan):
            return _Known(plan, Told(computed=len(prompt)), prompt)
        return _Known(None, Told(refused=plan, computed=len(prompt)), prompt)

    def _unfit(self, plan: Plan, salt: str | None) -> str:
        """Why a plan that the API has signed is not carried out, or an empty text."""
        for name, value in self._own.items():
            if (given := getattr(plan.profile, name)) != value:
                return f"The stored KV is of another model: its {name} is {given!r}, here it is {value!r}."
        if plan.spans and salt != cache_salt(plan):
            return "The request has not its plan's cache_salt: a plain prompt might read its blocks."
        try:
            uses = parse_method(plan.method).uses_stored or not plan.spans
        except UserError as error:
            return str(error)
        return "" if uses else f"The method {plan.method} uses no stored KV."

    def allocated(self, request_id: str, blocks: Sequence[int], external: int) -> None:
        """The scheduler has pages for a prompt; `external` tokens at its end are ours to fill."""
        known = self._known.get(request_id)
        if external and known is not None and known.plan is not None:
            start = len(known.prompt) - external
            self._running[request_id] = _Running(Job(request_id, known.prompt, tuple(blocks), start, known.plan))

    def orders(self, computed: Mapping[str, int], pages: Callable[[str], Sequence[int]], *, beside: int) -> Orders:
        """Of this step. `computed`: tokens of each request in its batch that will have been computed at its end; `pages`: a
        request's blocks; `beside`: tokens that the batch computes."""
        found = Orders(cancel=self._cancel, beside=beside)
        self._cancel = []
        for running in (self._running[request_id] for request_id in found.cancel):
            if running.state == "waiting":
                found.start.append(running.job)  # so that it is known where it is given up
            running.state = "cancelled"
        self._start(found)
        ready = [name for state in ("blending", "staged") for name, each in self._running.items() if each.state == state]
        for request_id in ready[:BLENDS_PER_STEP]:
            self._running[request_id].state = "blending"
            found.advance[request_id] = self._running[request_id].missed
        for request_id, tokens in computed.items():
            known = self._known.get(request_id)
            if known and known.plan and _is_to_save(known.plan, tokens) and not known.done:
                known.done = True
                if blocks := tuple(pages(request_id)):
                    found.save.append(Save(request_id, known.prompt, blocks, known.plan))
        alone = bool(beside) and not (found.start or found.advance or found.save)
        found.step_s = self._steps.next(self._clock(), others_alone=alone)
        return found

    def _start(self, found: Orders) -> None:
        """The first come, as far as there is room for their chunks."""
        busy = sum(each.state in ("fetching", "staged", "blending") for each in self._running.values())
        waiting = [each for each in self._running.values() if each.state == "waiting"]
        for running in waiting[: max(0, AT_ONCE - busy)]:
            running.state = "fetching"
            found.start.append(running.job)

    def hear(self, heard: Heard, ended: Sequence[str]) -> None:
        """What all ranks have said of a step; `ended`: prompts whose pages are filled, on every rank, or given up."""
        self._obstacle = self._obstacle or heard.broken
        for request_id, staged in heard.staged.items():
            if (running := self._running.get(request_id)) is None:
                continue
            running.ranks += staged.ranks
            running.missed |= frozenset(staged.missed)
            if known := self._known.get(request_id):
                known.told.missed |= staged.missed
                known.told.tiers |= staged.tiers
                known.told.fetch_ms = max(known.told.fetch_ms, staged.fetch_ms)
            if running.ranks == self._ranks and running.state == "fetching":
                running.state = "staged"
        for request_id, told in heard.ended.items():
            self._note(request_id, told)
        for request_id, keys in heard.saved.items():
            if known := self._known.get(request_id):
                known.told.saved += keys
        for request_id in ended:
            self._running.pop(request_id, None)

    def _note(self, request_id: str, told: Told) -> None:
        if (known := self._known.get(request_id)) is None:
            return
        if told.refused:
            known.done, known.told.refused = True, told.refused
            known.told.reused, known.told.recomputed, known.told.computed = 0, 0, len(known.prompt)
            return
        for name in ("reused", "recomputed", "computed", "blend_ms"):
            setattr(known.told, name, getattr(told, name))

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """A request has ended, however; what is to be told of its plan. Its blend, if there is one, is given up."""
        if request_id in self._running:
            self._cancel.append(request_id)
        known = self._known.pop(request_id, None)
        return known.told.params() if known else None

    @property
    def counts(self) -> dict[str, int]:
        """What is kept, for tests of leaks."""
        return {"known": len(self._known), "running": len(self._running), "cancel": len(self._cancel)}


def _is_to_save(plan: Plan, computed: int) -> bool:
    """What was loaded is never stored again as if it had been computed."""
    return bool(plan.saves) and not plan.spans and computed >= plan.saves[-1].end


def spans_beyond(spans: Sequence[Span], start: int) -> list[tuple[Span, int, int]]:
    """Each span's part behind `start`, as [from, to) of the prompt."""
    return [(span, max(span.start, start), span.end) for span in spans if span.end > start]
