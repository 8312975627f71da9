"""What vLLM is asked to store of a prompt, and how it is known that it has: by reading it back, whatever vLLM says of it."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from precompute.spec import ReaderSpec
from serving.connector.plan import Plan, Span, Told, plan_secret, sign
from storage.errors import EngineUnavailable
from storage.types import KVProfile, KVRecord, Miss

STORED_S = 30.0  # after which an object that vLLM was to write is taken for lost
LOOK_S = (0.02, 0.5)  # between two looks whether it is there: at first, and at last
PLAN_LIFE_S = 1800


class Records(Protocol):
    """Where vLLM's connector writes, as it is read from here."""

    def get(self, key: str, profile: KVProfile) -> KVRecord | Miss: ...


@dataclass(frozen=True)
class Shelf:
    """`size`: bytes of a key's object."""

    records: Records
    size: Callable[[str], int | None]

    def await_object(self, key: str, profile: KVProfile, token_ids: tuple[int, ...], end: float) -> int | Miss:
        """The object's bytes, as soon as it is there whole; or why it is not at `end`, by time.monotonic. Raises
        StorageUnavailable."""
        pause = LOOK_S[0]
        while True:
            found = self.records.get(key, profile)
            if isinstance(found, KVRecord):
                return self.size(key) or 0 if found.token_ids == token_ids else Miss.WRONG_KEY
            if time.monotonic() + pause > end:
                return found
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S[1])


def told_of(reply: Mapping[str, Any]) -> Told:
    """What the connector says of such a prompt. Raises EngineUnavailable where vLLM has no connector of ours."""
    params = reply.get("kv_transfer_params")
    if params is None:
        raise EngineUnavailable("vLLM runs without Preread's connector: docs/vllm.md says how to start it")
    return Told.read(params)


def saving_body(
    reader: ReaderSpec, model: str, prompt: Sequence[int], saves: Sequence[Span], group: str, secret: bytes
) -> dict[str, Any]:
    """Of POST /v1/completions: read a prompt, store stretches of it, say nothing. `secret`: the installation's.

    What prompts have in common is read once within a sharing group, whose cache salt this is: from the time that it takes can
    be told whether a text was read before."""
    plan = Plan(reader.profile, (), "full", 0, "", group, int(time.time()) + PLAN_LIFE_S, saves=tuple(saves))
    salt = hmac.new(secret, repr(("compile", group)).encode(), hashlib.sha256).hexdigest()
    return {
        "model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0, "add_special_tokens": False,
        "cache_salt": f"preread-compile:{salt}", "kv_transfer_params": sign(plan, plan_secret(secret)),
    }  # fmt: skip
