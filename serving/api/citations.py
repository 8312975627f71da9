"""Where an answer comes from. A citation's quote is exactly its document's text from `start` to `end`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from storage.types import RetrievedChunk

_MARK = re.compile(r"\[(\d{1,4}(?:\s*[,;]\s*\d{1,4})*)\]")


def mentions(text: str, count: int) -> dict[int, tuple[int, int]]:
    """Source number -> span of its first mention, in `[1]` or `[1, 3]`; numbers of no source are left out."""
    found: dict[int, tuple[int, int]] = {}
    for mark in _MARK.finditer(text):
        for number in re.findall(r"\d+", mark[1]):
            if 1 <= int(number) <= count:
                found.setdefault(int(number), mark.span())
    return found


def citations(text: str, chunks: Sequence[RetrievedChunk], held: Collection[int]) -> list[dict[str, Any]]:
    """The chunks the answer was made from, in label order; `cited` for those its text mentions.

    Left out is what is not `held` (chunk ids) any more; the others keep their labels."""
    marked = mentions(text, len(chunks))
    return [_citation(n, c, n in marked) for n, c in enumerate(chunks, 1) if c.chunk_id in held]


def _citation(n: int, chunk: RetrievedChunk, cited: bool) -> dict[str, Any]:
    return {
        "n": n,
        "cited": cited,
        "chunk_id": chunk.chunk_id,
        "file_id": chunk.file_id,
        "document_id": chunk.document_id,
        "corpus_id": chunk.corpus_id,
        "filename": chunk.path,
        "version": chunk.version,
        "headings": list(chunk.headings),
        "page_start": chunk.page_start,
        "page_end": chunk.page_end,
        "line_start": chunk.line_start,
        "line_end": chunk.line_end,
        "start": chunk.start,
        "end": chunk.end,
        "quote": chunk.text,
    }


def url_citations(
    text: str, chunks: Sequence[RetrievedChunk], held: Collection[int], base_url: str
) -> list[dict[str, Any]]:
    """OpenAI's url_citation for each `held` chunk that the text mentions, at its first mention."""
    return [
        {"type": "url_citation", "url_citation": _url_citation(span, chunks[n - 1], base_url)}
        for n, span in mentions(text, len(chunks)).items()
        if chunks[n - 1].chunk_id in held
    ]


def _url_citation(span: tuple[int, int], chunk: RetrievedChunk, base_url: str) -> dict[str, Any]:
    url = f"{base_url}#passage/{chunk.corpus_id}/{chunk.file_id}/{chunk.start}-{chunk.end}"  # the page opens it there
    return {"start_index": span[0], "end_index": span[1], "title": chunk.path, "url": url}
