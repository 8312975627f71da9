"""A prompt's KV buffer, put together from stored chunks: what is filled, and what has yet to be computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from precompute.reader import Reader


@dataclass(frozen=True)
class Segment:
    """A run of prompt tokens. `kv`: stored KV [layers, 2, kv_heads, tokens, head_dim], or None: to be computed. `kind`: frame |
    prefix (a start that was computed for another prompt, and stays as it is) | label | header (see `Chunk`; never stored) |
    chunk | turn | tail. `weights` [tokens]: emphasis, see `_steering`; None: 1 throughout. `best`: the chunk that retrieval ranks
    first. `at`: the position at which the K of `kv` stands; None: it is free of position."""

    kind: str
    ids: tuple[int, ...]
    kv: torch.Tensor | None = None
    weights: tuple[float, ...] | None = None
    best: bool = False
    at: int | None = None


@dataclass(frozen=True)
class Steering:
    """`bias` [capacity], in the buffer's dtype: what is added to the attention logits of each key, for rows from `start`
    on: the caller's text and the answer. What the documents' own tokens see is not steered."""

    bias: torch.Tensor
    start: int


@dataclass
class Assembly:
    """`kv` [layers, 2, kv_heads, capacity, head_dim] holds rotated K; slots nobody wrote are NaN.

    ids [tokens]; `spans`: [start, end) of every chunk, turn or label with stored KV, in prompt order; `fresh`: positions without
    KV; `computed`: how many had none and have been computed already (see `late`);
    `anchors`: the first token of every label with stored KV; `best`: positions of the chunk that retrieval ranks first, if
    that is known and has stored KV; `tail_start`: where the caller's text begins, in a plain prompt where the question is
    taken to begin."""

    kv: torch.Tensor
    ids: torch.Tensor
    fresh: torch.Tensor
    spans: list[tuple[int, int]]
    anchors: torch.Tensor
    best: torch.Tensor
    tail_start: int
    recomputed_token_layers: int = 0
    computed: int = 0
    steering: Steering | None = None
    plain: bool = False  # neither frame nor labels: the caller's own messages

    @property
    def tokens(self) -> int:
        return int(self.ids.shape[0])

    @property
    def stored(self) -> torch.Tensor:
        """Positions of all tokens with stored KV."""
        device = self.ids.device
        runs = [torch.arange(a, b, device=device) for a, b in self.spans]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch.long, device=device)


@torch.inference_mode()
def assemble(reader: Reader, segments: Sequence[Segment], extra: int, *, stored_labels: bool = False) -> Assembly:
    """Place every stored chunk at its position: one rotation per chunk, all layers at once. `extra`: slots for the answer.

    `stored_labels`: labels of stored chunks are placed too, from `Reader.label_kv`; otherwise they are fresh tokens."""
    if stored_labels:
        segments = _with_label_kv(reader, segments)
    total = sum(len(s.ids) for s in segments)
    kv = reader.buffer(total + extra)
    ids = torch.tensor([i for s in segments for i in s.ids], device=reader.device)
    fresh: list[torch.Tensor] = []
    spans: list[tuple[int, int]] = []
    anchors: list[int] = []
    best = range(0)
    at = tail_start = 0
    for segment in segments:
        end = at + len(segment.ids)
        if segment.kind == "tail":
            tail_start = at
        if segment.kind == "frame":
            kv[:, :, :, at:end] = reader.frame_kv()
        elif segment.kv is None:
            kv[:, :, :, at:end] = torch.nan
            fresh.append(torch.arange(at, end, device=reader.device))
        else:
            place_chunk(reader, kv, segment.kv, at, segment.at)
            if segment.kind != "prefix":
                spans.append((at, end))
            if segment.kind == "label":
                anchors.append(at)
            if segment.best:
                best = range(at, end)
        at = end
    kv[:, :, :, total:] = torch.nan
    at_labels, at_best = (torch.tensor([*p], dtype=torch.long, device=reader.device) for p in (anchors, best))
    steering = _steering(segments, kv, tail_start)
    return Assembly(kv, ids, torch.cat(fresh), spans, at_labels, at_best, tail_start, steering=steering)


def _steering(segments: Sequence[Segment], kv: torch.Tensor, tail_start: int) -> Steering | None:
    """A weight w multiplies the odds of a token in every head's attention: log w is added to its logit. None if all are 1."""
    if all(s.weights is None or set(s.weights) == {1.0} for s in segments):
        return None
    weights = torch.ones(kv.shape[3])
    at = 0
    for segment in segments:
        if segment.weights is not None:
            weights[at : at + len(segment.ids)] = torch.tensor(segment.weights)
        at += len(segment.ids)
    return Steering(weights.log().to(kv), tail_start)


def _with_label_kv(reader: Reader, segments: Sequence[Segment]) -> list[Segment]:
    """The same segments; a label that stands before a stored chunk has its KV."""
    labels = [i for i, s in enumerate(segments[:-1]) if s.kind == "label"]
    known = dict(zip(labels, reader.label_kv(), strict=False))  # the labels of a long prompt's end are computed
    behind = {i: segments[i + 1 + (segments[i + 1].kind == "header")] for i in known}
    found = {i: kv for i, kv in known.items() if behind[i].kv is not None}
    return [replace(s, kv=found.get(i, s.kv)) for i, s in enumerate(segments)]


def place_chunk(reader: Reader, kv: torch.Tensor, chunk: torch.Tensor, at: int, stands: int | None = None) -> None:
    """Write KV into the buffer at position `at`. Its K `stands` at a position, or (None) is free of position."""
    end = at + chunk.shape[3]
    kv[:, 1, :, at:end] = chunk[:, 1]
    if stands == at:
        kv[:, 0, :, at:end] = chunk[:, 0]
        return
    positions, k = torch.arange(at, end, device=reader.device), chunk[:, 0]
    if stands is not None:  # both rotations in fp32: K is rounded once
        k = reader.rope.unplace(k.float(), positions - at + stands)
    reader.rope.place(k, positions, out=kv[:, 0, :, at:end])
