"""The basis of the transform codec for one model, from reading the filler passages once.

K is measured by what its error does to the attention's logits: a query q sees an error e of K as q e / sqrt(head_dim), so
errors are weighed by the second moment of the queries, turned to the distances at which they may stand (position-free
K has no place of its own). In this measure the principal components are taken, and all are rounded with one step: for
equal steps the mean squared error per bit is least. A step of s moves a logit by s / sqrt(12), root mean square, whatever
the head's width. V's step is a share of its layer's deviation.
"""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import replace
from types import MappingProxyType

import torch

from precompute.passes import ContiguousPass
from precompute.reader import PIECE, Reader
from precompute.spec import ReaderSpec, filler_passages
from storage.codecs.basis import Basis
from storage.codecs.shelf import CodecShelf
from storage.codecs.transform import Transform

# Steps of K, in logits, and of V, in shares of the deviation of a layer's V from its mean. What they cost: BENCHMARKS.md.
STEPS = MappingProxyType({"transform": (0.65, 0.35), "transform8": (2.0, 0.75)})
FLOOR = 1e-2  # of a head's strongest query direction: no direction of K counts for less than this
SETTLE_S = 0.2  # in which another process's note is written, in a store that knows no condition for writing
TOKENS = 1024  # that are read; more of them move the figures by less than another text would


VERSION = 1  # of how a basis is made: another one makes another basis, which a new note points to


def use_codec(reader: ReaderSpec, name: str, shelf: CodecShelf) -> None:
    """Let what `reader` compiles be stored by the codec of this name, one of CODEC_NAMES, and by the others where it is
    asked for them. A basis is made when it is first asked for. Raises StorageUnavailable."""
    if reader.full_prefill_reason:
        return
    known, looking = {}, threading.Lock()

    def named(codec: str) -> str:
        with looking:
            if codec not in known:
                known[codec] = basis_codec(reader, shelf, codec).name if codec in STEPS else codec
            return known[codec]

    reader.codec_named = named
    reader.profile = reader.stored_as(name)


def basis_codec(reader: ReaderSpec, shelf: CodecShelf, name: str) -> Transform:
    """The transform codec of this model called `name` in STEPS: with the basis that the store holds, or one made now.

    The note in the store, not the calculation, says which: another machine's rounding would make another basis, whose
    name is in every key. The first one's note stays, and all who have calculated meanwhile take that one; where the store
    cannot tell who is first, they take the last one's. Raises StorageUnavailable."""
    purpose = hashlib.sha256(repr((VERSION, STEPS[name], replace(reader.profile, codec=""))).encode()).hexdigest()
    codec = shelf.noted(purpose)
    if not isinstance(codec, Transform):  # none yet, or damaged: made again, on the same machine it is the same
        made = shelf.add(calibrate(_loaded(reader), *STEPS[name]))
        shelf.note(purpose, made)
        time.sleep(SETTLE_S)
        codec = shelf.noted(purpose)
    return codec if isinstance(codec, Transform) else made


def remade(reader: ReaderSpec, digest: str) -> Basis | None:
    """The basis of this digest, if it is one that this model has on this machine."""
    loaded = _loaded(reader)
    made = (calibrate(loaded, *steps) for steps in STEPS.values())
    return next((basis for basis in made if basis.digest == digest), None)


def _loaded(reader: ReaderSpec) -> Reader:
    """It, or for as long as this takes one with weights."""
    return reader if isinstance(reader, Reader) else Reader(reader.folder, dtype=reader.profile.dtype)


class _Listening(ContiguousPass):
    """Prefill that keeps each layer's queries, on the CPU."""

    def __init__(self, kv: torch.Tensor, start: int, queries: list[list[torch.Tensor]]) -> None:
        super().__init__(kv, start)
        self._queries = queries

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        self._queries[layer].append(q[0] * scale)
        return super().attend(layer, q, k, v, scale)


@torch.inference_mode()
def calibrate(reader: Reader, k_step: float, v_step: float) -> Basis:
    """A basis for the KV of this model. The same for the same model, machine and number of threads."""
    kv, queries, start = _read(reader)
    generator = torch.Generator().manual_seed(0)
    means, steps, matrices = [], [], []
    for layer in range(reader.layers):
        k, v = kv[layer, :, :, start:].double().cpu()
        means.append(torch.stack([k.mean(1), v.mean(1)]))
        spread = (v - v.mean(1, keepdim=True)).square().mean().sqrt().clamp_min(1e-6)
        steps.append(v_step * spread)
        matrices.append(_components(k, _weight(reader, torch.cat(queries[layer], 1), generator), k_step))
    return Basis(torch.stack(means).float(), torch.stack(steps).float(), torch.stack(matrices).to(torch.bfloat16))


def _read(reader: Reader) -> tuple[torch.Tensor, list[list[torch.Tensor]], int]:
    """Position-free KV of frame and labelled passages, each layer's queries [heads, rows, head_dim] by piece, times the
    attention's scale, and where the passages begin."""
    ids = list(reader.format.frame)
    for number, passage in enumerate(filler_passages(), 1):
        ids += [*reader.format.label(number), *reader.tokenizer.encode(passage)]
    ids = ids[: min(TOKENS, reader.max_positions)]
    kv = reader.buffer(len(ids))
    queries: list[list[torch.Tensor]] = [[] for _ in range(reader.layers)]
    positions = torch.arange(len(ids), device=reader.device)
    tokens = torch.tensor(ids, device=reader.device)
    for at in range(0, len(ids), PIECE):
        piece = slice(at, at + PIECE)
        reader.forward(tokens[piece], positions[piece], _Listening(kv, at, queries), logits=False)
    kv[:, 0] = reader.rope.unplace(kv[:, 0], positions)
    return kv, queries, min(len(reader.format.frame), len(ids) - 1)


def _weight(reader: Reader, queries: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Second moment [kv_heads, head_dim, head_dim] of what position-free K is multiplied with, fp64."""
    heads, rows, width = queries.shape
    # A key at position j meets the query turned back by j; j is drawn evenly from the positions before the query.
    back = (torch.rand(rows, generator=generator) * torch.arange(rows)).long().to(reader.device)
    turned = reader.rope.unplace(queries.float(), back).cpu()
    total = (turned.transpose(1, 2) @ turned).double() / rows
    return total.view(reader.kv_heads, heads // reader.kv_heads, width, width).mean(1)


def _components(x: torch.Tensor, weight: torch.Tensor, step: float) -> torch.Tensor:
    """Matrices [kv_heads, components, head_dim] for `x` [kv_heads, tokens, head_dim]: principal components where errors are
    weighed by `weight`, the largest first; all steps together make a `step`."""
    values, vectors = torch.linalg.eigh(weight)
    root = values.clamp_min(FLOOR * float(values.max()) + 1e-12).sqrt().unsqueeze(-2)
    there, back = vectors * root, (vectors / root).transpose(1, 2)
    y = (x - x.mean(1, keepdim=True)) @ there
    _, axes = torch.linalg.eigh(y.transpose(1, 2) @ y)  # ascending
    matrices: torch.Tensor = step / x.shape[2] ** 0.5 * axes.flip(-1).transpose(1, 2) @ back
    return matrices
