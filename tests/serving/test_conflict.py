"""Two documents disagree: emphasis decides which one the embedded model believes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.harness import drive
from precompute.frame import Turn
from precompute.reader import Reader
from serving.blend.assembly import Segment, assemble
from serving.blend.methods import parse_method

DRAFT = "Harbour rules, draft of the committee.\nInside the harbour the speed limit for all boats is twelve knots."
FINAL = "Harbour rules, decision of the council.\nInside the harbour the speed limit for all boats is thirty knots."
OTHER = "The tide tables are printed twice a year. High water is given to the nearest five minutes."
QUESTION = "What is the speed limit for boats inside the harbour?"
CUE = "The speed limit for all boats inside the harbour is"


def preference(reader: Reader, method: str, draft: float, final: float) -> float:
    """Log-odds of the draft's number against the final one's, as the answer's next word."""
    texts = [DRAFT, OTHER, FINAL]
    chunks = [tuple(reader.tokenizer.encode(text)) for text in texts]
    segments = [Segment("frame", tuple(reader.format.frame))]
    weights = [draft, 1.0, final]
    for number, (ids, kv) in enumerate(zip(chunks, reader.compile(chunks), strict=True), 1):
        label = tuple(reader.format.label(number))
        emphasis = (weights[number - 1],) * len(ids)
        segments += [Segment("label", label), Segment("chunk", ids, None if method == "full" else kv, emphasis)]
    tail = [*reader.format.tail([Turn("user", QUESTION)]), *reader.tokenizer.encode(CUE)]
    segments.append(Segment("tail", tuple(tail)))
    chosen = parse_method(method)
    if method == "full":
        before = tuple(i for s in segments[:-1] for i in s.ids)
        weight = tuple(w for s in segments[:-1] for w in (s.weights or (1.0,) * len(s.ids)))
        segments = [Segment("chunk", before, None, weight), segments[-1]]
    assembly = assemble(reader, segments, 1, stored_labels=chosen.stored_labels)
    logits = torch.log_softmax(drive(chosen.blend(reader, assembly)), -1)
    first, second = (reader.tokenizer.encode(word)[0] for word in (" twelve", " thirty"))
    return float(logits[first] - logits[second])


@pytest.mark.parametrize("method", ["default", *(pytest.param(name, marks=pytest.mark.slow) for name in ("reuse", "full"))])
def test_the_belief_follows_the_weights(method: str, embedded_folder: Path) -> None:
    reader = Reader(embedded_folder, dtype="float32")
    believed = [preference(reader, method, draft, final) for draft, final in ((0.3, 2), (1, 1), (2, 0.3))]
    assert believed == sorted(believed), believed
    assert believed[0] < 0 < believed[-1], believed
