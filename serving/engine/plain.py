"""Plain prompts: the caller's own messages, token for token, with what is at hand of them put in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from serving.blend.assembly import Assembly, Segment
from serving.engine.conversations import Recalled
from serving.engine.types import ChunkInText
from serving.prompt import Passage, PromptPlan

if TYPE_CHECKING:
    from serving.engine.opening import Asked

QUESTION = 16  # tokens behind the last reused text, the cue for the answer among them, that are taken for a question


def plain_segments(
    plan: PromptPlan, recalled: Recalled, passages: Sequence[Passage], stored: Sequence[torch.Tensor | None]
) -> list[Segment]:
    """The prompt's tokens in order: what an earlier prompt began with, turns and chunks that are blended, and between them
    what is to be computed. `stored`: the passages' KV, as far as it is here."""
    ids, segments, at = plan.tail, [], 0
    blended = [(p.start, Segment("turn", ids[p.start : p.end], p.kv, at=p.at)) for p in recalled.moved]
    blended += [(p.start, Segment("chunk", ids[p.start : p.end], kv)) for p, kv in zip(passages, stored, strict=True)]
    kept = [(p.start, Segment("prefix", ids[p.start : p.end], p.kv, at=p.at)) for p in recalled.prefix]
    for start, segment in [*kept, *sorted(blended, key=lambda each: each[0])]:
        if start > at:
            segments.append(Segment("text", ids[at:start]))
        segments.append(segment)
        at = start + len(segment.ids)
    return [*segments, Segment("tail", ids[at:])]


def note_plain(asked: Asked, assembly: Assembly) -> None:
    """Say in the assembly where the question begins, and in the report what is reused."""
    report, recalled = asked.report, asked.recalled
    report.tokens_prefix, report.tokens_moved = recalled.prefix_tokens, recalled.moved_tokens
    report.in_text = [
        ChunkInText(p.chunk.chunk_id, p.chunk.file_id, p.chunk.path, p.start, p.end - p.start) for p in asked.passages
    ]
    assembly.plain = True
    # The question stands before its documents. A text to go on with has no turns, and none is taken for one.
    if asked.plan.turns and assembly.tokens - assembly.tail_start < QUESTION:
        assembly.tail_start = asked.plan.turns[-1].start
