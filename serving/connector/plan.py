"""The plan of one prompt: where stored KV goes, signed by the API, checked by the connector inside vLLM.

The API sends `sign(plan, secret)` as a request's `kv_transfer_params` and `cache_salt(plan)` as its `cache_salt`; the prompt
goes as token ids. What comes back with the answer, as `kv_transfer_params`, is a `Told`. A plan that the API has not signed,
or that is not of this prompt, is refused with a reason, and the prompt is computed in full: a client's word is never trusted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from storage.keys import PROFILE_FIELDS, length_prefixed, token_bytes
from storage.types import KVProfile

VERSION = 1
FIELD = "preread"  # of kv_transfer_params, both ways
MAX_SPANS, MAX_TOKENS, MAX_TEXT = 4096, 1 << 22, 512
LIFE_S = 3600  # the longest that a plan may be valid from now on
_SECRET_TAG, _PLAN_TAG, _SALT_TAG = b"preread-plan-secret-1", b"preread-plan-1", b"preread-salt-1"
_KEY = re.compile(r"[0-9a-f]{64}")
_NUMBERS = frozenset({"layers", "kv_heads", "head_dim"})


@dataclass(frozen=True)
class Span:
    """Prompt tokens [start, start + length) whose KV is the stored object `key`, from its token number `skip` on.

    `tokens`: `token_hash` of the span's ids. `kind`: chunk | label. `best`: the chunk that retrieval ranks first. `codec`: as
    a profile has it; empty: the plan's profile's own. In a span to be saved, the object is of these tokens whole."""

    start: int
    length: int
    key: str
    tokens: str
    kind: str = "chunk"
    skip: int = 0
    best: bool = False
    codec: str = ""

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class Plan:
    """`profile` determines model, weights, layout (K free of position) and codec of every object. `spans`, to be loaded, and
    `saves`, to be stored after a full prefill, are sorted and disjoint. `method`: as in `serving.blend.methods`, with its
    share. `tail_start`: where the question is taken to begin. `plain`: the caller's own messages, without frame and labels.
    `tenant`, `group`: whose prompt, and whose KV (the sharing group of the keys). `thread`: what else two prompts must have
    in common to share blended blocks: a conversation's first question, say, and who asks it. `expires`: in seconds since the
    epoch."""

    profile: KVProfile
    spans: tuple[Span, ...]
    method: str
    tail_start: int
    tenant: str
    group: str
    expires: int
    thread: str = ""
    plain: bool = False
    saves: tuple[Span, ...] = ()

    def profile_of(self, span: Span) -> KVProfile:
        return replace(self.profile, codec=span.codec) if span.codec else self.profile


@dataclass
class Told:
    """What became of a plan. Token counts are of the prompt. `refused`: why nothing was loaded at all; `missed`: by key, why an
    object was not used; `tiers`: by key, where it came from; `saved`: keys. Times in milliseconds."""

    refused: str = ""
    reused: int = 0
    recomputed: int = 0
    computed: int = 0
    missed: dict[str, str] = field(default_factory=dict)
    tiers: dict[str, str] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    fetch_ms: float = 0.0
    blend_ms: float = 0.0

    def params(self) -> dict[str, Any]:
        """As `kv_transfer_params` of an answer."""
        return {FIELD: {each.name: getattr(self, each.name) for each in fields(self)}}

    @classmethod
    def read(cls, params: Any) -> Told:
        """What an answer's `kv_transfer_params` say; of what is absent or of another type the default."""
        found = cls()
        given = params.get(FIELD) if isinstance(params, Mapping) else None
        if isinstance(given, Mapping):
            for each in fields(cls):
                if type(value := given.get(each.name)) is type(getattr(found, each.name)):
                    setattr(found, each.name, value)
        return found


def plan_secret(master: bytes) -> bytes:
    """The 32-byte secret of API and connector, derived from the installation's; ValueError if that is empty."""
    if not master:
        raise ValueError("the master secret is empty")
    return hmac.new(master, _SECRET_TAG, hashlib.sha256).digest()


def token_hash(token_ids: Sequence[int]) -> str:
    """SHA-256 of token ids, 64 hex digits. Raises ValueError where one is no integer in [0, 2**32)."""
    return hashlib.sha256(token_bytes(token_ids)).hexdigest()


def sign(plan: Plan, secret: bytes) -> dict[str, Any]:
    """The plan as `kv_transfer_params` of a request: JSON types only."""
    body = _body(plan)
    return {FIELD: {**body, "signature": _mac(secret, body)}}


def cache_salt(plan: Plan) -> str:
    """The salt under which vLLM's prefix cache keeps the blended blocks: equal for equal content within a sharing group, and
    never that of another prompt; the plan's life is no part of it. A plain prompt with a thread, in which the asker stands,
    is one of a conversation that grows: what was blended for its earlier turns is found by the later ones, whatever stored
    passages they add."""
    left_out = {"expires", "saves"} | ({"spans", "tail_start"} if plan.plain and plan.thread else set())
    body = {name: value for name, value in _body(plan).items() if name not in left_out}
    return f"{FIELD}:{VERSION}:" + hashlib.sha256(length_prefixed([_SALT_TAG, _canonical(body)])).hexdigest()


