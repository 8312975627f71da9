"""From a plan and what was fetched to a session: which segments have KV, which may yet get it, and why others have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Protocol

import torch

from precompute.reader import Reader
from serving.blend.assembly import Segment, assemble, resume
from serving.blend.late import Awaited, Late
from serving.blend.methods import Method
from serving.blend.methods.reuse import Reuse
from serving.engine.arrivals import Arrivals
from serving.engine.blended import Blended
from serving.engine.sessions import BlendSession, PlainSession, Session
from serving.engine.types import ChunkNotReused, ChunkReused, Emphasis, GenerateRequest, Report
from serving.prompt import PromptPlan
from storage.types import KVRecord, Miss, RetrievedChunk

Records = Mapping[str, KVRecord | Miss]
SLOW = "slow"  # computing was faster than the source


class Asked(Protocol):
    """What is known of a request when its session is opened. `blended`: all that stands before the caller's text.
    `arrivals`: what has been fetched, and what is being fetched still; `reasons`: by KV key, why it could not be used."""

    request: GenerateRequest
    plan: PromptPlan
    method: Method
    report: Report
    blended: Blended | None
    arrivals: Arrivals
    reasons: dict[str, str]


class Opening:
    """Opens sessions over one reader."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._bytes_per_token = reader.buffer(1).nbytes

    def session(self, asked: Asked) -> Session:
        """The session for one request; fills in the report."""
        reader, request, plan, method = self._reader, asked.request, asked.plan, asked.method
        records = asked.arrivals.take()
        report, blended, extra = asked.report, asked.blended, asked.request.max_tokens
        report.full_prefill_reason = reader.full_prefill_reason
        segments = [Segment("frame", plan.frame)] if plan.frame else []
        awaited: list[Awaited] = []
        at = len(plan.frame)
        for number, (label, chunk) in enumerate(zip(plan.labels, plan.chunks, strict=True)):
            kv, at = None, at + len(label) + len(chunk.token_ids)
            if chunk.kv_key not in records and asked.arrivals.awaits(chunk.kv_key):
                awaited.append(Awaited(number, at - len(chunk.token_ids), at, number == 0))
            elif blended is None:
                kv = self._stored(asked, chunk, records.get(chunk.kv_key or ""))
            weights = self._weights(chunk, request.emphasis.get(chunk.chunk_id, ()))
            report.tokens_emphasised += sum(w != 1 for w in weights or ())
            best = chunk is plan.chunks[0]
            segments += [Segment("label", label), Segment("chunk", chunk.token_ids, kv, weights, best)]
        segments.append(Segment("tail", plan.tail))
        if reader.full_prefill_reason:
            report.tokens_computed = plan.tokens
            report.tokens_emphasised = 0
            return PlainSession(reader, [i for s in segments for i in s.ids])
        if blended is not None:
            report.resumed = True
            return BlendSession(reader, resume(reader, segments, blended.kv, extra), Reuse())
        if not method.uses_stored or not plan.frame:
            segments = _unread(segments)
        assembly = assemble(reader, segments, extra, stored_labels=method.stored_labels)
        late = Late(awaited, lambda: self._arrived(asked, awaited)) if awaited else None
        return BlendSession(reader, assembly, method, late)

    def _arrived(self, asked: Asked, awaited: Sequence[Awaited]) -> dict[int, torch.Tensor | None]:
        """See `Late`. Notes what came and is of no use."""
        records = asked.arrivals.take()
        found: dict[int, torch.Tensor | None] = {}
        for number in (each.number for each in awaited):
            chunk = asked.plan.chunks[number]
            if (outcome := records.get(chunk.kv_key or "")) is not None:
                found[number] = _kv_of(chunk, outcome)
                if found[number] is None:
                    asked.reasons.setdefault(chunk.kv_key or "", self._reason(asked, chunk, outcome))
        return found

    def settle(self, asked: Asked, session: BlendSession) -> None:
        """Complete the report, once the first logits are there."""
        report, late = asked.report, session.late
        for each in late.awaited if late else ():
            chunk = asked.plan.chunks[each.number]
            if late and each.number in late.placed:
                self._note_reused(asked, chunk)
            else:
                report.not_reused.append(ChunkNotReused(chunk.chunk_id, asked.reasons.get(chunk.kv_key or "", SLOW)))
        account(report, session, self._reader.layers)

    def _stored(self, asked: Asked, chunk: RetrievedChunk, found: KVRecord | Miss | None) -> torch.Tensor | None:
        kv = _kv_of(chunk, found)
        if kv is not None:
            self._note_reused(asked, chunk)
            return kv
        asked.report.not_reused.append(ChunkNotReused(chunk.chunk_id, self._reason(asked, chunk, found)))
        return None

    def _note_reused(self, asked: Asked, chunk: RetrievedChunk) -> None:
        asked.report.bytes_fetched += len(chunk.token_ids) * self._bytes_per_token
        asked.report.reused.append(ChunkReused(chunk.chunk_id, asked.arrivals.tiers.get(chunk.kv_key or "", "")))

    def _reason(self, asked: Asked, chunk: RetrievedChunk, found: KVRecord | Miss | None) -> str:
        if self._reader.full_prefill_reason:
            return "model"
        if not asked.method.uses_stored:
            return "method"
        if chunk.kv_key is None:
            return "policy" if chunk.not_stored else "pending"
        if isinstance(found, KVRecord):
            return str(Miss.WRONG_KEY)
        return asked.reasons.get(chunk.kv_key, str(found or Miss.UNAVAILABLE))

    def _weights(self, chunk: RetrievedChunk, spans: Sequence[Emphasis]) -> tuple[float, ...] | None:
        """One weight per token; a token belongs to a span if any of its characters does."""
        if not spans:
            return None
        weights = [1.0] * len(chunk.token_ids)
        ranges = self._ranges(chunk) if any(s.start > chunk.start or s.end < chunk.end for s in spans) else None
        for span in spans:
            for number in range(len(weights)):
                start, end = ranges[number] if ranges else (chunk.start, chunk.end)
                if start < span.end and end > span.start:
                    weights[number] = span.weight
        return tuple(weights)

    def _ranges(self, chunk: RetrievedChunk) -> list[tuple[int, int]] | None:
        """Each token's characters in the document; None for tokens that are not this tokenizer's."""
        starts = [chunk.start + at for at in self._reader.tokenizer.offsets(chunk.text)]
        if len(starts) != len(chunk.token_ids):
            return None
        ends = [*starts[1:], chunk.end]
        return [(start, max(end, start + 1)) for start, end in zip(starts, ends, strict=True)]


