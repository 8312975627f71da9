"""What blending must never break, on every model family: each test is one invariant of `serving.blend`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fixtures_models import FAMILIES, Models

from bench.harness import drive
from precompute.frame import Turn
from precompute.passes import ContiguousPass
from precompute.reader import PIECE, Reader
from serving.blend.assembly import Assembly, Segment, assemble
from serving.blend.methods import METHODS, parse_method
from serving.blend.methods.default import SHARE
from serving.blend.scatter import ScatterPass
from serving.engine.opening import account
from serving.engine.sessions import BlendSession
from serving.engine.types import Report

LENGTHS = (1, 255, 256, 257)
ANSWER = 6
BLENDING = ("default", "reuse", "epic:4", "cacheblend:0.15", "question:0.1")
QUESTION = "How much is a season ticket?"
Prompt = list[Segment]


@pytest.fixture(params=FAMILIES)
def reader(request: pytest.FixtureRequest, tiny_models: Models) -> Reader:
    return tiny_models.reader(request.param)


@pytest.fixture
def llama(tiny_models: Models) -> Reader:
    return tiny_models.reader("llama")


def ids_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return tuple(torch.randint(10, 400, (length,), generator=generator).tolist())


def prompt(reader: Reader, chunks: Sequence[tuple[int, ...]], missing: Sequence[int] = ()) -> Prompt:
    """frame | (label, chunk)* | tail with the chunks' stored KV, except of those at the indices `missing`."""
    distinct = list(dict.fromkeys(chunks))
    stored = dict(zip(distinct, reader.compile(distinct), strict=True)) if distinct else {}
    segments = [Segment("frame", tuple(reader.format.frame))]
    for number, ids in enumerate(chunks):
        segments.append(Segment("label", tuple(reader.format.label(number + 1))))
        segments.append(Segment("chunk", ids, None if number in missing else stored[ids]))
    return [*segments, Segment("tail", tuple(reader.format.tail([Turn("user", QUESTION)])))]


def tokens_of(segments: Prompt) -> tuple[int, ...]:
    return tuple(i for s in segments for i in s.ids)


def blend(reader: Reader, segments: Prompt, method: str) -> tuple[Assembly, torch.Tensor]:
    chosen = parse_method(method)
    assembly = assemble(reader, segments, ANSWER, stored_labels=chosen.stored_labels)
    return assembly, drive(chosen.blend(reader, assembly))


def full(reader: Reader, segments: Prompt) -> tuple[Assembly, torch.Tensor]:
    return blend(reader, [Segment("tail", tokens_of(segments))], "full")


def greedy(reader: Reader, assembly: Assembly, logits: torch.Tensor) -> list[int]:
    ids: list[int] = []
    session = BlendSession(reader, assembly, parse_method("full"))
    for _ in range(ANSWER):
        ids.append(int(logits.argmax()))
        logits = session.step(ids[-1])
    return ids


# --- recomputing everything is full prefill ---------------------------------------------------------------------


@pytest.mark.parametrize("method", ["question:1.0", "cacheblend:1.0", "epic:10000"])
def test_recomputing_everything_equals_full_prefill(method: str, reader: Reader) -> None:
    """The prompt is longer than one piece of a forward pass."""
    segments = prompt(reader, [ids_of(n) for n in (40, 300, 257)])
    assert len(tokens_of(segments)) > PIECE
    whole, expected = full(reader, segments)
    assembly, found = blend(reader, segments, method)
    assert torch.allclose(found, expected, atol=1e-3, rtol=0)
    end = assembly.tokens
    assert torch.allclose(assembly.kv[:, :, :, :end], whole.kv[:, :, :, :end], atol=1e-3, rtol=0)
    assert greedy(reader, assembly, found) == greedy(reader, whole, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["question:1.0", "cacheblend:1.0"])
def test_recomputing_everything_in_bfloat16(method: str, family: str, tiny_models: Models) -> None:
    """bf16 has 8 bits of precision: here the distance is compared to that of a wrong blend, and to 5 % of the logits'
    spread."""
    reader = tiny_models.reader(family, dtype="bfloat16")
    segments = prompt(reader, [ids_of(n) for n in (40, 90, 60)])
    _, expected = full(reader, segments)
    _, found = blend(reader, segments, method)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_reuse_alone_does_not_equal_full_prefill(reader: Reader) -> None:
    """Guards the tests above: chunks do change when they see their neighbours."""
    segments = prompt(reader, [ids_of(n) for n in (40, 300, 257)])
    _, expected = full(reader, segments)
    _, found = blend(reader, segments, "reuse")
    assert (found - expected).abs().max() > 0.05


