"""Stored chunks in the caller's own text: token by token, wherever they stand.

A chunk's KV has read what stands before it in the chunk. So it is used from the chunk's first token to the first one that
differs, and no further: a changed number makes all that follows it in the chunk another text. At its very start a text may be
cut into tokens otherwise than in the chunk; the characters there are compared instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from serving.prompt import Passage, PromptPlan
from storage.anchors import EDGE, SHORTEST, STRETCH
from storage.types import RetrievedChunk

Decode = Callable[[Sequence[int]], str]
LOOK_BACK = 8  # tokens before a chunk in which its first characters may lie
_TORN = "\ufffd"  # part of a character


def find_passages(plan: PromptPlan, chunks: Sequence[RetrievedChunk], decode: Decode) -> tuple[Passage, ...]:
    """Where these chunks stand in a plain prompt's texts, in its order; of those that overlap the longest."""
    ids = np.asarray(plan.tail, dtype="<u4")
    texts = [(turn.text, ids[turn.text : turn.end]) for turn in plan.turns if turn.end - turn.text >= STRETCH]
    found: list[Passage] = []
    for chunk in chunks if texts else ():
        own = np.asarray(chunk.token_ids, dtype="<u4")
        if len(own) >= SHORTEST:
            for at, text in texts:
                found += [Passage(chunk, at + a, at + b, skip) for a, b, skip in _occurrences(text, own, decode)]
    # Of equals one that has KV.
    found.sort(key=lambda p: (p.start - p.end, p.chunk.kv_key is None, p.chunk.chunk_id, p.start))
    return _apart(found, len(ids))


def _occurrences(text: np.ndarray, chunk: np.ndarray, decode: Decode) -> Iterator[tuple[int, int, int]]:
    """(start, end, tokens of the chunk that are skipped), none overlapping another."""
    hay, needle = text.tobytes(), chunk[EDGE:][:STRETCH].tobytes()
    at = hay.find(needle)
    while at >= 0:
        if at % 4:  # between two tokens
            at = hay.find(needle, at + 1)
            continue
        start, skip = at // 4, EDGE
        end = start + _alike(text[start:], chunk[EDGE:])
        while skip and start and text[start - 1] == chunk[skip - 1]:
            start, skip = start - 1, skip - 1
        if not skip or _same_text(decode, text[max(0, start - LOOK_BACK) : start], chunk[:skip]):
            yield start, end, skip
        at = hay.find(needle, 4 * end)


def _alike(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens are the same at the start of both."""
    shorter = min(len(a), len(b))
    differs = a[:shorter] != b[:shorter]
    return int(differs.argmax()) if differs.any() else shorter


def _same_text(decode: Decode, before: np.ndarray, skipped: np.ndarray) -> bool:
    """Whether what stands before ends with the characters of the skipped tokens."""
    missing = decode(skipped.tolist())
    return bool(missing) and _TORN not in missing and decode(before.tolist()).endswith(missing)


def _apart(passages: Sequence[Passage], tokens: int) -> tuple[Passage, ...]:
    """Those that overlap none of the ones before them, in the prompt's order."""
    taken = np.zeros(tokens, dtype=bool)
    kept = []
    for each in passages:
        if not taken[each.start : each.end].any():
            taken[each.start : each.end] = True
            kept.append(each)
    return tuple(sorted(kept, key=lambda p: p.start))
