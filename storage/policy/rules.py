"""Rules and what they decide: for each action, the first rule that matches and speaks of it wins; a hook speaks last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import structlog

from storage.policy.types import ACTIONS, Actions, Decision, DocumentFacts

log = structlog.get_logger(__name__)
Hook = Callable[[DocumentFacts], Actions]


@dataclass(frozen=True)
class Hits:
    """At least, or fewer than, `count` answers used the document within `days`."""

    sign: str  # ">=" or "<"
    count: int
    days: int

    def holds(self, facts: DocumentFacts, now: float) -> bool:
        hits = facts.hits_within(self.days, now)
        return hits >= self.count if self.sign == ">=" else hits < self.count


@dataclass(frozen=True)
class Span:
    """Younger (`<`) or older (`>`) than so many seconds."""

    sign: str
    seconds: float

    def holds(self, since: float, now: float) -> bool:
        return (now - since < self.seconds) if self.sign == "<" else (now - since > self.seconds)


@dataclass(frozen=True)
class Match:
    """Conditions, all of which must hold. An empty one holds for every document; a tuple holds if any of it does."""

    corpus: tuple[str, ...] = ()  # names or ids
    path: tuple[str, ...] = ()  # patterns; `*` also crosses `/`
    tag: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    language: tuple[str, ...] = ()
    age: Span | None = None
    hits: Hits | None = None
    used: Span | None = None  # since the last use; a document never used was "used" when it was made

    def holds(self, facts: DocumentFacts, now: float) -> bool:
        return (
            self.reaches(facts.corpus_id, facts.corpus)
            and (not self.path or any(fnmatchcase(facts.path, pattern) for pattern in self.path))
            and all(_tagged(facts.attributes.get(key), wanted) for key, wanted in self.tag.items())
            and (not self.language or facts.language in self.language)
            and (self.age is None or self.age.holds(facts.created_at, now))
            and (self.hits is None or self.hits.holds(facts, now))
            and (self.used is None or self.used.holds(facts.used_at or facts.created_at, now))
        )

    def reaches(self, corpus_id: str, name: str) -> bool:
        """Whether documents of this corpus may match at all."""
        return not self.corpus or corpus_id in self.corpus or name in self.corpus

    @property
    def by_time(self) -> bool:
        """Whether it may hold at one time and not at another."""
        return self.age is not None or self.hits is not None or self.used is not None


def _tagged(held: str | float | bool | None, wanted: Iterable[str]) -> bool:
    """Whether an attribute has one of these values, which stand in the file as texts."""
    if held is None:
        return False
    if isinstance(held, bool):
        return ("true" if held else "false") in (one.lower() for one in wanted)
    if isinstance(held, str):
        return held in wanted
    return any(_number(one) == held for one in wanted)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Rule:
    """`name` is unique in its file; `line` is where it stands there."""

    name: str
    match: Match
    actions: Actions
    line: int = 0


@dataclass(frozen=True)
class Rates:
    """What things cost, in one currency. `prefill_tokens_per_s` None: as measured at ingest."""

    currency: str = ""
    gpu_hour: float = 0.0
    prefill_tokens_per_s: float | None = None
    gb_month: Mapping[str, float] = field(default_factory=dict)  # tier → price of 1e9 bytes for 30 days
    gb_transferred: float = 0.0


@dataclass(frozen=True)
class Policy:
    """All that an operator's file says."""

    rules: tuple[Rule, ...] = ()
    rates: Rates = Rates()
    hook: Hook | None = None
    hook_name: str = ""
    kept_bytes: int | None = None  # of the parent site's objects that a child keeps; None: all

    def decide(self, facts: DocumentFacts, now: float) -> Decision:
        """What holds for the document at `now`. Never raises: a hook's error is logged, and the rules alone hold."""
        actions: dict[str, Any] = {}
        by: dict[str, str] = {}
        for rule in self.rules:
            if rule.match.holds(facts, now):
                _take(rule.actions, rule.name, actions, by, over=False)
        if self.hook is not None:
            try:
                _take(self.hook(facts), "hook", actions, by, over=True)
            except Exception as error:  # noqa: BLE001 - somebody else's code; it must not stop ours
                log.warning("policy_hook_failed", hook=self.hook_name, error=type(error).__name__)
        return Decision(replace(Actions(), **actions), by)

    def speaks_of(self, *actions: str) -> bool:
        """Whether any rule may name one of these actions."""
        named = any(getattr(rule.actions, action) is not None for rule in self.rules for action in actions)
        return named or self.hook is not None

    def reaches(self, corpus_id: str, name: str) -> bool:
        """Whether anything may be said of a corpus's documents."""
        return self.hook is not None or any(rule.match.reaches(corpus_id, name) for rule in self.rules)

    @property
    def needs_use(self) -> bool:
        """Whether how often documents are used has to be known."""
        return self.hook is not None or any(r.match.hits or r.match.used for r in self.rules)


def _take(said: Actions, name: str, actions: dict[str, Any], by: dict[str, str], over: bool) -> None:
    for action in ACTIONS:
        value = getattr(said, action)
        if value is not None and (over or action not in actions):
            actions[action], by[action] = value, name
