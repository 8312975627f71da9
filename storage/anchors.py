"""Anchors: a number at a chunk's head and one at its tail by which a longer text that holds it is found to do so.

Of the hashes of all windows in a stretch of tokens the smallest is the stretch's anchor. Whoever holds the stretch, anywhere
in a longer text, meets that window as the smallest of its surroundings, so that a text has few candidates to look up: about
two for every WINDOWS tokens. This is winnowing (Schleimer, Wilkerson and Aiken, SIGMOD 2003) with one fingerprint kept. An
anchor is a hint and never proof. Stored anchors are these: a change here needs a migration that computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

WINDOW = 16  # tokens that are hashed together
WINDOWS = 32  # in a stretch
STRETCH = WINDOW + WINDOWS - 1
EDGE = 2  # tokens at a chunk's ends that may be cut otherwise where it stands in a longer text
SHORTEST = STRETCH + 2 * EDGE  # tokens of a chunk that has anchors
_BASE = np.uint64(0x9E3779B97F4A7C15)


def anchors_of(token_ids: Sequence[int]) -> tuple[int, int] | None:
    """A chunk's anchors: of its first tokens and of its last, but for EDGE at either end; None if it is too short."""
    if len(token_ids) < SHORTEST:
        return None
    ids = np.asarray(token_ids, dtype=np.uint64)
    head, tail = ids[EDGE:][:STRETCH], ids[: len(ids) - EDGE][-STRETCH:]
    return int(_hashes(head).min()), int(_hashes(tail).min())


def candidates(token_ids: Sequence[int]) -> set[int]:
    """The anchors of all chunks that may stand in a text of these tokens, signed 64 bit."""
    if len(token_ids) < STRETCH:
        return set()
    hashes = _hashes(np.asarray(token_ids, dtype=np.uint64))
    return set(np.unique(sliding_window_view(hashes, WINDOWS).min(axis=1)).tolist())


def _hashes(ids: np.ndarray) -> np.ndarray:
    """One for each window, int64: a polynomial of its tokens, then the finaliser of splitmix64."""
    count = len(ids) - WINDOW + 1
    hashes = np.zeros(count, np.uint64)
    for offset in range(WINDOW):
        hashes = hashes * _BASE + ids[offset : offset + count] + np.uint64(1)
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (hashes ^ (hashes >> np.uint64(31))).view(np.int64)
