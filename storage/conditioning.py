"""What a chunk is read behind when its KV is compiled, besides frame and filler.

`none`: nothing. `document`: the chunks of its document that stand before it in the same window; windows are filled from the
document's start, so that one pass over a window compiles all of its chunks. An edit then
compiles the chunks that it touches and those that follow: in the window as far as they were read behind it, in later
windows as far as their borders moved. What stands before is part of a chunk's key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Reading = tuple[tuple[int, ...], ...]  # token ids of the chunks that are read, the last of which is kept

# The keys under which the last chunks of readings belong, in a sharing group and under a codec (None: the reader's own);
# None where there is no stored KV.
KVKeys = Callable[[Sequence[Reading], str, str | None], Sequence[str | None]]

WINDOW_TOKENS = 1536
LABEL_TOKENS = 8  # about what stands between two chunks


def readings(chunks: Sequence[Sequence[int]], conditioning: str) -> list[Reading]:
    """How each of a document's chunks, all of them in order, is read."""
    if conditioning == "none":
        return [(tuple(chunk),) for chunk in chunks]
    found: list[Reading] = []
    for chunk in chunks:
        before = found[-1] if found else ()
        fits = rows([*before, chunk]) <= WINDOW_TOKENS
        found.append((*before, tuple(chunk)) if fits else (tuple(chunk),))
    return found


def rows(reading: Sequence[Sequence[int]]) -> int:
    """About how many tokens are read for it."""
    return sum(len(chunk) + LABEL_TOKENS for chunk in reading)
