"""Emphasis as people write it, made into weights of the chunks that were found.

A request says `{"<document id or file id>": weight}` or `{"<id>:<start>-<end>": weight}` (characters of the document); a corpus
says `{"<path pattern>": weight}` for all its answers. A weight multiplies the odds of attention: 1 changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from serving.engine.types import Emphasis
from storage.errors import UserError
from storage.types import RetrievedChunk

LEAST, MOST = 0.01, 100.0
_SPAN = re.compile(r"(.+):(\d{1,12})-(\d{1,12})")
LONGEST = 4096  # characters of an id or pattern


def check_weight(name: str, weight: float) -> None:
    """Raises UserError for a weight outside LEAST to MOST, and for a name that can be none."""
    if len(name) > LONGEST or any("\ud800" <= c <= "\udfff" for c in name):
        raise UserError("emphasis names documents by their ids, spans of them, or path patterns: this is none of them")
    if not LEAST <= weight <= MOST:  # also true for NaN
        raise UserError(f"the weight of {name!r} is {weight:g}: give one from {LEAST:g} to {MOST:g}; 1 changes nothing")


def emphasis_of(
    chunks: Sequence[RetrievedChunk], asked: Mapping[str, float], standing: Mapping[str, Mapping[str, float]]
) -> dict[int, tuple[Emphasis, ...]]:
    """The emphasis of each chunk by its id. `standing`: rules by corpus id, of which the last that fits a path counts.

    What is asked for a document replaces its corpus's rule, what is asked for a span replaces both there."""
    documents, spans = _parsed(asked)
    found: dict[int, tuple[Emphasis, ...]] = {}
    for chunk in chunks:
        names = (chunk.document_id, chunk.file_id)
        whole = next((documents[name] for name in names if name in documents), _standing(chunk, standing))
        parts = [Emphasis(chunk.start, chunk.end, whole)] if whole != 1 else []
        parts += [span for name, span in spans if name in names and span.start < chunk.end and span.end > chunk.start]
        if parts:
            found[chunk.chunk_id] = tuple(parts)
    return found


def _parsed(asked: Mapping[str, float]) -> tuple[dict[str, float], list[tuple[str, Emphasis]]]:
    documents: dict[str, float] = {}
    spans: list[tuple[str, Emphasis]] = []
    for name, weight in asked.items():
        check_weight(name, weight)
        match = _SPAN.fullmatch(name)
        if match is None:
            documents[name] = weight
        elif int(match[2]) >= int(match[3]):
            raise UserError(f"the span of {name!r} is empty: write id:start-end, in characters of the document")
        else:
            spans.append((match[1], Emphasis(int(match[2]), int(match[3]), weight)))
    return documents, spans


def _standing(chunk: RetrievedChunk, standing: Mapping[str, Mapping[str, float]]) -> float:
    rules = standing.get(chunk.corpus_id, {})
    return next((weight for pattern, weight in reversed(list(rules.items())) if fnmatchcase(chunk.path, pattern)), 1.0)