def verify(params: Any, secret: bytes, prompt: Sequence[int], now: float) -> Plan | str:
    """The plan in a request's `kv_transfer_params`, or in one clear sentence why it is refused. Never raises, whatever is in
    `params`: fields are checked by type and bound, spans against `prompt` (token ids)."""
    try:
        plan = _read(params)
        if isinstance(plan, str):
            return plan
        given = params[FIELD]["signature"]
        if type(given) is not str or not hmac.compare_digest(_mac(secret, _body(plan)).encode(), given.encode()):
            return "The plan is not signed by this installation."
        if not now <= plan.expires <= now + LIFE_S:
            return "The plan has expired." if plan.expires < now else "The plan is valid for too long."
        return _mismatch(plan, prompt) or plan
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        return f"The plan cannot be read ({type(error).__name__})."


def asks(params: Any) -> bool:
    """Whether a request's `kv_transfer_params` hold a plan, or what claims to be one."""
    return isinstance(params, Mapping) and FIELD in params


def _body(plan: Plan) -> dict[str, Any]:
    """All fields but the signature; `_read` is its inverse."""
    return {
        "version": VERSION,
        "profile": {name: getattr(plan.profile, name) for name in PROFILE_FIELDS},
        "spans": [[getattr(span, name) for name in _SPAN] for span in plan.spans],
        "saves": [[getattr(span, name) for name in _SPAN] for span in plan.saves],
        **{name: getattr(plan, name) for name in _PLAIN},
    }


_SPAN = {each.name: type_ for each, type_ in zip(fields(Span), (int, int, str, str, str, int, bool, str), strict=True)}
_PLAIN: dict[str, type] = {
    "method": str, "tail_start": int, "tenant": str, "group": str, "expires": int, "thread": str, "plain": bool,
}  # fmt: skip
_NAMES = frozenset({"version", "profile", "spans", "saves", "signature", *_PLAIN})


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _mac(secret: bytes, body: Mapping[str, Any]) -> str:
    return hmac.new(secret, length_prefixed([_PLAN_TAG, _canonical(body)]), hashlib.sha256).hexdigest()


def _read(params: Any) -> Plan | str:
    """Types and bounds alone."""
    given = params.get(FIELD) if type(params) is dict else None
    if type(given) is not dict or set(given) != _NAMES:
        return "The plan has not the fields that this version knows."
    if type(given["version"]) is not int or given["version"] != VERSION:
        return f"The plan is not of version {VERSION}: API and connector must be of one release."
    profile = given["profile"]
    if type(profile) is not dict or set(profile) != set(PROFILE_FIELDS):
        return "The plan's profile has not the fields that this version knows."
    if not all(_is(value, int if name in _NUMBERS else str) for name, value in profile.items()):
        return "The plan's profile is out of bounds."
    if not all(_is(given[name], type_) for name, type_ in _PLAIN.items()):
        return "A field of the plan is out of bounds."
    lists: list[tuple[Span, ...]] = []
    for spans in (given["spans"], given["saves"]):
        if type(spans) is not list or len(spans) > MAX_SPANS:
            return f"The plan has more than {MAX_SPANS} spans, or no list of them."
        if not all(map(_is_span, spans)):
            return "A span of the plan is out of bounds."
        lists.append(tuple(Span(*span) for span in spans))
    return Plan(KVProfile(**profile), lists[0], saves=lists[1], **{name: given[name] for name in _PLAIN})


def _is(value: object, type_: type) -> bool:
    """Of exactly this type, and bounded."""
    if type(value) is not type_:
        return False
    if isinstance(value, str):
        return len(value) <= MAX_TEXT
    return isinstance(value, int) and 0 <= value < 1 << 53


def _is_span(values: Any) -> bool:
    if type(values) is not list or len(values) != len(_SPAN):
        return False
    if not all(_is(value, type_) for value, type_ in zip(values, _SPAN.values(), strict=True)):
        return False
    span = Span(*values)
    bounded = span.length > 0 and max(span.start, span.length, span.skip) <= MAX_TOKENS
    return bool(bounded and _KEY.fullmatch(span.key) and _KEY.fullmatch(span.tokens) and span.kind in ("chunk", "label"))


def _mismatch(plan: Plan, prompt: Sequence[int]) -> str | None:
    """Why the plan is not of this prompt, or None."""
    for spans in (plan.spans, plan.saves):
        at = 0
        for span in spans:
            if span.start < at or span.end > len(prompt):
                return "The plan's spans overlap, or reach beyond the prompt."
            if token_hash(prompt[span.start : span.end]) != span.tokens:
                return "The prompt has other tokens than the plan's spans."
            at = span.end
    last = plan.spans[-1].end if plan.spans else 0
    return None if last <= plan.tail_start <= len(prompt) or plan.plain else "The question begins before the last span ends."
