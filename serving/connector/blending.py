"""One prompt's blend over vLLM's pages, piece by piece: chunks are placed, tokens chosen by the engine's own selectors, and
computed again by vLLM's model over its own attention.

What stands before the first chunk sees no chunk: it is computed first, and kept for the next prompts that begin with it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from serving.blend.choosing import union
from serving.blend.methods import parse_method
from serving.connector.director import Job, spans_beyond
from serving.connector.plan import Span, Told
from serving.connector.transfer import Pages
from storage.types import KVRecord

Hook = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]  # layer, q, k, v: each [rows, heads * head_dim]
PROBE_LAYER = 1  # see serving.blend.scatter
PLACED = 8  # times as many tokens as are computed in a step of no other answers
LEADS, LEAD_TOKENS = 8, 1024  # beginnings of prompts that are kept, and how long they may be


class PassDone(Exception):
    """Ends a forward pass early, when it has shown what it was run for; not an error."""


class Model(Protocol):
    """vLLM's model on this rank."""

    layers: int
    beside: int  # see `Orders`
    step_s: float | None

    @property
    def piece(self) -> int:
        """Rows of one forward pass at most, in this step."""
        ...

    def run(
        self, ids: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, before: Hook | None = None,
        after: Hook | None = None,
    ) -> Generator[None, None, None]:  # fmt: skip
        """Compute rows at sorted `positions`: in every layer their K and V replace what is there, then row i sees key j if and
        only if pos_j <= pos_i. `before` a layer's attention, and `after` it, a hook is called, which may raise PassDone. Yields
        between layers where all of them would hold up the answers beside this prompt."""
        ...

    def sum_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on each."""
        ...


@dataclass
class Layout:
    """`Placed` of one job: which positions have stored KV, and which are fresh. Before `start` nothing is ours."""

    tokens: int
    fresh: torch.Tensor
    spans: list[tuple[int, int]]
    anchors: torch.Tensor
    best: torch.Tensor
    tail_start: int
    plain: bool

    @property
    def stored(self) -> torch.Tensor:
        runs = [torch.arange(a, b, device=self.fresh.device) for a, b in self.spans]
        return torch.cat(runs) if runs else self.fresh[:0]


class Leads:
    """KV of prompts' beginnings [layers, 2, kv_heads, tokens, head_dim], by their tokens. Every rank keeps the same ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, ...], torch.Tensor] = OrderedDict()

    def get(self, ids: tuple[int, ...]) -> torch.Tensor | None:
        found = self._kept.get(ids)
        if found is not None:
            self._kept.move_to_end(ids)
        return found

    def keep(self, ids: tuple[int, ...], kv: torch.Tensor) -> None:
        if len(ids) <= LEAD_TOKENS:
            self._kept[ids] = kv
            while len(self._kept) > LEADS:
                self._kept.popitem(last=False)


@torch.inference_mode()
def blend(model: Model, pages: Pages, leads: Leads, job: Job, records: Mapping[str, KVRecord]) -> Generator[None, None, Told]:
    """Fill the job's pages; yields between pieces. `records`: the objects that may be used, by key."""
    begun = time.perf_counter()
    table = torch.tensor(job.blocks, device=pages.device)
    ids = torch.tensor(job.token_ids, device=pages.device)
    placed = yield from _place(model, pages, job, records, table)
    lead = _lead(placed, job.start)
    placed.fresh = placed.fresh[len(lead) :]
    yield from _compute_lead(model, pages, leads, job, lead, ids, table)
    chosen = yield from parse_method(job.plan.method).choose(placed, PageProbe(model, pages, placed, ids, table))
    rows = union(placed.fresh, chosen)
    for piece in _pieces(model, rows):
        yield from model.run(ids[piece], piece, table)
        yield
    stored, again = len(placed.stored), len(chosen)
    local = job.start  # found in vLLM's own prefix cache
    ms = (time.perf_counter() - begun) * 1000
    return Told(reused=local + stored - again, recomputed=again, computed=placed.tokens - local - stored, blend_ms=ms)


def _place(
    model: Model, pages: Pages, job: Job, records: Mapping[str, KVRecord], table: torch.Tensor
) -> Generator[None, None, Layout]:
    """A span in each piece where answers are written beside this prompt: all of them at once would hold those up for several of
    their steps. Else some times as many tokens as may be computed in a step, which takes longer all the same."""
    tokens, plan, device = len(job.token_ids), job.plan, pages.device
    spans, anchors, best = [], [], range(0)
    known = torch.zeros(tokens, dtype=torch.bool)
    known[: job.start] = True
    some: list[tuple[torch.Tensor, int]] = []
    for span, start, end in spans_beyond(_usable(plan.spans, records), job.start):
        record = records[span.key]
        first = span.skip + start - span.start
        some.append((record.kv[:, :, :, first : first + end - start], start))
        known[start:end] = True
        spans.append((start, end))
        if span.kind == "label" and start == span.start:
            anchors.append(start)
        if span.best:
            best = range(start, end)
        if model.beside or sum(kv.shape[3] for kv, _ in some) >= PLACED * model.piece:
            pages.place(some, table)
            some = []
            yield
    if some:
        pages.place(some, table)
    fresh = (~known).nonzero()[:, 0].to(device)
    at_labels, at_best = (torch.tensor([*p], dtype=torch.long, device=device) for p in (anchors, best))
    return Layout(tokens, fresh, spans, at_labels, at_best, plan.tail_start, plan.plain)


