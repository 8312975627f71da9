"""How much a chunk has to do with a query, as a number from 0 to 1.

By meaning it is the cosine. Where that is small, as for a name or a number that the embedder has never read, words count: a
chunk with every word of the query has EXACT, and as much less as it lacks words, more than in proportion, since some words of a
question stand in any text.

RELEVANT was set with the embedded model over policies and questions of others: nearly all questions about a corpus have a chunk
above it, and nearly none about anything else (`tests/retrieval/test_relevance.py`). Another embedder has other cosines; then a
request's own `min_score` says what counts.
"""

from __future__ import annotations

RELEVANT = 0.3
EXACT = 0.5


def relevance(cosine: float | None, worded: float) -> float:
    """`worded`: the chunk's score by words, see `ChunkIndex.lexical`."""
    return min(1.0, max(0.0, cosine or 0.0, EXACT * min(1.0, worded) ** 2))
