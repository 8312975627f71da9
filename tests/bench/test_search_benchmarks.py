"""The two benchmarks of search, small: that they measure what they say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from bench import retrieval, search
from storage.errors import UserError


def test_search_times_every_stage_and_finds_what_is_nearest(tmp_path: Path) -> None:
    record = search.run(chunks=60, questions=2, database="", out=tmp_path / "out.json", workdir=tmp_path)
    assert json.loads((tmp_path / "out.json").read_text())["machine"]
    for case in record["cases"].values():
        assert case["dense_recall_at_8"] == 1.0
        assert {"embed", "rules", "dense", "lexical", "rows", "confirm"} <= case["stages_cpu_p50_ms"].keys()
        assert case["p50_ms"] > 0


TEXT = "Apples\n\nApples are red and sweet.\n\nPears\n\nPears are green, and ripe in autumn.\n"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "fruit.txt").write_text(TEXT)
    start = TEXT.index("Pears are")
    span = {"path": "fruit.txt", "start": start, "end": start + len("Pears are green")}
    (tmp_path / "questions.jsonl").write_text(json.dumps({"question": "Which colour have pears?", "spans": [span]}))
    return tmp_path / "questions.jsonl"


def test_all_that_is_found_is_all_of_the_gold_and_a_missing_splitter_says_so(
    tmp_path: Path, questions: Path, monkeypatch: pytest.MonkeyPatch, tiny_models
) -> None:
    monkeypatch.setattr(retrieval, "WAYS", {n: retrieval.WAYS[n] for n in ("ours (400, product)", "fixed (100)")})
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == retrieval.PEER else find_spec(name, *rest)
    )
    record = retrieval.run(
        corpus=tmp_path / "corpus", questions=questions, out=None, workdir=tmp_path, model=str(tiny_models.folder("llama"))
    )
    ours, theirs = record["ways"].values()
    assert ours["recall_16"] == 1.0
    assert 0 < ours["precision_16"] < 1
    assert "not installed" in theirs["reason"]


def test_a_gold_span_in_a_document_that_is_absent_is_refused(tmp_path: Path, questions: Path, tiny_models) -> None:
    (tmp_path / "corpus" / "fruit.txt").rename(tmp_path / "corpus" / "other.txt")
    with pytest.raises(UserError, match="not in the corpus"):
        retrieval.run(
            corpus=tmp_path / "corpus", questions=questions, out=None, workdir=tmp_path,
            model=str(tiny_models.folder("llama")),
        )  # fmt: skip


def test_the_budget_cuts_the_chunk_in_which_it_ends_and_characters_count_once() -> None:
    spans = [("a", 0, 100, 50), ("a", 50, 150, 50), ("b", 0, 10, 5)]
    assert retrieval._within(spans, 75) == [("a", 0, 100), ("a", 50, 100)]
    assert retrieval._scores([("a", 0, 100), ("a", 50, 100)], [("a", 90, 110)]) == (0.5, 0.1)