# --- same prefix, same position -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_a_chunk_behind_its_own_prefix_needs_no_recompute(length: int, reader: Reader) -> None:
    chunk = ids_of(length)
    frame, label = tuple(reader.format.frame), tuple(reader.format.label(1))
    before = [*frame, *label]
    prefix = reader.buffer(len(before))
    reader.prefill(prefix, before)
    kv = reader.compile_behind(prefix, [chunk])[0]
    tail = tuple(reader.format.tail([Turn("user", QUESTION)]))
    segments = [Segment("frame", frame), Segment("label", label), Segment("chunk", chunk, kv), Segment("tail", tail)]
    whole, expected = full(reader, segments)
    assembly, found = blend(reader, segments, "reuse")
    assert assembly.recomputed_token_layers == 0
    assert torch.allclose(found, expected, atol=1e-3, rtol=0)
    assert greedy(reader, assembly, found) == greedy(reader, whole, expected)


# --- what has no KV is computed ----------------------------------------------------------------------------------------


def test_unwritten_slots_are_nan_and_are_seen(llama: Reader) -> None:
    segments = prompt(llama, [ids_of(30), ids_of(31)], missing=[1])
    assembly = assemble(llama, segments, ANSWER)
    written = torch.ones(assembly.kv.shape[3], dtype=torch.bool)
    written[assembly.fresh] = False
    written[assembly.tokens :] = False
    assert assembly.kv[:, :, :, written].isfinite().all()
    assert assembly.kv[:, :, :, ~written].isnan().all()
    forgotten = assembly.fresh[5:]  # the first label is never computed
    last = llama.forward(assembly.ids[forgotten], forgotten, ScatterPass(assembly.kv, forgotten, llama.query_heads))
    assert last is not None
    assert last.isnan().all()


@pytest.mark.parametrize("method", BLENDING)
def test_a_missing_chunk_is_computed_outside_the_budget(method: str, llama: Reader) -> None:
    chunks = [ids_of(50), ids_of(60), ids_of(70)]
    segments = prompt(llama, chunks, missing=[1])
    assembly, logits = blend(llama, segments, method)
    assert logits.isfinite().all()
    labels = [len(s.ids) for s in segments if s.kind == "label"]
    ready = labels[0] + labels[2] if parse_method(method).stored_labels else 0
    computed = 60 + sum(labels) - ready + len(segments[-1].ids)
    assert len(assembly.fresh) == computed
    chunk_spans = [(a, b) for a, b in assembly.spans if b - a not in labels]
    assert chunk_spans == [(a, b) for a, b in spans_of(segments) if b - a != 60]


@pytest.mark.parametrize("method", ["reuse", "question:1.0", "cacheblend:1.0"])
def test_all_chunks_missing_is_full_prefill(method: str, reader: Reader) -> None:
    segments = prompt(reader, [ids_of(50), ids_of(300), ids_of(257)], missing=[0, 1, 2])
    _, expected = full(reader, segments)
    assembly, found = blend(reader, segments, method)
    assert torch.allclose(found, expected, atol=1e-3, rtol=0)
    assert assembly.recomputed_token_layers == 0


def test_a_missing_chunk_reads_what_stands_before_it(llama: Reader) -> None:
    """Its rows equal those of a pass over the same buffer, row by row."""
    segments = prompt(llama, [ids_of(20), ids_of(12)], missing=[1])
    assembly, found = blend(llama, segments, "reuse")
    slow = assemble(llama, segments, ANSWER)
    logits = None
    for at in slow.fresh.tolist():
        logits = llama.forward(slow.ids[at : at + 1], torch.tensor([at]), ContiguousPass(slow.kv, at))
    assert logits is not None
    assert torch.allclose(found, logits, atol=1e-3, rtol=0)
    end = slow.tokens
    assert torch.allclose(assembly.kv[:, :, :, :end], slow.kv[:, :, :, :end], atol=1e-3, rtol=0)