def _kv_of(chunk: RetrievedChunk, found: KVRecord | Miss | None) -> torch.Tensor | None:
    """A record's KV, if it is of the chunk's own tokens."""
    return found.kv if isinstance(found, KVRecord) and found.token_ids == chunk.token_ids else None


def _unread(segments: Sequence[Segment]) -> list[Segment]:
    """The same prompt with no KV at all: one segment for the caller's text, and one for what stands before it, if any."""
    *before, tail = segments
    if not before:
        return [tail]
    ids = tuple(chain.from_iterable(s.ids for s in before))
    weights = tuple(chain.from_iterable(s.weights or (1.0,) * len(s.ids) for s in before))
    return [Segment("chunk", ids, None, weights), tail]


def account(report: Report, session: BlendSession, layers: int) -> None:
    """Fill in the token counts; a token recomputed in some layers only counts by its share."""
    assembly = session.assembly
    stored = sum(b - a for a, b in assembly.spans)
    recomputed = round(assembly.recomputed_token_layers / layers)
    report.tokens_recomputed = min(recomputed, stored)
    report.tokens_computed = len(assembly.fresh) + assembly.computed
    report.tokens_reused = assembly.tokens - report.tokens_computed - report.tokens_recomputed
    report.recomputed_fraction = assembly.recomputed_token_layers / (stored * layers) if stored else 0.0
