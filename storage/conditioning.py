"""What a chunk is read behind when its KV is compiled, besides frame and filler.

`none`: nothing. `document`: the chunks of its document that stand before it in the same window; windows are filled from the
document's start, so that one pass over a window compiles all of its chunks and no token is read twice. An edit then
compiles the chunks that it touches and those that follow: in the window as far as they were read behind it, in later
windows as far as their borders moved. What stands before is part of a chunk's key.
"""

from __future__ import annotations

from collections.abc import Sequence

Reading = tuple[tuple[int, ...], ...]  # token ids of the chunks that are read, the last of which is kept

CONDITIONINGS = ("none", "document")
WINDOW_TOKENS = 1536


def readings(chunks: Sequence[Sequence[int]], conditioning: str) -> list[Reading]:
    """How each of a document's chunks, all of them in order, is read."""
    if conditioning == "none":
        return [(tuple(chunk),) for chunk in chunks]
    found: list[Reading] = []
    for chunk in chunks:
        before = found[-1] if found else ()
        fits = sum(map(len, before)) + len(chunk) <= WINDOW_TOKENS
        found.append((*before, tuple(chunk)) if fits else (tuple(chunk),))
    return found
