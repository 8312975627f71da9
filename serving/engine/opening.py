"""From a plan and what was fetched to a session: which segments have KV, which may yet get it, and why others have none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Protocol

import torch

from precompute.reader import Reader
from serving.blend.assembly import Segment, assemble
from serving.blend.late import Awaited, Late
from serving.blend.methods import Method
from serving.blend.methods.reuse import Reuse
from serving.engine.arrivals import Arrivals
from serving.engine.blended import Blended
from serving.engine.conversations import Recalled
from serving.engine.loading import SLOW
from serving.engine.plain import note_plain, plain_segments
from serving.engine.sessions import BlendSession, PlainSession, Session
from serving.engine.types import ChunkNotReused, ChunkReused, Emphasis, GenerateRequest, Report
from serving.prompt import Passage, PromptPlan
from storage.types import KVRecord, Miss, RetrievedChunk

Records = Mapping[str, KVRecord | Miss]


class Asked(Protocol):
    """What is known of a request when its session is opened. `passages`: the chunks that are to be blended; `blended`: all that
    stands before the caller's text; `recalled`: what is at hand of a plain prompt. `arrivals`: what has been fetched, and
    what is being fetched still; `reasons`: by KV key, why it could not be used."""

    request: GenerateRequest
    plan: PromptPlan
    method: Method
    report: Report
    passages: tuple[Passage, ...]
    blended: Blended | None
    recalled: Recalled
    arrivals: Arrivals
    reasons: dict[str, str]


class Opening:
    """Opens sessions over one reader."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._bytes_per_token = reader.buffer(1).nbytes

    def session(self, asked: Asked) -> Session:
        """The session for one request; fills in the report."""
        reader, plan, method, report = self._reader, asked.plan, asked.method, asked.report
        report.full_prefill_reason = reader.full_prefill_reason
        stored, awaited = self._look_up(asked)
        segments = self._grounded(asked, stored) if plan.frame else plain_segments(plan, asked.recalled, asked.passages, stored)
        if reader.full_prefill_reason:
            report.tokens_computed = plan.tokens
            report.tokens_emphasised = 0
            return PlainSession(reader, [i for s in segments for i in s.ids])
        if asked.blended is not None:
            report.resumed = True
            segments, method = _merged(segments, "prefix", asked.blended.kv), Reuse()
        elif not method.uses_stored:
            segments = _merged(segments, "chunk" if plan.frame else "tail", None)
        assembly = assemble(reader, segments, asked.request.max_tokens, stored_labels=method.stored_labels)
        if not plan.frame:
            note_plain(asked, assembly)
        late = Late(awaited, lambda: self._arrived(asked, awaited)) if awaited else None
        return BlendSession(reader, assembly, method, late)

    def _look_up(self, asked: Asked) -> tuple[list[torch.Tensor | None], list[Awaited]]:
        """Each passage's KV as far as it is here, and what may yet come."""
        records, stored, awaited = asked.arrivals.take(), [], []
        for number, passage in enumerate(asked.passages):
            key, kv = passage.chunk.kv_key, None
            if key not in records and asked.arrivals.awaits(key):
                best = bool(asked.plan.frame) and number == 0
                awaited.append(Awaited(number, passage.start, passage.end, best))
            elif asked.blended is None:
                kv = self._stored(asked, passage, records.get(key or ""))
            stored.append(kv)
        return stored, awaited

    def _grounded(self, asked: Asked, stored: Sequence[torch.Tensor | None]) -> list[Segment]:
        plan, report = asked.plan, asked.report
        segments = [Segment("frame", plan.frame)]
        each = zip(plan.labels, plan.headers, plan.chunks, stored, strict=True)
        for number, (label, header, chunk, kv) in enumerate(each):
            weights = self._weights(chunk, asked.request.emphasis.get(chunk.chunk_id, ()))
            report.tokens_emphasised += sum(w != 1 for w in weights or ())
            segments.append(Segment("label", label))
            segments += [Segment("header", header)] * bool(header)
            segments.append(Segment("chunk", chunk.token_ids, kv, weights, number == 0))
        return [*segments, Segment("tail", plan.tail)]

    def _arrived(self, asked: Asked, awaited: Sequence[Awaited]) -> dict[int, torch.Tensor | None]:
        """See `Late`. Notes what came and is of no use."""
        records = asked.arrivals.take()
        found: dict[int, torch.Tensor | None] = {}
        for number in (each.number for each in awaited):
            passage = asked.passages[number]
            key = passage.chunk.kv_key or ""
            if (outcome := records.get(key)) is not None:
                found[number] = _kv_of(passage, outcome)
                if found[number] is None:
                    asked.reasons.setdefault(key, self._reason(asked, passage.chunk, outcome))
        return found

    def settle(self, asked: Asked, session: BlendSession) -> None:
        """Complete the report, once the first logits are there."""
        report, late = asked.report, session.late
        for each in late.awaited if late else ():
            passage = asked.passages[each.number]
            if late and each.number in late.placed:
                self._note_reused(asked, passage)
            else:
                chunk = passage.chunk
                report.not_reused.append(ChunkNotReused(chunk.chunk_id, asked.reasons.get(chunk.kv_key or "", SLOW)))
        account(report, session, self._reader.layers)

    def _stored(self, asked: Asked, passage: Passage, found: KVRecord | Miss | None) -> torch.Tensor | None:
        kv, chunk = _kv_of(passage, found), passage.chunk
        if kv is not None:
            self._note_reused(asked, passage)
            return kv
        asked.report.not_reused.append(ChunkNotReused(chunk.chunk_id, self._reason(asked, chunk, found)))
        return None

    def _note_reused(self, asked: Asked, passage: Passage) -> None:
        asked.report.bytes_fetched += (passage.end - passage.start) * self._bytes_per_token
        tier = asked.arrivals.tiers.get(passage.chunk.kv_key or "", "")
        asked.report.reused.append(ChunkReused(passage.chunk.chunk_id, tier))

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


def _kv_of(passage: Passage, found: KVRecord | Miss | None) -> torch.Tensor | None:
    """A record's KV of the passage's tokens, if it is of the chunk's own tokens."""
    if not isinstance(found, KVRecord) or found.token_ids != passage.chunk.token_ids:
        return None
    return found.kv[:, :, :, passage.skip : passage.skip + passage.end - passage.start]


def _merged(segments: Sequence[Segment], kind: str, kv: torch.Tensor | None) -> list[Segment]:
    """The same prompt in two segments at most: the last one, and one for all before it, which `kv` is of, from position 0."""
    *before, tail = segments
    if not before:
        return [tail]
    ids = tuple(chain.from_iterable(s.ids for s in before))
    weights = tuple(chain.from_iterable(s.weights or (1.0,) * len(s.ids) for s in before))
    return [Segment(kind, ids, kv, weights, at=0), tail]


def account(report: Report, session: BlendSession, layers: int) -> None:
    """Fill in the token counts; a token recomputed in some layers only counts by its share."""
    assembly = session.assembly
    stored = sum(b - a for a, b in assembly.spans)
    recomputed = round(assembly.recomputed_token_layers / layers)
    report.tokens_recomputed = min(recomputed, stored)
    report.tokens_computed = len(assembly.fresh) + assembly.computed
    report.tokens_reused = assembly.tokens - report.tokens_computed - report.tokens_recomputed
    report.recomputed_fraction = assembly.recomputed_token_layers / (stored * layers) if stored else 0.0
