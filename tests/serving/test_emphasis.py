"""Emphasis: a weight moves the attention that a span is paid, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from api_kit import Site
from engine_kit import EngineSite
from fixtures_models import retrieved

from precompute.passes import ContiguousPass
from serving.blend.assembly import Segment, assemble
from serving.blend.scatter import ScatterPass
from serving.emphasis import emphasis_of
from serving.engine.types import Emphasis
from storage.errors import UserError

WEIGHTS = (0.1, 0.5, 1.0, 2.0, 8.0)
KEYS, SPAN = 40, slice(10, 20)


def shares(kind: str, rows: int, weight: float) -> torch.Tensor:
    """The attention share [heads, rows] of the span, of rows at the end of a buffer: V is 1 there and 0 elsewhere."""
    generator = torch.Generator().manual_seed(3)
    kv = torch.randn(1, 2, 2, KEYS, 8, generator=generator)
    kv[0, 1] = 0.0
    kv[0, 1, :, SPAN] = 1.0
    bias = torch.zeros(KEYS)
    bias[SPAN] = torch.tensor(weight).log()
    q, k = torch.randn(1, 4, rows, 8, generator=generator), torch.randn(1, 2, rows, 8, generator=generator)
    start = KEYS - rows
    if kind == "contiguous":
        chosen = ContiguousPass(kv, start, bias)
    else:
        from serving.blend.assembly import Steering

        chosen = ScatterPass(kv, torch.arange(start, KEYS), 4, Steering(bias, start))
    return chosen.attend(0, q, k, torch.zeros_like(k), 8**-0.5)[0, :, :, 0]


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", ["contiguous", "scattered"])
def test_the_odds_of_a_span_are_multiplied_by_its_weight(kind: str, rows: int) -> None:
    plain = shares(kind, rows, 1.0)
    assert 0.01 < float(plain.min()) < float(plain.max()) < 0.99
    for weight in WEIGHTS:
        steered = shares(kind, rows, weight)
        torch.testing.assert_close(steered / (1 - steered), weight * plain / (1 - plain), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["default", "reuse", "cacheblend:0.3", "full"])
def test_attention_to_a_chunk_grows_with_its_weight(
    method: str, engine_site: EngineSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on real prompts, in the pass that gives the answer's first logits, at the prompt's last token."""
    # Unsteered, full prefill reads everything in one piece, of which the trick below sees nothing.
    weights = [w for w in WEIGHTS if w != 1.0 or method != "full"]
    measured = [_share_of_chunk(engine_site, monkeypatch, method, weight) for weight in weights]
    assert measured == sorted(measured)
    assert measured[-1] > 2 * measured[0]


def _share_of_chunk(site: EngineSite, monkeypatch: pytest.MonkeyPatch, method: str, weight: float) -> float:
    """Mean share of the second chunk over layers and heads: attention is run once more with V = 1 there, 0 elsewhere."""
    chunk = site.chunks[1]
    emphasis = {chunk.chunk_id: (Emphasis(chunk.start, chunk.end, weight),)}
    before = sum(len(c.token_ids) for c in site.chunks[:1])
    fmt = site.reader.format
    start = len(fmt.frame) + len(fmt.label(1)) + before + len(fmt.label(2))
    found: list[float] = []
    forward = type(site.reader).forward

    def watched(reader, ids, positions, kv_pass, logits=True):  # type: ignore[no-untyped-def]
        if logits and not found:
            attend = kv_pass.attend

            def twice(layer, q, k, v, scale):  # type: ignore[no-untyped-def]
                kept = kv_pass._kv[layer, 1].clone()
                kv_pass._kv[layer, 1] = 0.0
                kv_pass._kv[layer, 1, :, start : start + len(chunk.token_ids)] = 1.0
                found.append(float(attend(layer, q, k, torch.zeros_like(v), scale)[0, :, -1, 0].mean()))
                kv_pass._kv[layer, 1] = kept
                return attend(layer, q, k, v, scale)

            kv_pass.attend = twice
        return forward(reader, ids, positions, kv_pass, logits)

    with monkeypatch.context() as patch:
        patch.setattr(type(site.reader), "forward", watched)
        site.answer(method=method, emphasis=emphasis, max_tokens=1)
    assert len(found) == site.reader.layers
    return sum(found) / len(found)


@pytest.mark.parametrize("method", ["default", "reuse", "full"])
def test_weight_one_is_bit_identical_to_none(method: str, engine_site: EngineSite) -> None:
    reader = engine_site.reader
    chunks = reader.compile([c.token_ids for c in engine_site.chunks])
    tail = Segment("tail", tuple(range(20, 30)))
    weighted = [Segment("frame", tuple(reader.format.frame))]
    for n, (c, kv) in enumerate(zip(engine_site.chunks, chunks, strict=True), 1):
        weights = (1.0,) * len(c.token_ids)
        weighted += [Segment("label", tuple(reader.format.label(n))), Segment("chunk", c.token_ids, kv, weights)]
    weighted.append(tail)
    assert assemble(reader, weighted, 4).steering is None
    spans = {c.chunk_id: (Emphasis(c.start, c.end, 1.0),) for c in engine_site.chunks}
    plain, same = engine_site.answer(method=method), engine_site.answer(method=method, emphasis=spans)
    assert plain.text == same.text
    assert same.report.tokens_emphasised == 0


