"""A score says how much a passage has to do with a question: the embedded model tells questions about a corpus from others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_library import Library

from retrieval.embedder import SentenceEmbedder
from retrieval.relevance import EXACT, RELEVANT, relevance
from storage.catalogue.engine import migrate
from storage.types import RetrievedChunk

SAMPLES = Path(__file__).parents[2] / "samples"
OTHER = (
    "What is the weather in Berlin tomorrow?", "How do I bake sourdough bread?", "Who won the football world cup in 1998?",
    "Write a haiku about autumn.", "What is the capital of Mongolia?", "Explain photosynthesis.", "How tall is Mount Everest?",
    "Who painted the Mona Lisa?", "Which planet is the largest?", "What are the symptoms of measles?", "Recommend a film.",
    "How many legs does a spider have?", "Translate good morning into French.", "Who sang the first song of the opera?",
    "How do volcanoes erupt?", "When did the Roman empire fall?", "What do pandas eat?", "How is cheese made?",
    "Which chess opening suits a beginner?", "What is the boiling point of mercury?",
)  # fmt: skip


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    """The sample policies, a paragraph a chunk."""
    url = f"sqlite:///{tmp_path_factory.mktemp('relevance')}/catalogue.db"
    migrate(url)
    library = Library(url, SentenceEmbedder())
    library.index.ensure()
    library.corpus("vs_1")
    for path in sorted((SAMPLES / "policies").iterdir()):
        library.put("vs_1", path.name, *(part for part in path.read_text("utf-8").split("\n\n") if len(part) > 80))
    library.put("vs_1", "invoice", "Reference QX-77812-B was settled by bank transfer.")
    yield library
    library.catalogue.close()


def found(library: Library, question: str, threshold: float | None = RELEVANT) -> list[RetrievedChunk]:
    wanted = {"tenant_id": "t1", "corpus_ids": ["vs_1"], "top_k": 5, "score_threshold": threshold}
    return library.retriever.search(query=question, **wanted)


def test_questions_about_the_corpus_find_something_and_others_do_not(policies: Library) -> None:
    lines = map(json.loads, (SAMPLES / "questions.jsonl").read_text("utf-8").splitlines())
    asked = [line["question"] for line in lines if line["corpus"] == "policies"]
    assert len(asked) >= 8
    missed = [question for question in asked if not found(policies, question)]
    assert not missed
    let_through = [(question, hits[0].score) for question in OTHER if (hits := found(policies, question))]
    assert len(let_through) <= len(OTHER) // 20, let_through


def test_a_number_that_the_embedder_cannot_know_is_found_by_its_words(policies: Library) -> None:
    [first, *_] = found(policies, "QX-77812-B")
    assert "QX-77812-B" in first.text
    assert first.score >= EXACT


def test_the_threshold_leaves_the_order_and_the_scores_as_they_are(policies: Library) -> None:
    every = found(policies, "hotel prices in Zurich", None)
    cut = sorted(chunk.score for chunk in every)[2]
    above = [chunk for chunk in every if chunk.score >= cut]
    assert 0 < len(above) < len(every)
    kept = found(policies, "hotel prices in Zurich", cut)
    assert [(c.chunk_id, c.score) for c in kept][: len(above)] == [(c.chunk_id, c.score) for c in above]
    assert all(chunk.score >= cut for chunk in kept)


def test_a_score_is_the_cosine_also_of_what_only_words_have_found(policies: Library) -> None:
    embedder = SentenceEmbedder()
    question = "train, as a means of transport for business journeys"
    [asked] = embedder.embed([question])
    for chunk in found(policies, question, None):
        [vector] = embedder.embed([chunk.text])
        cosine = sum(a * b for a, b in zip(asked, vector, strict=True))
        assert chunk.score >= cosine - 1e-4


@pytest.mark.parametrize(
    ("cosine", "worded", "score"),
    [
        (0.7, 0.0, 0.7), (-0.2, 0.0, 0.0), (None, 0.0, 0.0), (0.1, 1.0, EXACT), (0.1, 3.0, EXACT), (0.1, 0.5, EXACT / 4),
        (1.1, 0.0, 1.0),
    ],
)
def test_meaning_and_words_make_one_score(cosine: float | None, worded: float, score: float) -> None:
    assert relevance(cosine, worded) == pytest.approx(score)
