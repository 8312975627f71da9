"""From a policy file's tree to a `Policy`, or to one clear line for each mistake. docs/policies.md is the grammar."""

from __future__ import annotations

import difflib
import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from storage.cron import next_due
from storage.errors import UserError
from storage.policy.rules import Hits, Hook, Match, Policy, Rates, Rule, Span
from storage.policy.sizes import size
from storage.policy.source import Item, PolicyError, plain, read_yaml
from storage.policy.times import comparison, duration, plain_schedule
from storage.policy.types import ACTIONS, DEFAULT_RULE, DEFAULT_TIER, TIERS, Actions, DocumentFacts, Keep, Prefetch
from storage.types import BASISLESS_CODECS, CODEC_NAMES

MOST_RULES = 1000
MOST_DAYS = 90  # for which uses are remembered by day
PRICED = ("object", *reversed(TIERS))
SAYABLE = tuple(action for action in ACTIONS if action != "disk_codec")  # which is said as a part of `codec`
RESERVED = ("hook", DEFAULT_RULE)  # stand for themselves where a rule's name is shown
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HITS = re.compile(r"(>=|<)\s*(\d{1,9})")
_HOOK = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
T = TypeVar("T")


def parse_policy(data: bytes) -> Policy:
    """The policy in a file's bytes. Raises PolicyError with every mistake that was found."""
    return _Parser().policy(read_yaml(data))


