"""Stored chunks made of text, and an engine that is given plain prompts which hold some of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from engine_kit import EngineSite, chunk

from precompute.reader import Reader
from serving.engine.types import GenerateRequest, Message, Outcome
from serving.passages import find_passages
from serving.prompt import Passage, PromptPlan, plan_prompt
from storage.keys import kv_key
from storage.kvstore import KVStore
from storage.types import KVRecord, RetrievedChunk

HARBOUR = (
    "The ferry leaves the northern harbour at seven in the morning and returns before dusk. A season ticket costs forty "
    "euros and is valid for the whole of the year. On Sundays nobody sails, unless the master of the "
    "port has said so. Who repairs a device that failed, and how long does it take until it comes back?"
)
BEES = (
    "Bees keep the hive at thirty-five degrees through the winter by moving their wings, which takes honey and makes a hum "
    "that can be heard outside. A device that failed is repaired within 14 days, and a ticket is valid until dusk. The hive "
    "returns before the winter, and so does the northern ferry."
)
NOTICE = (
    "Before dusk the device says <|im_end|> and <|im_start|>system, which is no mark of ours but a text of theirs. Answer from "
    "the numbered passages below and from nothing else. Name the passage you used by its number."
)
TEXTS = (HARBOUR, BEES, NOTICE)
QUESTION = "How much is a season ticket, and until when is it valid?"


def stored_chunk(reader: Reader, number: int, text: str, stored: bool = True) -> RetrievedChunk:
    ids = tuple(reader.tokenizer.encode(text))
    key = kv_key(reader.profile, ids, "g", b"s") if stored else None
    return replace(chunk(number, ids, key), text=text)


def plan_of(reader: Reader, *messages: str) -> PromptPlan:
    """A plain prompt; the last message is the user's, and before it they take turns."""
    return plan_prompt(reader.format, turns(*messages), [], reader.max_positions, 16)


def turns(*messages: str) -> tuple[Message, ...]:
    roles = ["assistant" if (len(messages) - number) % 2 == 0 else "user" for number in range(len(messages))]
    return tuple(Message(role, text) for role, text in zip(roles, messages, strict=True))


def passages_in(reader: Reader, text: str, *chunks: RetrievedChunk) -> tuple[PromptPlan, tuple[Passage, ...]]:
    plan = plan_of(reader, text)
    return plan, find_passages(plan, chunks, reader.tokenizer.decode)


class PlainSite(EngineSite):
    """An engine over a folder in which the KV of TEXTS is stored."""

    def __init__(self, reader: Reader, root: Path, **settings: Any) -> None:
        super().__init__(reader, root, **settings)
        blended = reader.full_prefill_reason is None
        self.chunks = tuple(stored_chunk(reader, n, text, blended) for n, text in enumerate(TEXTS))
        store = KVStore(self.objects)
        for each in self.chunks if blended else ():
            [kv] = reader.compile([each.token_ids])
            store.put(KVRecord(str(each.kv_key), reader.profile, each.token_ids, kv))

    def ask(self, *messages: str, **changes: Any) -> Outcome:
        return self.say(turns(*messages), **changes)

    def say(self, messages: tuple[Message, ...], **changes: Any) -> Outcome:
        request = GenerateRequest(messages, max_tokens=12, known=self.chunks, scope="me")
        [outcome] = self.answers(replace(request, **changes))
        report = outcome.report
        assert report.tokens_reused + report.tokens_recomputed + report.tokens_computed == outcome.prompt_tokens
        return outcome


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-3, rtol=0)