def _pieces(model: Model, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rows of one step after the other. How many is asked at each, on all ranks alike: others may have come, or ended."""
    while len(rows):
        most = model.piece
        yield rows[:most]
        rows = rows[most:]


def _usable(spans: Sequence[Span], records: Mapping[str, KVRecord]) -> list[Span]:
    """Those with a record; of labels those before a chunk that has one, since what a label says is about its chunk."""
    chunks = {span.start for span in spans if span.kind == "chunk" and span.key in records}
    return [span for span in spans if span.key in records and (span.kind == "chunk" or span.end in chunks)]


def _lead(placed: Layout, start: int) -> torch.Tensor:
    """The fresh tokens before anything that is stored: they are exact once they are computed."""
    end = placed.spans[0][0] if placed.spans else start
    return placed.fresh[placed.fresh < end]


def _compute_lead(
    model: Model, pages: Pages, leads: Leads, job: Job, lead: torch.Tensor, ids: torch.Tensor, table: torch.Tensor
) -> Generator[None, None, None]:
    text = job.token_ids[: len(lead)]
    kept = leads.get(text) if job.start == 0 else None
    if kept is not None:
        pages.put(kept, lead, table)
        return
    for piece in _pieces(model, lead):
        yield from model.run(ids[piece], piece, table)
        yield
    if job.start == 0 and len(lead):
        leads.keep(text, pages.take(lead, table))


class PageProbe:
    """`Probe` over vLLM's pages."""

    def __init__(self, model: Model, pages: Pages, placed: Layout, ids: torch.Tensor, table: torch.Tensor) -> None:
        self._model, self._pages, self._placed, self._ids, self._table = model, pages, placed, ids, table
        self.layers = model.layers

    def question_attention(self, rows: int, first: int, last: int) -> Generator[None, None, torch.Tensor]:
        """See `Probe`."""
        fresh = self._placed.fresh
        attention = torch.zeros(self._placed.tokens, device=fresh.device)
        left = len(fresh)
        for piece in _pieces(self._model, fresh):
            left -= len(piece)
            watched = max(0, min(rows - left, len(piece)))  # the question may lie in several pieces

            def observe(layer: int, q: torch.Tensor, _k: torch.Tensor, _v: torch.Tensor, piece=piece, watched=watched) -> None:  # type: ignore[no-untyped-def]
                if watched and layer >= first:
                    self._observe(attention, layer, q[-watched:], piece[-watched:])
                if layer + 1 >= last:
                    raise PassDone

            try:
                yield from self._model.run(self._ids[piece], piece, self._table, after=observe)
            except PassDone:
                pass
            yield
        return self._model.sum_ranks(attention)

    def _observe(self, attention: torch.Tensor, layer: int, q: torch.Tensor, positions: torch.Tensor) -> None:
        seen = int(positions[-1]) + 1
        keys = self._pages.keys(layer, seen, self._table)
        heads, _, dim = keys.shape
        queries = q.view(len(q), heads, -1, dim).permute(1, 2, 0, 3)  # query heads by the KV head that they share
        logits = (queries @ keys[:, None].transpose(-1, -2)).float() * dim**-0.5
        hidden = torch.arange(seen, device=q.device) > positions[:, None]
        attention[:seen] += logits.masked_fill_(hidden, -torch.inf).softmax(-1).sum((0, 1, 2))

    def deviation(self) -> Generator[None, None, torch.Tensor]:
        """See `Probe`. Pieces ascend, so that layer 0 is exact for each."""
        stored = self._placed.stored
        rows = union(self._placed.fresh, stored)
        found = torch.zeros(self._placed.tokens, device=rows.device)
        for piece in _pieces(self._model, rows):

            def measure(layer: int, _q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor, piece=piece) -> None:  # type: ignore[no-untyped-def]
                if layer == PROBE_LAYER:
                    there = self._pages.values(layer, piece, self._table).float()
                    found[piece] = (v.view(there.shape).float() - there).square().sum((1, 2))
                    raise PassDone

            try:
                yield from self._model.run(self._ids[piece], piece, self._table, before=measure)
            except PassDone:
                pass
            yield
        return self._model.sum_ranks(found)[stored]
