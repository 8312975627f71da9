"""When parsing and embedding ran: do they overlap, and how far is the pipeline from the encoder alone?"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import select

from ingest.pipeline import Pipeline
from ingest.types import Parser
from storage.catalogue.engine import Catalogue
from storage.catalogue.schema import ChunkRow, Document
from storage.types import ParsedDocument, TextEmbedder, embedded_text


@dataclass
class Spans:
    """Intervals of time that do not overlap each other."""

    spans: list[tuple[float, float]] = field(default_factory=list)

    def add(self, begun: float) -> None:
        self.spans.append((begun, time.perf_counter()))

    @property
    def seconds(self) -> float:
        return sum(end - begun for begun, end in self.spans)

    def common(self, other: Spans) -> float:
        """Seconds in which both ran."""
        return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in self.spans for b in other.spans)


@dataclass
class WatchedParser:
    parser: Parser
    spans: Spans

    def parse(self, data: bytes, name: str, check: Callable[[], None]) -> ParsedDocument:
        begun = time.perf_counter()
        try:
            return self.parser.parse(data, name, check)
        finally:
            self.spans.add(begun)


class WatchedEmbedder:
    def __init__(self, embedder: TextEmbedder, spans: Spans) -> None:
        self._embedder, self._spans = embedder, spans

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedder, name)

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        begun = time.perf_counter()
        try:
            return self._embedder.embed(texts)
        finally:
            self._spans.add(begun)


class Watch:
    """A pipeline that notes when it parses and embeds."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.parsing, self.embedding = Spans(), Spans()
        embedder: Any = WatchedEmbedder(pipeline.embedder, self.embedding)
        self.pipeline = replace(pipeline, parser=WatchedParser(pipeline.parser, self.parsing), embedder=embedder)

    def figures(self) -> dict[str, float]:
        return {
            "seconds_parsing": round(self.parsing.seconds, 3),
            "seconds_embedding": round(self.embedding.seconds, 3),
            "seconds_of_both": round(self.parsing.common(self.embedding), 3),
        }


def encoder_seconds(catalogue: Catalogue, embedder: TextEmbedder) -> tuple[float, float]:
    """What the encoder takes for all chunks' texts at once, sorted by length: seconds, and those of the processor."""
    with catalogue.read() as session:
        query = select(ChunkRow.text, ChunkRow.headings, Document.path).join(Document, Document.id == ChunkRow.document_id)
        texts = [embedded_text(embedder, text, headings, path) for text, headings, path in session.execute(query)]
    wall, processor = time.perf_counter(), time.process_time()
    embedder.embed(texts)
    return time.perf_counter() - wall, time.process_time() - processor
