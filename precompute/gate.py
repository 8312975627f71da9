"""The gate that every model passes before its KV is blended: a built-in probe against full prefill.

It fails closed: a model that differs is served by full prefill, with the reason in readyz, log and metric.
"""

from __future__ import annotations

import logging

import torch

from precompute.reader import Reader
from precompute.spec import filler_passages

log = logging.getLogger(__name__)
SHIFT = 96
# Rounding, by dtype: the largest relative difference of position-free K, and the KL of the next token's distribution.
TOLERANCE = {torch.float32: (1e-3, 1e-4), torch.bfloat16: (0.1, 0.1), torch.float16: (0.05, 0.05)}


def check_model(reader: Reader) -> None:
    """Switch blending off for a model that fails the probe. Takes well under a second for the embedded model."""
    if reader.full_prefill_reason:
        return
    try:
        reason = _failure(reader)
    except (RuntimeError, ValueError, IndexError, AttributeError, TypeError) as error:
        reason = f"the probe failed: {type(error).__name__}"
    if reason:
        log.error("model %s failed the blending gate and is served by full prefill: %s", reader.name, reason)
        reader.refuse_blending(reason)


@torch.inference_mode()
def _failure(reader: Reader) -> str | None:
    passage = reader.tokenizer.encode(filler_passages()[0])
    shift_limit, kl_limit = TOLERANCE[reader.dtype]
    nothing = reader.buffer(0)
    here = reader.compile_behind(nothing, [passage])[0][:, 0].float()
    there = reader.compile_behind(nothing, [passage], offset=SHIFT)[0][:, 0].float()
    moved = float((here - there).norm() / here.norm())
    if not moved <= shift_limit:  # also true for NaN
        return f"K without position differs by {moved:.2g} between two positions"
    kl = _reading_kl(reader, passage)
    if not kl <= kl_limit:
        return f"an answer over placed KV differs from full prefill (KL {kl:.2g})"
    return None


def _reading_kl(reader: Reader, passage: list[int]) -> float:
    """KL from full prefill to the same prompt over stored KV, for the token after a question."""
    frame = reader.format.frame
    tail = reader.tokenizer.encode("\n\nWhat is this passage about?")
    start, end = len(frame), len(frame) + len(passage)
    full = reader.buffer(end + len(tail))
    expected = reader.prefill(full, [*frame, *passage, *tail])
    placed = reader.buffer(end + len(tail)).fill_(torch.nan)
    placed[:, :, :, :start] = reader.frame_kv()
    chunk = reader.compile_behind(reader.frame_kv(), [passage])[0]
    positions = torch.arange(start, end, device=reader.device)
    reader.rope.place(chunk[:, 0], positions, out=placed[:, 0, :, start:end])
    placed[:, 1, :, start:end] = chunk[:, 1]
    found = reader.prefill(placed, tail, start=end)
    assert expected is not None
    assert found is not None
    a, b = torch.log_softmax(expected, -1), torch.log_softmax(found, -1)
    return float((a.exp() * (a - b)).sum())