def spans_of(segments: Prompt) -> list[tuple[int, int]]:
    spans, at = [], 0
    for segment in segments:
        if segment.kind == "chunk":
            spans.append((at, at + len(segment.ids)))
        at += len(segment.ids)
    return spans


# --- every arrangement answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BLENDING)
def test_every_arrangement_answers(method: str, llama: Reader) -> None:
    a, b, c, d = (ids_of(n) for n in LENGTHS)
    arrangements: list[tuple[list[tuple[int, ...]], list[int]]] = [
        ([a, b, c, d], []),
        ([a, b, c, d], []),  # an exact repeat
        ([d, b, a, c], []),  # reordered
        ([b, b, b], []),  # the same chunk more than once
        ([a, a], []),
        ([a, b, c, d], [0, 1, 2, 3]),  # zero hits
        ([a, b, c, d], [0, 3]),
        ([], []),
        *(([one], []) for one in (a, b, c, d)),
    ]
    results = []
    for chunks, missing in arrangements:
        assembly, logits = blend(llama, prompt(llama, chunks, missing), method)
        assert logits.isfinite().all()
        assert assembly.kv[:, :, :, : assembly.tokens].isfinite().all()
        assert len(greedy(llama, assembly, logits)) == ANSWER
        results.append(logits)
    assert torch.equal(results[0], results[1])
    assert not torch.allclose(results[0], results[2], atol=1e-2)


def test_every_method_of_the_list_is_tried_here() -> None:
    assert {name.partition(":")[0] for name in BLENDING} | {"full"} == set(METHODS)


# --- causality -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["reuse", "epic:4", "question:1.0", "cacheblend:1.0"])
def test_a_later_chunk_never_changes_what_stands_before_it(method: str, reader: Reader) -> None:
    first, later, other = ids_of(40), ids_of(50), ids_of(50, seed=9)
    for missing in ([], [0], [1], [0, 1]):
        one, _ = blend(reader, prompt(reader, [first, later], missing), method)
        two, _ = blend(reader, prompt(reader, [first, other], missing), method)
        start = spans_of(prompt(reader, [first, later]))[1][0]
        assert torch.allclose(one.kv[:, :, :, :start], two.kv[:, :, :, :start], atol=1e-5, rtol=0)
        assert (one.kv[:, :, :, start:-ANSWER] - two.kv[:, :, :, start:-ANSWER]).abs().max() > 0.01


def test_scattered_rows_see_exactly_the_keys_up_to_their_own(llama: Reader) -> None:
    """Row i of a scattered set equals row i computed alone: no row sees its future, none misses its past."""
    segments = prompt(llama, [ids_of(64)])
    whole, _ = full(llama, segments)
    rows = torch.tensor([0, 1, 7, 30, 31, 64, whole.tokens - 1])
    kv = whole.kv.clone()
    llama.forward(whole.ids[rows], rows, ScatterPass(kv, rows, llama.query_heads), logits=False)
    end = whole.tokens
    assert torch.allclose(kv[:, :, :, :end], whole.kv[:, :, :, :end], atol=1e-4, rtol=0)
    cut = whole.kv.clone()
    cut[:, :, :, 32:] = torch.nan  # whatever stands behind row 31 does not matter to it
    early = rows[rows <= 31]
    llama.forward(whole.ids[early], early, ScatterPass(cut, early, llama.query_heads), logits=False)
    assert torch.allclose(cut[:, :, :, :32], whole.kv[:, :, :, :32], atol=1e-4, rtol=0)