class _Parser:
    """Walks the tree and collects mistakes; what could not be read is None."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []

    def wrong(self, item: Item, text: str) -> None:
        self.mistakes.append(f"line {item.line}: {text}" if item.line else text)

    def policy(self, tree: Item) -> Policy:
        top = self.fields(tree, "a policy", ("rules", "rates", "hook", "site"))
        rules = self.of(top, "rules", self.rules) or ()
        rates = self.of(top, "rates", self.rates) or Rates()
        name, hook = self.of(top, "hook", self.hook) or ("", None)
        kept = self.of(top, "site", self.site)
        if self.mistakes:
            raise PolicyError(sorted(self.mistakes, key=_line))
        return Policy(rules, rates, hook, name, kept)

    # --- rules ---

    def rules(self, item: Item, name: str) -> tuple[Rule, ...]:
        if not isinstance(item.value, list) or len(item.value) > MOST_RULES:
            self.wrong(item, f"{name} is a list of at most {MOST_RULES} rules, each behind a dash")
            return ()
        found: dict[str, Rule] = {}
        for number, each in enumerate(item.value, 1):
            rule = self.rule(each, number)
            if rule.name in found or rule.name in RESERVED:
                taken = f"line {found[rule.name].line}" if rule.name in found else "preread itself"
                self.wrong(each, f"the rule's name {rule.name!r} is used by {taken}: choose another")
            found[rule.name] = rule
        return tuple(found.values())

    def rule(self, item: Item, number: int) -> Rule:
        body = self.fields(item, "a rule", ("name", "match", *SAYABLE))
        name = self.of(body, "name", self.name) or f"rule-{number}"
        match = self.of(body, "match", self.match) or Match()
        actions = self.actions(body)
        if not body.keys() & set(SAYABLE):
            self.wrong(item, f"the rule says nothing: give it one of {', '.join(SAYABLE)}")
        if match.by_time and actions.codec is not None:
            self.wrong(body["codec"], "the codec is chosen when a document is stored: leave age and use out of this rule")
        return Rule(name, match, actions, item.line)

    def match(self, item: Item, name: str) -> Match:
        if item.value is None:
            return Match()
        body = self.fields(item, name, ("corpus", "path", "tag", "language", "age", "use"))
        use = self.of(body, "use", self.use) or {}
        age, last = self.of(body, "age", self.comparison), self.of(use, "last", self.comparison)
        return Match(
            corpus=self.of(body, "corpus", self.texts) or (),
            path=self.of(body, "path", self.texts) or (),
            tag=self.of(body, "tag", self.tags) or {},
            language=tuple(language.lower() for language in self.of(body, "language", self.texts) or ()),
            age=Span(*age) if age else None,
            hits=self.hits(use) if use.keys() & {"hits", "days"} else None,
            used=Span(*last) if last else None,
        )

    def use(self, item: Item, name: str) -> dict[str, Item]:
        body = self.fields(item, name, ("hits", "days", "last"))
        if not body.keys() & {"hits", "last"}:
            self.wrong(item, f'{name} is {{hits: ">= 5", days: 7}} or {{last: "> 30d"}}')
        return body if body.keys() & {"hits", "last"} else {}

    def tags(self, item: Item, name: str) -> dict[str, tuple[str, ...]]:
        if not isinstance(item.value, dict) or not item.value:
            self.wrong(item, f"{name} names attributes of documents: {{team: legal}} or {{team: [legal, hr]}}")
            return {}
        return {key: self.texts(value, key) for key, value in item.value.items()}

    def hits(self, use: Mapping[str, Item]) -> Hits | None:
        text = self.of(use, "hits", self.text)
        sign = _HITS.fullmatch(text.strip()) if text else None
        days = self.of(use, "days", self.number) if "days" in use else 1.0
        if sign is None:
            self.wrong(use.get("hits") or use["days"], 'hits counts uses: write ">= 5" or "< 1"')
        if days is not None and not (1 <= days <= MOST_DAYS and days == int(days)):
            self.wrong(use["days"], f"days is a whole number from 1 to {MOST_DAYS}")
        return Hits(sign[1], int(sign[2]), int(days)) if sign and days is not None else None

    # --- actions ---

    def actions(self, body: Mapping[str, Item]) -> Actions:
        return Actions(
            pin=self.of(body, "pin", self.tier),
            prefetch=self.of(body, "prefetch", self.prefetch),
            keep=self.of(body, "keep", self.keep),
            codec=self.of(body, "codec", self.codec),
            disk_codec=self.of(body, "codec", self.disk_codec),
            replicate=self.of(body, "replicate", self.sites),
            store=self.of(body, "store", self.truth),
        )

    def tier(self, item: Item, name: str) -> str | None:
        return self.choice(item, name, TIERS)

    def prefetch(self, item: Item, name: str) -> Prefetch | None:
        body = {"at": item} if isinstance(item.value, str) else self.fields(item, name, ("at", "cron", "timezone", "tier"))
        if ("at" in body) == ("cron" in body):
            self.wrong(item, f'{name} needs either at: "every working day at 07:45" or cron: "45 7 * * 1-5"')
            return None
        plainly = self.of(body, "at", lambda item, name: self.said(item, name, plain_schedule))
        cron = plainly[0] if plainly else self.of(body, "cron", self.text)
        zone = self.of(body, "timezone", self.text)
        if zone and plainly and plainly[1]:
            self.wrong(body["timezone"], "the time zone is named twice: say it once")
        zone = zone or (plainly[1] if plainly else None) or "UTC"
        tier = self.of(body, "tier", self.tier) if "tier" in body else DEFAULT_TIER
        if cron is None or tier is None:
            return None
        try:
            next_due(cron, zone, 0.0)
        except UserError as error:
            self.wrong(item, str(error))
        return Prefetch(cron, zone, tier)

    def keep(self, item: Item, name: str) -> Keep | None:
        body = self.fields(item, name, ("tier", "for"))
        if "for" not in body:
            self.wrong(item, f"{name} needs for: how long after a use, such as 2h")
        tier = self.of(body, "tier", self.tier) if "tier" in body else DEFAULT_TIER
        seconds = self.of(body, "for", lambda item, name: self.said(item, name, duration))
        return Keep(tier, seconds) if tier and seconds else None

    def codec(self, item: Item, name: str) -> str | None:
        """The stored object's. Reports all that is wrong with a mapping but its `disk`."""
        if not isinstance(item.value, dict):
            return self.choice(item, name, CODEC_NAMES)
        body = self.fields(item, name, ("store", "object", *reversed(TIERS)))
        if {"store", "object"} <= body.keys():
            self.wrong(body["object"], f"the stored object's {name} is named twice: object is another word for store")
        for tier in body.keys() & {"memory", "device"}:
            self.choice(body[tier], f"{name} in {tier}, where KV lies as it is used,", ("raw",))
        own = body.get("store", body.get("object"))
        return self.choice(own, name, CODEC_NAMES) if own else None

    def disk_codec(self, item: Item, name: str) -> str | None:
        """Of the table only: a transform codec is one with the basis of a model, and a rule knows no model."""
        disk = item.value.get("disk") if isinstance(item.value, dict) else None
        return self.choice(disk, f"{name} on disk", BASISLESS_CODECS) if disk else None

    def sites(self, item: Item, name: str) -> tuple[str, ...]:
        names = self.texts(item, name)
        if wrong := [site for site in names if not _NAME.fullmatch(site)]:
            self.wrong(item, f"{wrong[0]!r} is no name of a site: use letters, digits, dots and dashes")
        return names

    # --- rates and hook ---

    def rates(self, item: Item, name: str) -> Rates:
        body = self.fields(item, name, tuple(f.name for f in fields(Rates)))
        months = self.of(body, "gb_month", lambda item, name: self.fields(item, name, PRICED)) or {}
        speed = self.of(body, "prefill_tokens_per_s", self.number)
        if speed == 0:
            self.wrong(body["prefill_tokens_per_s"], "prefill_tokens_per_s is more than 0, or left out: then it is measured")
        return Rates(
            currency=self.of(body, "currency", self.name) or "",
            gpu_hour=self.of(body, "gpu_hour", self.number) or 0.0,
            prefill_tokens_per_s=speed,
            gb_month={tier: self.number(price, tier) or 0.0 for tier, price in months.items()},
            gb_transferred=self.of(body, "gb_transferred", self.number) or 0.0,
        )

    def site(self, item: Item, name: str) -> int | None:
        body = self.fields(item, name, ("budget",))
        return self.of(body, "budget", lambda item, name: self.said(item, name, size))

    def hook(self, item: Item, name: str) -> tuple[str, Hook] | None:
        written = self.text(item, name)
        if written is None:
            return None
        if not _HOOK.fullmatch(written):
            self.wrong(item, f"the {name} {written!r} is not written as package.module:function")
            return None
        module, _, attribute = written.partition(":")
        try:
            function = getattr(importlib.import_module(module), attribute)
        except Exception as error:  # noqa: BLE001 - importing runs somebody else's code
            self.wrong(item, f"the {name} {written!r} cannot be loaded: {type(error).__name__}: {error}".splitlines()[0])
            return None
        if not callable(function):
            self.wrong(item, f"the {name} {written!r} is no function")
            return None
        return written, lambda facts: hook_actions(function, facts)

    # --- values ---

    def of(self, body: Mapping[str, Item], name: str, read: Callable[[Item, str], T | None]) -> T | None:
        """A field, if it is there."""
        return read(body[name], name) if name in body else None

    def fields(self, item: Item, what: str, known: tuple[str, ...]) -> dict[str, Item]:
        """The known fields of a mapping; all else is a mistake."""
        if not isinstance(item.value, dict):
            self.wrong(item, f"{what} is a mapping with some of {', '.join(known)}")
            return {}
        for name in item.value.keys() - set(known):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            self.wrong(item.value[name], f"unknown field {name!r} in {what}; {hint}")
        return {name: value for name, value in item.value.items() if name in known}

    def text(self, item: Item, name: str) -> str | None:
        if isinstance(item.value, str) and item.value:
            return item.value
        self.wrong(item, f"{name} is a text")
        return None

    def texts(self, item: Item, name: str) -> tuple[str, ...]:
        """A text, or a list of texts."""
        each: Iterable[Item] = item.value if isinstance(item.value, list) else [item]
        found = tuple(filter(None, (self.text(one, name) for one in each)))
        if item.value == []:
            self.wrong(item, f"{name} is an empty list: leave it out, or name something")
        return found

    def name(self, item: Item, name: str) -> str | None:
        text = self.text(item, name)
        if text is not None and not _NAME.fullmatch(text):
            self.wrong(item, f"{name} {text!r} is made of up to 64 letters, digits, dots, dashes and underscores")
            return None
        return text

    def choice(self, item: Item, name: str, allowed: tuple[str, ...]) -> str | None:
        if isinstance(item.value, str) and item.value in allowed:
            return item.value
        said = repr(item.value) if isinstance(item.value, str) else "this"
        self.wrong(item, f"{name} cannot be {said}: use {', '.join(allowed)}")
        return None

    def truth(self, item: Item, name: str) -> bool | None:
        words = {"true": True, "yes": True, "false": False, "no": False}
        word = item.value.lower() if isinstance(item.value, str) else ""
        if word not in words:
            self.wrong(item, f"{name} is true or false")
        return words.get(word)

    def number(self, item: Item, name: str) -> float | None:
        try:
            value = float(item.value) if isinstance(item.value, str) else math.nan
        except ValueError:
            value = math.nan
        if math.isfinite(value) and value >= 0:
            return value
        self.wrong(item, f"{name} is a number, 0 or more")
        return None

    def comparison(self, item: Item, name: str) -> tuple[str, float] | None:
        return self.said(item, name, comparison)

    def said(self, item: Item, name: str, read: Callable[[str], T]) -> T | None:
        """What `read` makes of a text; its UserError is a mistake on that line."""
        text = self.text(item, name)
        try:
            return None if text is None else read(text)
        except UserError as error:
            self.wrong(item, str(error))
            return None


def _line(mistake: str) -> int:
    number = re.match(r"line (\d+)", mistake)
    return int(number[1]) if number else 0


def hook_actions(function: Callable[[DocumentFacts], Any], facts: DocumentFacts) -> Actions:
    """What a hook says of a document, checked as a rule's actions are. Raises PolicyError, and whatever the hook does."""
    said = function(facts)
    if said is None:
        return Actions()
    parser = _Parser()
    actions = parser.actions(parser.fields(plain(said), "what a hook returns", SAYABLE))
    if parser.mistakes:
        raise PolicyError(parser.mistakes)
    return actions
