"""Ranking by words without counting them at query time.

What a word contributes to a chunk's BM25 score apart from its rarity (how often it occurs, in how long a chunk) is put
into one of four levels when the chunk is indexed (impact ordering: Anh and Moffat, SIGIR 2006). A word of level 3 is
indexed three times, as `word`, `word²` and `word³`: so a list of chunk ids is all that a search needs of a database, and of
a word that half of the chunks hold the search reads the short list of those that are about it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

K1, B = 1.2, 0.75
USUAL_WORDS = 128  # in a chunk
LEVELS = ("", "²", "³", "⁴")  # normalisation leaves none of these in a word
FROM = (0.0, 1.15, 1.5, 1.8)  # where a level begins
WORTH = (0.9, 1.3, 1.65, 1.95)  # what it stands for
MOST_POSTINGS = 2000  # of a word that are read
COMMON = 4  # a word with more is taken to be in one of so many chunks

Ids = NDArray[np.int64]
# For each of many: chunks that hold all of the terms (or a word that starts with it), capped.
Find = Callable[[Sequence[tuple[Sequence[str], bool]]], list[Ids]]


def terms(words: Sequence[str]) -> list[str]:
    """What is indexed for a chunk's words."""
    length = K1 * (1 - B + B * len(words) / USUAL_WORDS)
    found = []
    for word, count in Counter(words).items():
        impact = count * (K1 + 1) / (count + length)
        found += [word + level for level, begins in zip(LEVELS, FROM, strict=True) if impact >= begins]
    return found


def rank(words: Sequence[tuple[str, bool]], chunks: int, find: Find) -> tuple[Ids, NDArray[np.float64]]:
    """Chunks with any of the words and their scores, best first. `chunks`: how many there are to be found in. A score is
    BM25's as the share of what a chunk has that holds each word once; words that are too common to be read count for nothing."""
    lists: list[tuple[Ids, float]] = []
    once = 0.0
    common: list[str] = []
    levels = [LEVELS[:1] if prefix else LEVELS for _, prefix in words]
    asked = [([word + level], prefix) for (word, prefix), some in zip(words, levels, strict=True) for level in some]
    found = iter(find(asked))
    for (word, prefix), some in zip(words, levels, strict=True):
        by_level = [next(found) for _ in some]
        ids = by_level[0]
        whole = len(ids) <= MOST_POSTINGS
        weight = _rarity(chunks, len(ids) if whole else max(len(ids), chunks // COMMON))
        if not whole and not prefix:
            common.append(word)
        if whole:
            once += weight * WORTH[0]
        worth = 0.0
        for ids, value in zip(by_level, WORTH, strict=False):
            # A list that was cut short is left out: the next one holds the best of it, at the worth of all so far.
            if len(ids) <= MOST_POSTINGS:
                lists.append((ids, weight * (value - worth)))
                worth = value
    if common and (len(common) > 1 or not any(len(ids) for ids, _ in lists)):
        weight = sum(_rarity(chunks, max(MOST_POSTINGS, chunks // COMMON)) for _ in common)
        (ids,) = find([(common, False)])
        lists.append((ids[:MOST_POSTINGS], weight * WORTH[0]))
    chunk_ids, scores = _summed(lists)
    return chunk_ids, scores / (once or 1.0)


def _summed(lists: Sequence[tuple[Ids, float]]) -> tuple[Ids, NDArray[np.float64]]:
    lists = [(ids, weight) for ids, weight in lists if len(ids)]
    if not lists:
        return np.empty(0, dtype=np.int64), np.empty(0)
    every = np.concatenate([ids for ids, _ in lists])
    weights = np.repeat(np.array([weight for _, weight in lists]), [len(ids) for ids, _ in lists])
    found, place = np.unique(every, return_inverse=True)
    scores = np.bincount(place, weights).astype(np.float64)
    order = np.lexsort((found, -scores))
    return found[order], scores[order]


def _rarity(chunks: int, holders: int) -> float:
    """BM25's idf."""
    return math.log(1 + (max(chunks - holders, 0) + 0.5) / (holders + 0.5))