def test_pieces_of_a_scattered_set_equal_one_pass(llama: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = prompt(llama, [ids_of(n) for n in (100, 120)], missing=[1])
    _, expected = blend(llama, segments, "question:0.3")
    monkeypatch.setattr("serving.blend.scatter.PIECE", 40)
    _, found = blend(llama, segments, "question:0.3")
    assert torch.allclose(found, expected, atol=1e-3, rtol=0)


# --- stored records stay as they are -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["epic:4", "question:1.0", "cacheblend:1.0"])
def test_stored_kv_is_never_written(method: str, llama: Reader) -> None:
    """A record may be shared by several prompts at once."""
    segments = prompt(llama, [ids_of(30), ids_of(30), ids_of(40)])
    before = [s.kv.clone() for s in segments if s.kv is not None]
    frame = llama.frame_kv().clone()
    blend(llama, segments, method)
    assert all(torch.equal(a, s.kv) for a, s in zip(before, [s for s in segments if s.kv is not None], strict=True))
    assert torch.equal(frame, llama.frame_kv())


# --- accounting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [[], [1], [0, 1, 2]])
@pytest.mark.parametrize("method", [*BLENDING, "question:1.0", "cacheblend:1.0", "full"])
def test_token_counts_add_up_to_the_prompt(method: str, missing: list[int], llama: Reader) -> None:
    segments = prompt(llama, [ids_of(50), ids_of(60), ids_of(90)], missing)
    if method == "full":
        segments = [Segment("tail", tokens_of(segments))]
    chosen = parse_method(method)
    assembly = assemble(llama, segments, ANSWER, stored_labels=chosen.stored_labels)
    session = BlendSession(llama, assembly, chosen)
    drive(session.start())
    report = Report()
    account(report, session, llama.layers)
    assert report.tokens_reused + report.tokens_recomputed + report.tokens_computed == len(tokens_of(segments))
    assert min(report.tokens_reused, report.tokens_recomputed, report.tokens_computed) >= 0
    stored = sum(b - a for a, b in session.assembly.spans)
    assert report.recomputed_fraction == pytest.approx(expected_fraction(method, session.assembly.spans, llama.layers))
    assert (report.recomputed_fraction > 0) == (method not in ("reuse", "full") and stored > 0)


def expected_fraction(method: str, spans: Sequence[tuple[int, int]], layers: int) -> float:
    """Token-layers that were computed again, of those stored; from the method's definition."""
    stored = sum(b - a for a, b in spans)
    if not stored:
        return 0.0
    name, _, argument = method.partition(":")
    chosen = {
        "full": lambda: 0,
        "reuse": lambda: 0,
        "default": lambda: round(stored * SHARE),
        "epic": lambda: sum(min(int(argument), b - a) for a, b in spans),
        "question": lambda: round(stored * float(argument)),
        "cacheblend": lambda: round(stored * float(argument)),
    }[name]()
    probed = stored if name == "cacheblend" else 0  # its first layer runs over everything, to choose
    return (chosen * layers + probed) / (stored * layers)


class _Counter:
    """Counts the rows at `stored` positions whose attention was completed, over all layers."""

    def __init__(self, stored: set[int]) -> None:
        self._stored, self.rows = stored, 0

    def around(self, forward: Any) -> Any:
        def counted(reader: Reader, ids: torch.Tensor, positions: torch.Tensor, kv_pass: Any, logits: bool = True) -> Any:
            attend, rows = kv_pass.attend, sum(p in self._stored for p in positions.tolist())

            def counting(*arguments: Any) -> Any:
                result = attend(*arguments)
                self.rows += rows
                return result

            kv_pass.attend = counting
            return forward(reader, ids, positions, kv_pass, logits)

        return counted


def test_the_report_counts_rows_that_were_really_run(llama: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted independently: rows that pass through each layer's attention and belong to a stored chunk."""
    segments = prompt(llama, [ids_of(50), ids_of(60)])
    for method in (*BLENDING, "question:1.0"):
        assembly = assemble(llama, segments, ANSWER, stored_labels=parse_method(method).stored_labels)
        stored = set(assembly.stored.tolist())
        counter = _Counter(stored)
        with monkeypatch.context() as patched:
            patched.setattr(Reader, "forward", counter.around(Reader.forward))
            drive(parse_method(method).blend(llama, assembly))
        assert assembly.recomputed_token_layers == counter.rows


def test_the_retrievers_first_choice_is_computed_again(llama: Reader) -> None:
    from dataclasses import replace

    chunks = [ids_of(40), ids_of(41), ids_of(200)]
    plain = prompt(llama, chunks)
    ranked = [replace(s, best=s.ids == chunks[1]) for s in plain]
    [span] = [(a, b) for a, b in spans_of(ranked) if b - a == 41]
    found, _ = blend(llama, ranked, "question:0.3")
    truth, _ = full(llama, ranked)
    unranked, _ = blend(llama, plain, "question:0.3")

    def distance(assembly: Assembly) -> float:
        return float((assembly.kv - truth.kv)[1, 1, :, span[0] : span[1]].abs().max())

    assert len(found.best) == 41
    assert distance(found) < distance(unranked)
    assert found.recomputed_token_layers == unranked.recomputed_token_layers