def test_emphasis_is_reported_and_changes_the_answer(engine_site: EngineSite) -> None:
    chunk = engine_site.chunks[1]
    plain = engine_site.answer(max_tokens=24)
    steered = engine_site.answer(max_tokens=24, emphasis={chunk.chunk_id: (Emphasis(chunk.start, chunk.end, 100.0),)})
    assert steered.report.tokens_emphasised == len(chunk.token_ids)
    assert steered.text != plain.text


def test_a_span_is_weighted_to_the_token(engine_site: EngineSite) -> None:
    text, word = "The ferry leaves the northern harbour at seven.", "northern harbour"
    tokenizer = engine_site.reader.tokenizer
    chunk = replace(retrieved(7, tuple(tokenizer.encode(text))), text=text, start=500, end=500 + len(text))
    at = 500 + text.index(word)
    for start, end in ((at, at + len(word)), (at + 2, at + len(word) - 2)):
        spans = {7: (Emphasis(start, end, 5.0),)}
        outcome = engine_site.answer(chunks=(chunk,), emphasis=spans, max_tokens=1)
        [weights] = [engine_site.engine._opening._weights(chunk, spans[7])]
        weighted = tokenizer.decode([t for t, w in zip(chunk.token_ids, weights or (), strict=True) if w == 5.0])
        assert weighted.strip() == word
        assert outcome.report.tokens_emphasised == sum(w == 5.0 for w in weights or ())


# --- as people write it -------------------------------------------------------------------------------------------------


def test_documents_spans_and_standing_rules() -> None:
    chunk = replace(retrieved(1, (1, 2, 3)), document_id="doc-a", file_id="file-a", path="policies/x.md", start=100, end=200)
    other = replace(chunk, chunk_id=2, document_id="doc-b", file_id="file-b", path="notes/y.md")
    standing = {chunk.corpus_id: {"*": 0.5, "policies/*": 4.0}}
    assert emphasis_of([chunk], {}, {}) == {}
    assert emphasis_of([chunk, other], {}, standing) == {1: (Emphasis(100, 200, 4.0),), 2: (Emphasis(100, 200, 0.5),)}
    assert emphasis_of([chunk], {"doc-a": 1.0}, standing) == {}
    for name in ("doc-a", "file-a"):
        assert emphasis_of([chunk, other], {name: 3.0}, {}) == {1: (Emphasis(100, 200, 3.0),)}
    span = {"doc-a:150-160": 9.0, "doc-a:200-300": 9.0, "doc-b:0-10": 9.0}
    assert emphasis_of([chunk, other], span, {}) == {1: (Emphasis(150, 160, 9.0),)}


NAN = float("nan")


@pytest.mark.parametrize(
    "asked", [{"d": 0.0}, {"d": -1.0}, {"d": 1e9}, {"d": NAN}, {"d:9-9": 2.0}, {"\ud800": 2.0}, {"d" * 5000: 2.0}]
)
def test_nonsense_is_refused_with_what_to_do(asked: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"weight of|span of|none of them"):
        emphasis_of([retrieved(1, (1, 2, 3))], asked, {})


def test_over_rest_the_request_and_the_corpus_reach_the_engine(site: Site) -> None:
    texts = {"policies/a.txt": "Invoices are due after thirty days.", "notes/b.txt": "Invoices are due soon."}
    corpus = site.corpus_of("handbook", texts)
    messages = [{"role": "user", "content": "invoices due"}]
    question = {"model": "echo-1", "messages": messages, "vector_store_ids": [corpus]}
    with site.http() as http:
        assert http.get(f"/v1/corpora/{corpus}/settings").json()["emphasis"] == {}
        rules = {"emphasis": {"policies/*": 3.0}}
        assert http.put(f"/v1/corpora/{corpus}/settings", json=rules).json()["emphasis"] == rules["emphasis"]
        answer = http.post("/v1/chat/completions", json=question).json()
        by_path = {c["filename"]: c["document_id"] for c in answer["citations"]}
        asked = {"emphasis": {by_path["notes/b.txt"]: 0.2}}
        http.post("/v1/chat/completions", json={**question, "preread": asked}).raise_for_status()
        refused = http.post("/v1/chat/completions", json={**question, "preread": {"emphasis": {by_path["notes/b.txt"]: 0}}})
        assert refused.status_code == 400
        assert "from 0.01 to 100" in refused.json()["error"]["message"]
        assert http.put(f"/v1/corpora/{corpus}/settings", json={"emphasis": {"*": -1}}).status_code == 400
    weights = [
        {c.path: request.emphasis[c.chunk_id][0].weight for c in request.chunks if c.chunk_id in request.emphasis}
        for request in site.engine.requests[-2:]
    ]
    assert weights == [{"policies/a.txt": 3.0}, {"policies/a.txt": 3.0, "notes/b.txt": 0.2}]
