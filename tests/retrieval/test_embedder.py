"""The embedded model itself: small, but real."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from retrieval.embedder import SentenceEmbedder, _by_length, find_model
from storage.errors import FileError, UserError
from storage.types import TextEmbedder


@pytest.fixture(scope="module")
def embedder() -> SentenceEmbedder:
    return SentenceEmbedder(batch=4)


TEXTS = [
    "Parental leave lasts twenty weeks.",
    "word " * 400,
    "",
    "Trains are booked in second class.",
    "猫が好き",
    "a",
    "b",
]


def test_vectors_are_unit_and_in_the_order_of_the_texts(embedder: TextEmbedder) -> None:
    together = np.array(embedder.embed(TEXTS))
    assert together.shape == (len(TEXTS), embedder.dimensions) == (len(TEXTS), 384)
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-5)
    alone = np.array([embedder.embed([text])[0] for text in TEXTS])
    assert np.abs(together - alone).max() < 1e-5


def test_vectors_are_those_of_sentence_transformers(embedder: SentenceEmbedder) -> None:
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(find_model("embedded")), device="cpu", local_files_only=True)
    expected = reference.encode(TEXTS, show_progress_bar=False)
    assert np.abs(np.array(embedder.embed(TEXTS)) - expected).max() < 1e-5


def test_meaning_is_near_meaning(embedder: TextEmbedder) -> None:
    leave, train, question = np.array(
        embedder.embed([TEXTS[0], TEXTS[3], "How much time off do new parents get?"])
    )
    assert question @ leave > question @ train + 0.2


def test_no_text_takes_its_neighbours_down(embedder: SentenceEmbedder) -> None:
    poison = ["fine", "\ud800 lone", "\x00", "x" * 3_000_000, "é" * 100_000, "\u202e" * 500]
    vectors = np.array(embedder.embed(poison))
    assert np.isfinite(vectors).all()
    assert np.abs(vectors[0] - embedder.embed(["fine"])[0]).max() < 1e-5


def test_a_text_the_model_fails_on_is_left_blank_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    embedder = SentenceEmbedder(batch=3)
    features = embedder._features
    (poison,) = embedder._pieces.ids(["poison"])

    def fail_on_poison(batch: list[list[int]]) -> dict:
        if any(poison[1] in one for one in batch):
            raise RuntimeError("kernel")
        return features(batch)

    monkeypatch.setattr(embedder, "_features", fail_on_poison)
    with caplog.at_level(logging.WARNING):
        good, bad, also_good = embedder.embed(["one", "poison", "two"])
    assert bad == pytest.approx(embedder.embed([""])[0], abs=1e-5)
    assert good == pytest.approx(embedder.embed(["one"])[0], abs=1e-5)
    assert also_good == pytest.approx(embedder.embed(["two"])[0], abs=1e-5)
    assert len(caplog.records) == 1
    assert "poison" not in caplog.text
    with pytest.raises(FileError) as refused:  # a broken model is not papered over
        embedder.embed(["poison", "poison pill"])
    assert refused.value.code == "embedding_failed"


def test_tokens_are_counted_as_the_model_sees_them(embedder: TextEmbedder) -> None:
    assert embedder.max_tokens == 256
    assert embedder.count_tokens("") == 2
    assert embedder.count_tokens("word " * 400) == 402


def test_identity_follows_the_content_and_not_the_place(embedder: SentenceEmbedder, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(find_model("embedded"), copy)
    fingerprint = embedder.identity.split("@")[1]
    assert SentenceEmbedder(str(copy)).identity == f"model@{fingerprint}"
    with next(copy.rglob("*.safetensors")).open("ab") as file:
        file.write(b" ")
    assert SentenceEmbedder(str(copy)).identity != f"model@{fingerprint}"
    assert SentenceEmbedder(str(copy)).cutting == embedder.cutting, "other weights cut texts the same way"
    with (copy / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert SentenceEmbedder(str(copy)).identity != f"model@{fingerprint}"
    retokenized = SentenceEmbedder(str(copy)).cutting
    assert retokenized != embedder.cutting
    (copy / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    assert SentenceEmbedder(str(copy)).cutting != retokenized
    assert len(embedder.identity) < 64


def test_half_precision_is_another_identity_and_nearly_the_same_vectors(embedder: TextEmbedder) -> None:
    half = SentenceEmbedder(batch=4, dtype="bfloat16")
    assert half.identity == f"{embedder.identity}:bfloat16"
    exact, rounded = np.array(embedder.embed(TEXTS)), np.array(half.embed(TEXTS))
    assert np.abs(np.linalg.norm(rounded, axis=1) - 1).max() < 1e-5
    assert (exact * rounded).sum(1).min() > 0.999
    assert not np.array_equal(exact, rounded)


def test_vectors_are_unit_also_where_the_model_does_not_see_to_it(
    embedder: TextEmbedder, tmp_path: Path
) -> None:
    for entry in find_model("embedded").iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").unlink()
    (tmp_path / "modules.json").write_text(json.dumps(modules[:2]))  # without the last, which normalises
    expected = embedder.embed(TEXTS[:1])[0]
    assert SentenceEmbedder(str(tmp_path)).embed(TEXTS[:1])[0] == pytest.approx(expected, abs=1e-5)


def test_threads_share_one_embedder() -> None:
    embedder = SentenceEmbedder()
    results: dict[int, list[float]] = {}

    def work(number: int) -> None:
        for _ in range(3):
            results[number] = embedder.embed([TEXTS[number]])[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = embedder.embed(TEXTS[:6])
    assert all(results[number] == pytest.approx(expected[number], abs=1e-5) for number in range(6))


def test_a_folder_that_is_no_model_is_refused_with_what_is_wanted(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent", Path("sentence-transformers/all-MiniLM-L6-v2")):
        with pytest.raises(UserError, match="safetensors"):
            SentenceEmbedder(str(folder))


def test_a_question_takes_one_thread_and_changes_nobody_elses(
    embedder: SentenceEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    embedder.embed(["a"])
    features, seen = embedder._features, []
    monkeypatch.setattr(embedder, "_features", lambda batch: (seen.append(torch.get_num_threads()), features(batch))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        embedder.embed(["How long is parental leave?"])
        embedder.embed(["word " * 200])
        assert seen == [1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_batches_are_even_padded_little_and_as_many_as_there_are_threads() -> None:
    widths = [16 * (1 + n % 16) for n in range(64)]
    alone = _by_length(widths, texts=32, tokens=1024, lanes=1)
    assert sorted(index for batch in alone for index in batch) == list(range(64))
    padded = [len(batch) * max(widths[index] for index in batch) for batch in alone]
    assert max(padded) <= 1024
    assert min(padded) > 0.6 * max(padded), "no small one is left over"
    assert sum(padded) < 1.1 * sum(widths)
    assert len(_by_length(widths, texts=32, tokens=1024, lanes=4)) % 4 == 0
    assert [len(batch) for batch in _by_length([16] * 40, texts=32, tokens=1024, lanes=2)] == [20, 20]
    assert _by_length([64], texts=32, tokens=1024, lanes=8) == [[0]]
    assert _by_length([], texts=32, tokens=1024, lanes=2) == []
    assert [len(batch) for batch in _by_length([512] * 5, texts=2, tokens=sys.maxsize, lanes=1)] == [2, 2, 1]


def test_batches_computed_beside_each_other_are_those_computed_one_after_the_other(
    embedder: SentenceEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    texts = [f"Section {n}: " + "the lessee pays the rent in advance. " * (n % 7 * 4) for n in range(40)]
    expected = np.array(embedder.embed(texts))
    beside = SentenceEmbedder(batch=4)
    beside.embed(["a"])
    features, seen = beside._features, []
    both = threading.Barrier(2, timeout=60)

    def watched(batch: list[list[int]]) -> dict:
        if len(seen) < 2:
            seen.append((threading.current_thread().name[:6], torch.get_num_threads()))
            both.wait()
        return features(batch)

    monkeypatch.setattr(beside, "_features", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert np.abs(np.array(beside.embed(texts)) - expected).max() < 1e-5
    finally:
        torch.set_num_threads(before)
    assert seen == [("encode", 1)] * 2, "two at once, a thread each"
